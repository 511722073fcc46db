"""A line of every command, for the tests that run all of them. A new command adds one here."""

from typing import NamedTuple


class CommandLine(NamedTuple):
    """A command line: TRACE is a trace, SOUND another one, NEW a path where nothing is.

    Attributes:
        extra: the extra that it needs; None: it fails without a server, a display or more arguments.
        reads: whether it reads TRACE, which may be forged.
    """

    line: str
    extra: str | None = ""
    reads: bool = True

    def words(self, trace: str, sound: str, new: str) -> list[str]:
        places = {"TRACE": trace, "SOUND": sound}
        return [places.get(word, word).replace("NEW", new) for word in self.line.split()]


LINES = [
    CommandLine("record CartPole-v1 -o NEW --episodes 1 --seed 0", reads=False),
    CommandLine("play TRACE -o NEW --keys no-such-file.toml", None),
    CommandLine("branch TRACE --step 1 --episodes 1 -o NEW"),
    CommandLine("remake TRACE -o NEW"),
    CommandLine("train CartPole-v1 -o NEW --steps 64 --num-envs 1 -j 1 --quiet", "train", reads=False),
    CommandLine("ls TRACE --json"),
    CommandLine("info TRACE"),
    CommandLine("stats TRACE --json"),
    CommandLine("compare TRACE SOUND"),
    CommandLine("cat TRACE --format jsonl"),
    CommandLine("sql SELECT TRACE", None, reads=False),
    CommandLine("view TRACE -o NEW.html"),
    CommandLine("replay TRACE"),
    CommandLine("render TRACE -o NEW/x.cast --episodes 0", None),
    CommandLine("verify TRACE", reads=False),
    CommandLine("audit TRACE --episodes 1 --steps 3"),
    CommandLine("shell TRACE"),
    CommandLine("diff TRACE SOUND"),
    CommandLine("lint TRACE --notes --json"),
    CommandLine("check TRACE"),
    CommandLine("edit repair TRACE -o NEW"),
    CommandLine("proof verify TRACE --make builtins:dict", None, reads=False),
    CommandLine("doctor", reads=False),
    CommandLine("edit merge TRACE SOUND -o NEW"),
    CommandLine("export TRACE --to jsonl -o NEW", reads=False),
    CommandLine("import TRACE -o NEW", None, reads=False),
    CommandLine("info TRACE --card -"),
    CommandLine("help select", reads=False),
    CommandLine("push TRACE file:///dev/null/nowhere", None, reads=False),
    CommandLine("pull file:///dev/null/nowhere NEW", None, reads=False),
]
