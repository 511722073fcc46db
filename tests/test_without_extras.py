"""Without extras, everything works or names the pip command of what it needs."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import forked_python
import gymnasium
import pytest
from bare_interpreter import make_bare
from command_lines import LINES as ALL
from gym_trace_cli.main import COMMANDS
from packaging.requirements import Requirement
from snippets import blocks, run_page
from test_documents import DOCS, PAGES, ROOT

import gym_trace
from gym_trace.exchange.formats.registry import exporters, importers

README = ROOT / "README.md"
DEPENDENCIES = ("numpy", "gymnasium")
# Lines of commands, and the extra that each needs. "own.py" is in the current directory.
LINES = {
    **{" ".join(one.words("t", "t", f"new-{i}")): one.extra for i, one in enumerate(ALL) if one.extra is not None},
    "record CartPole-v1 -o workers --episodes 2 -j 1 --seed 0": "",
    "record CartPole-v1 -o shard --episodes 2 --shard 0/2 --seed 0": "",
    "record CartPole-v1 -o x --episodes 1 --policy onnx:own.py": "onnx",
    "record CartPole-v1 -o x --episodes 1 --policy sb3:own.py": "sb3",
    "record CartPole-v1 -o x --episodes 1 --policy run:x": "train",
    "record CartPole-v1 -o x --episodes 1 -j 1 --tensorboard x": "tensorboard",
    "record CartPole-v1 -o x --episodes 1 --video every:1": "video",
    "play CartPole-v1 -o x": "play",
    "ls s3://bucket/t": "remote",
    "stats t --plot x.svg": "plot",
    "compare t --plot x.svg": "plot",
    "sql t 'SELECT 1'": "sql",
    "view t --no-browser": "view",
    "replay t --callback own:see": "",
    "replay t --human": "classic-control",
    "render t --episodes 0 -o x.mp4": "video",
    "render t -o x --format gif": "video",
    "proof verify t --make own:see": "train",
    "edit filter t -o filtered --where 'steps > 0'": "",
    "edit annotate filtered --fact author=me": "",
    "push t s3://bucket/t": "remote",
    "pull s3://bucket/t x": "remote",
    **{f"export t --to {name} -o out-{name}": entry.extra for name, entry in exporters().items()},
    **{f"import x --from {name} -o in-{name}": entry.extra for name, entry in importers().items() if entry.extra},
    "export t --to jsonl -o lines.jsonl": "",
    "import lines.jsonl -o again": "",
}
SCRIPT = """
import json, sys
from click.testing import CliRunner
from gym_trace_cli.main import cli

runs = [CliRunner().invoke(cli, words, prog_name="gym-trace") for words in json.loads(sys.argv[1])]
print(json.dumps([(run.exit_code, run.output) for run in runs]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_bare(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("place")
    with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory / "t") as env:
        gym_trace.record_episodes(env, episodes=2, seed=0)
    (directory / "own.py").write_text("def see(*_):\n    return {}, see\n")
    return directory


def test_every_command_works_or_names_its_extra(python: str, place: Path) -> None:
    results = dict(zip(LINES, results_of(python, map(shlex.split, LINES), place)))
    assert {word for line in LINES for word in line.split()} > set(COMMANDS)
    for line, extra in LINES.items():
        code, output = results[line]
        assert code == bool(extra), f"{line}\n{output}"
        assert "Traceback" not in output
        assert not extra or re.search(rf"pip install [\"'](gym-trace|gymnasium)\[{extra}\]", output), (
            f"{line}\n{output}"
        )
    assert not list(place.glob("x*"))


def test_the_help_of_every_command_needs_no_extra(python: str, tmp_path: Path) -> None:
    for name, (code, output) in zip(COMMANDS, results_of(python, ([name, "--help"] for name in COMMANDS), tmp_path)):
        assert code == 0, output
        assert f"gym-trace {name} " in output


def test_an_anchor_is_written_without_pytorch(python: str, tmp_path: Path) -> None:
    ((code, output),) = results_of(python, [["proof", "anchor", "here", "anchors.txt"]], tmp_path)
    assert (code, output) == (
        1,
        f"error: {tmp_path / 'here'}: has no log of updates: neither proof.json nor run.json\n",
    )


def results_of(python: str, commands: Iterable[Sequence[str]], cwd: Path) -> list[tuple[int, str]]:
    """Run commands in one process; return the exit code and the output of each."""
    asked = json.dumps(list(commands))
    done = forked_python.run(
        [python, "-c", SCRIPT, asked], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout.splitlines()[-1])]


def test_every_name_can_be_looked_at(python: str, tmp_path: Path) -> None:
    script = """
import inspect, pydoc, gym_trace, gym_trace_cli.player.player
for module in (gym_trace, gym_trace.exchange, gym_trace.proof, gym_trace.training, gym_trace.wrappers):
    inspect.getmembers(module)
    assert pydoc.render_doc(module)
    for name in module.__dict__.get("__all__", ()):
        getattr(module, name)
gym_trace.viewer.serve, gym_trace.edit.merge, gym_trace.playback.Trace, gym_trace.replay_env.ReplayEnv
"""
    done = forked_python.run([python, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("used", "error", "extra"),
    [
        ("gym_trace.train(None, 'x')", "MissingExtra", "gym-trace[train]"),
        ("from gym_trace.proof import UpdateLog; UpdateLog(None)", "MissingExtra", "gym-trace[train]"),
        ("from gym_trace.training import verify_run; verify_run('x')", "MissingExtra", "gym-trace[train]"),
        ("from gym_trace.exchange import sb3", "MissingExtra", "gym-trace[sb3]"),
        ("gym_trace.exchange.sb3.replay_buffer('x')", "AttributeError", "gym-trace[sb3]"),
        ("from gym_trace import pettingzoo", "MissingExtra", "gym-trace[pettingzoo]"),
        ("gym_trace.dm_env.record(None)", "AttributeError", "gym-trace[dm-env]"),
        ("gym_trace.viewer.serve('t')", "MissingExtra", "gym-trace[view]"),
        ("gym_trace.open_trace('t').to_duckdb()", "MissingExtra", "gym-trace[sql]"),
        ("gym_trace.open_trace('t').to_dataset()", "MissingExtra", "gym-trace[parquet]"),
        ("gym_trace.results.Partition('t')", "MissingExtra", "gym-trace[parquet]"),
        ("gym_trace.open_trace('t').to_pandas()", "MissingExtra", "gym-trace[pandas]"),
        ("gym_trace.open_trace('s3://t')", "MissingExtra", "gym-trace[remote]"),
    ],
)
def test_a_name_that_needs_an_extra_names_it(used: str, error: str, extra: str, python: str, place: Path) -> None:
    done = forked_python.run([python, "-c", f"import gym_trace\n{used}"], cwd=place, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert re.match(rf"(gym_trace\.errors\.)?{error}: ", last)
    assert f"pip install '{extra}'" in last


def test_type_checkers_report_a_name_that_is_wrong(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    names = ("open_trace", "open_trce", "train", "viewer.serve", "viewer.sreve", "proof.verify", "proof.verfy")
    (tmp_path / "names.py").write_text("import gym_trace\n" + "".join(f"gym_trace.{name}\n" for name in names))
    sources = [str(ROOT / "gym_trace" / f"{module}.py") for module in ("__init__", "viewer", "proof")]
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip", *sources, "names.py"]  # quick
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert re.findall(r"names.py:.* attribute \"(\w+)\"", done.stdout) == ["open_trce", "sreve", "verfy"], done.stdout


def test_the_readme_runs(python: str, tmp_path: Path) -> None:
    run_page(README, tmp_path, python)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).with_suffix("").as_posix())
def test_the_first_example_of_a_page_runs_or_names_its_extra(page: Path, python: str, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    examples = [block for block in blocks(text) if block.language in ("bash", "python") and block.title is None]
    first = next((example for example in examples if example.needs is not None), None)
    if (
        first is None
        or re.match("timeout|for ", first.code)
        or (first.needs and not first.code.startswith("gym-trace"))
    ):
        return  # none, a long one, or one that imports or runs what is missing
    lines = text.splitlines(keepends=True)
    end = next(number for number in range(first.line, len(lines)) if lines[number].strip() == "```")
    (tmp_path / page.name).write_text(re.sub("<!-- needs: .* -->", "", "".join(lines[: end + 1])))
    if not first.needs:
        assert run_page(tmp_path / page.name, tmp_path, python) == 1
        return
    with pytest.raises(AssertionError, match=r"exit code 1, not 0\nerror: .*pip install 'gym-trace\["):
        run_page(tmp_path / page.name, tmp_path, python)


def packages_of(named: str) -> set[str]:
    """Return the packages that `pip install NAMED` installs, such as pandas, or gym-trace[sql]."""
    wanted = Requirement(named)
    try:
        needed = [Requirement(one) for one in requires(wanted.name) or ()]
    except PackageNotFoundError:
        needed = []
    return {wanted.name} | {
        one.name
        for one in needed
        if one.marker and any(one.marker.evaluate({"extra": extra}) for extra in wanted.extras)
    }


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_says_how_to_install_what_its_examples_need(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    needed = {Requirement(one).name for block in blocks(text) for one in block.needs or ()} - {*DEPENDENCIES}
    text = text.replace("'.[", "'gym-trace[")  # from a clone
    words = [word.strip("'\"") for line in re.findall(r"pip install ([^`\n]*)", text) for word in line.split()]
    named = [word for word in words if re.fullmatch(r"[\w-]+(\[[\w,-]+\])?", word)]
    assert needed <= set[str]().union(*map(packages_of, named))


def test_the_readme_installs_the_extras_of_its_lines_and_no_others() -> None:
    text = README.read_text(encoding="utf-8")
    (named,) = re.findall(r"pip install '\.\[(.*)\]'", text)
    extras = {extra for line, extra in LINES.items() if extra and f"`gym-trace {line.split()[0]} " in text}
    needed = {Requirement(one).name for block in blocks(text) for one in block.needs or ()}
    assert needed <= packages_of(f"gym-trace[{named}]")
    used = {one for one in named.split(",") if one in extras or needed & packages_of(f"gym-trace[{one}]")}
    assert used == set(named.split(",")) >= extras & {"view", "sql", "play", "train"}
