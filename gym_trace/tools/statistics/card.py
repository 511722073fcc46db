"""Dataset card of a trace for a hub: Markdown with Hugging Face metadata."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gym_trace.data.packing import pack_lenient
from gym_trace.errors import InvalidOption
from gym_trace.format.facts import KNOWN, known
from gym_trace.playback.episode_index import index_of, whole_of
from gym_trace.playback.trace import Trace, TraceLike, as_trace
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.printable import printable
from gym_trace.storage.staging import write_marked
from gym_trace.tools.statistics.describe import plain, space_text
from gym_trace.tools.statistics.summary import summarize

_HUGE = 1e300  # returns of this size or more are not used in calculations
_MOST_CHARACTERS = 20_000  # limit of a text with line breaks
_MOST_LISTED = 8  # environments, policies …; more are only counted
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "1B<n<10B",
          "10B<n<100B", "100B<n<1T", "n>1T")  # fmt: skip
# Licences of data and code that Hugging Face knows by name.
_LICENSES = (
    "apache-2.0 mit afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 "
    "cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 "
    "cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 "
    "cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 agpl-3.0 gfdl gpl "
    "gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc ms-pl mpl-2.0 odc-by odbl openrail osl-3.0 postgresql ofl-1.1 ncsa "
    "unlicense zlib pddl unknown other"
)
MARK = "<!-- Written by gym-trace info --card, which overwrites this file. To keep your edits, delete this line. -->"
_USE = """\
```python
import gym_trace

trace = gym_trace.open_trace(".")  # the directory of this card
for episode in trace.scan():
    episode.observations, episode.actions, episode.rewards
```"""


def dataset_card(
    trace: TraceLike, path: str | os.PathLike[str] | None = None, *, audit: Mapping[str, Any] | None = None
) -> str:
    """Return a dataset card: Markdown with a YAML header, for the README.md of a Hugging Face dataset.

    The card shows trace.facts (author, license, description, tags, homepage, citation, reference_scores) and describes
    the trace: environments, spaces, counts, returns, origin. Steps are read only if rewards are several numbers each.
    All text of the trace is escaped: it cannot add markup.

    Args:
        trace: a trace, a view, or a directory.
        path: also write the card to this file, such as DIR/README.md. It replaces an earlier card that has the line
            of MARK.
        audit: an audit of the recorded environment, whose claims the card lists: AuditReport.to_json(), or what
            `gym-trace audit --json` has printed.

    Raises:
        TraceNotFound: no trace in the directory.
        InvalidOption: audit is not a report, or is about another environment.
        TraceExists: the file at path lacks this line.
        OSError: the file is a link or a directory, or cannot be written.

    Examples:
        >>> card = gym_trace.dataset_card("traces/cartpole")
        >>> "**Episodes**: 20" in card
        True
    """
    trace = as_trace(trace)
    facts, summary = trace.facts, summarize(trace)
    known_facts = known(facts)
    counts = np.bincount(index_of(trace)["writer"], minlength=len(index_of(trace).readers)).tolist()
    readers = [(reader, count) for reader, count in zip(index_of(trace).readers, counts) if count] or [
        (reader, 0) for reader in index_of(trace).readers
    ]
    ids = _counted((_text(reader.about_or_empty.environment.get("id")), count) for reader, count in readers)
    names = [name for name, _ in ids if name]
    title = ", ".join(names[:3]) + (" …" if len(names) > 3 else "") or trace.directory.name
    sections = [
        _header(title, names, known_facts, summary["steps"]),
        MARK,
        f"# {prose(title)}",
        *_about(known_facts),
        "## What is recorded",
        *_recorded(trace, summary),
        "## The environment",
        _bullets(_environment(readers, ids)),
        *([] if audit is None else _audit(audit, names)),
        *_scores(known_facts.get("reference_scores", {}), summary["return"]["mean"]),
        "## How it was recorded",
        _bullets(_origin(trace, readers)),
        *_other_facts({key: value for key, value in facts.items() if key not in KNOWN}),
        "## How to read it",
        _USE,
        "`gym-trace verify .` replays every episode in its environment and compares it bit for bit.",
        *(["## Citation", block(known_facts["citation"])] if "citation" in known_facts else []),
    ]
    text = "\n\n".join(section for section in sections if section) + "\n"
    if path is not None:
        write_marked(path, text, MARK)
    return text


def _header(title: str, names: list[str], facts: dict[str, Any], steps: int) -> str:
    licence = str(facts.get("license", ""))
    is_known = licence.lower() in _LICENSES.split()
    tags = ["reinforcement-learning", "gymnasium", "gym-trace", *names[:_MOST_LISTED], *facts.get("tags", ())]
    return front_matter(
        {
            "pretty_name": cut(title, 200),
            **({"license": licence.lower() if is_known else "other"} if licence else {}),
            **({} if is_known or not licence else {"license_name": cut(licence, 200)}),
            "task_categories": ["reinforcement-learning"],
            "tags": [cut(tag, 100) for tag in dict.fromkeys(tags)],
            "size_categories": [_SIZES[min(10, max(0, len(str(steps)) - 3))]],
            "viewer": False,  # the viewer would show the manifests as data
        }
    )


def _audit(audit: Mapping[str, Any], names: list[str]) -> Iterator[str]:
    """Yield the section on an audit. Raises InvalidOption."""
    try:
        about, day = str(audit["environment"]), str(audit["date"])
        claims = [(str(claim["name"]), f"{claim['verdict']}: {claim['text']}") for claim in audit["claims"]]
        versions = ", ".join(f"{name} {version}" for name, version in audit["versions"].items())
    except (LookupError, TypeError, AttributeError) as error:
        raise InvalidOption("audit: not a report; pass what gym-trace audit --json has printed") from error
    if names and about not in names:
        raise InvalidOption(f"audit: about {printable(about)}; the trace is of {printable(', '.join(names))}")
    yield "## What the environment promises and keeps"
    yield f"`gym-trace audit` of {prose(about)}, {prose(day)}, with {prose(versions)}. It played other episodes."
    yield _bullets((prose(name), prose(text)) for name, text in claims)


def _about(facts: dict[str, Any]) -> Iterator[str]:
    if "description" in facts:
        yield paragraphs(facts["description"])
    bullets = [("Author", prose(facts["author"]))] if "author" in facts else []
    bullets += [("Licence", prose(facts["license"]))] if "license" in facts else []
    bullets += [("Homepage", link(facts["homepage"]))] if "homepage" in facts else []
    bullets += [("Tags", ", ".join(prose(tag, 100) for tag in facts["tags"][:50]))] if "tags" in facts else []
    yield _bullets(bullets)


def _recorded(trace: Trace, summary: dict[str, Any]) -> Iterator[str]:
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in summary["outcomes"].items() if count)
    first, last = _day(index_of(trace)["start_time"], np.min), _day(index_of(trace)["end_time"], np.max)
    bullets = [
        ("Episodes", f"{summary['episodes']:,}" + (f" ({outcomes})" if outcomes else "")),
        ("Steps", f"{summary['steps']:,}"),
    ]
    if whole_of(trace) is trace:
        bullets.append(("Bytes", f"{sum(reader.size for reader in index_of(trace).readers):,}"))
    if first:
        bullets.append(("When", first if last in (first, "") else f"{first} to {last}"))
    if trace.damage:
        bullets.append(("Damaged ranges", f"{len(trace.damage):,}; `gym-trace check` lists them"))
    yield _bullets(bullets)
    objectives = summary["objectives"]
    returns = [(f"return[{i}]", objective) for i, objective in enumerate(objectives)] or [("return", summary["return"])]
    names = ("mean", "std", "min", "median", "max")
    rows = [
        (name.replace("[", "\\["), *(_number(values[key]) for key in names))
        for name, values in [*returns, ("length", summary["length"])]
        if values["count"]
    ]
    if rows:
        yield table([f"of {summary['complete']:,} complete episodes", *names], rows)
    splits = (
        summarize(trace, by="split")["groups"] if len({reader.split for reader in index_of(trace).readers}) > 1 else {}
    )
    if splits:
        rows = [
            (prose(name, 100) or "–", f"{group['episodes']:,}", f"{group['steps']:,}", _mean(group))
            for name, group in list(splits.items())[: 4 * _MOST_LISTED]
        ]
        rows += [(rest, "", "", "") for rest in _rest(len(splits), 4 * _MOST_LISTED)]
        yield table(["split", "episodes", "steps", "mean return"], rows)


def _environment(readers: list[tuple[WriterReader, int]], ids: list[tuple[str, int]]) -> Iterator[tuple[str, str]]:
    if len(ids) == 1:
        yield "Id", code(ids[0][0]) if ids[0][0] else "none"
    else:
        listed = [f"{code(name, 100) if name else 'none'} ({count:,} episodes)" for name, count in ids[:_MOST_LISTED]]
        yield "Ids", ", ".join([*listed, *_rest(len(ids), _MOST_LISTED)])
    first = readers[0][0].about_or_empty
    if kind := _text(first.environment.get("class")):
        yield "Class", code(kind)
    for title, name in (("Observations", "observation_space"), ("Actions", "action_space")):
        variants = {pack_lenient(reader.about_or_empty.raw.get(name))[0] for reader, _ in readers}
        yield title, code(space_text(first.raw.get(name))) + _others(variants)
    wrappers = first.environment.get("wrappers")
    if isinstance(wrappers, list) and wrappers:
        yield "Wrappers", ", ".join(code(_text(name).rpartition(".")[2], 100) for name in wrappers[:20])
    versions: dict[str, dict[str, None]] = {}
    for reader, _ in readers:
        for package, version in list(reader.about_or_empty.versions.items())[:50]:
            versions.setdefault(_text(package), {})[_text(version)] = None
    listed = [f"{package} {', '.join(list(found)[:_MOST_LISTED])}" for package, found in list(versions.items())[:50]]
    yield "Versions", ", ".join(code(text, 100) for text in listed)


def _scores(scores: dict[str, Any], mean: float | None) -> Iterator[str]:
    if not scores:
        return
    yield "## Reference scores"
    rows = [(prose(name, 100) or "–", _score(score)) for name, score in list(scores.items())[: 4 * _MOST_LISTED]]
    yield table(["policy", "return"], rows)
    random, expert = _float(scores.get("random")), _float(scores.get("expert"))
    if mean is not None and random is not None and expert is not None and expert != random:
        score = 100 * (mean - random) / (expert - random)
        yield f"Normalised mean return: {_number(score)} (random is 0, expert is 100)."


def _origin(trace: Trace, readers: list[tuple[WriterReader, int]]) -> Iterator[tuple[str, str]]:
    makers = _counted((_maker(reader), count) for reader, count in readers)
    for text, count in makers[:_MOST_LISTED]:
        episodes = f" ({count:,} episodes)" if len(makers) > 1 else ""
        yield "Made by", (text or "unknown") + episodes
    if len(makers) > _MOST_LISTED:
        yield "Made by", f"{len(makers) - _MOST_LISTED:,} others"
    seeded = int(np.count_nonzero(index_of(trace)["seed"] != -1))
    yield "Seeds", f"{seeded:,} of {len(trace):,} episodes were reset with a seed"
    yield "Writers", f"{len(readers):,}"
    platforms = _counted((_text(reader.about_or_empty.raw.get("platform")), count) for reader, count in readers)
    names = [code(name, 200) for name, _ in platforms[:_MOST_LISTED] if name]
    yield "On", ", ".join([*names, *_rest(len(platforms), _MOST_LISTED)])
    metadata = readers[0][0].about_or_empty.metadata
    variants = {pack_lenient(reader.about_or_empty.metadata)[0] for reader, _ in readers}
    if metadata is not None or len(variants) > 1:
        yield "Metadata", code(json.dumps(plain(metadata), ensure_ascii=False)) + _others(variants)


def _maker(reader: WriterReader) -> str:
    """Return command, policy and commit as Markdown. Fields recorded only on request, such as argv, are omitted."""
    raw = reader.about_or_empty.raw.get("provenance")
    provenance = raw if isinstance(raw, dict) else {}
    labels = {"command": "", "policy": "policy ", "commit": "commit "}
    parts = [label + code(_text(provenance[name]), 100) for name, label in labels.items() if provenance.get(name)]
    is_dirty = provenance.get("commit") and provenance.get("dirty") is True
    return ", ".join(parts) + (" and uncommitted changes" if is_dirty else "")


def _other_facts(facts: dict[str, Any]) -> Iterator[str]:
    if facts:
        yield "## More"
        yield _bullets((prose(key, 100), code(json.dumps(plain(value), ensure_ascii=False))) for key, value in
                       list(facts.items())[: 4 * _MOST_LISTED])  # fmt: skip


# -- helpers ----------------------------------------------------------------------------------------------------------


def _bullets(pairs: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- **{name}**: {value}" for name, value in pairs if value)


def _counted(pairs: Iterator[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the names with the sums of their counts, the largest first."""
    counts: Counter[str] = Counter()
    for name, count in pairs:
        counts[name] += count
    return counts.most_common()


def _others(variants: set[bytes]) -> str:
    """Return a suffix that counts the other variants."""
    number = len(variants) - 1
    return f" (and {number:,} {'other' if number == 1 else 'others'})" if number else ""


def _rest(number: int, most: int) -> list[str]:
    return [f"{number - most:,} more"] if number > most else []


def _text(value: Any) -> str:
    return "" if value is None else printable(value if isinstance(value, str) else str(plain(value)))


def _day(times: Any, which: Any) -> str:
    known_times = times[~np.isnat(times)]
    return str(np.datetime_as_string(which(known_times), "D")) if len(known_times) else ""


def _mean(group: dict[str, Any]) -> str:
    return _score([objective["mean"] for objective in group["objectives"]] or group["return"]["mean"])


def _score(score: Any) -> str:
    return ", ".join(map(_number, score)) if isinstance(score, list) else _number(score)


def _float(score: Any) -> float | None:
    return float(score) if isinstance(score, (int, float)) and abs(score) < _HUGE else None


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if not -1e15 < value < 1e15:
        return f"{float(value):.4g}" if abs(value) < _HUGE else "beyond all bounds"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == math.floor(value) else f"{value:.4g}"


# -- untrusted text as inert Markdown and YAML: no HTML, no images, no hidden links -----------------------------------

_MARKUP = re.compile(r"([\\`*_{}\[\]<>&~|$#])")
_BEGINNING = re.compile(r"^(?:([-+=:])|(\d+)([.)]))")  # start of a list item, a heading underline or a table
_LINK = re.compile(r"https?://[A-Za-z0-9.-]+(:\d+)?(/[\w.~!$'*+,;=:@%/?#&-]*)?", re.ASCII)


def front_matter(values: Mapping[str, Any]) -> str:
    """Return a YAML header between two lines of dashes. Values are JSON, which is valid YAML."""
    lines = (f"{key}: {json.dumps(_printable(value), ensure_ascii=False)}" for key, value in values.items())
    return "\n".join(["---", *lines, "---"])


def _printable(value: Any) -> Any:
    """Escape unprintable characters in text: YAML does not allow them."""
    if isinstance(value, str):
        return printable(value)
    return list(map(_printable, value)) if isinstance(value, list) else value


def prose(text: str, most: int = 300) -> str:
    """Return text on one line, escaped."""
    return _escaped(cut(printable(" ".join(text.split())), most))


def paragraphs(text: str) -> str:
    """Return text escaped, with its line breaks."""
    return "\n".join(_escaped(printable(line.strip())) for line in cut(text, _MOST_CHARACTERS).strip().splitlines())


def code(text: str, most: int = 600) -> str:
    """Return text as inline code on one line; not for tables."""
    line = cut(printable(" ".join(text.split())), most) or " "
    fence = "`" * (1 + _longest_run(line))
    space = " " if line[0] in "` " or line[-1] in "` " else ""
    return f"{fence}{space}{line}{space}{fence}"


def block(text: str) -> str:
    lines = [printable(line) for line in cut(text, _MOST_CHARACTERS).strip().splitlines()]
    fence = "`" * max(3, 1 + max(map(_longest_run, lines), default=0))
    return "\n".join([fence, *lines, fence])


def link(address: str) -> str:
    """Return a link if the address is a plain web address; otherwise the escaped text."""
    return f"<{address}>" if len(address) < 500 and _LINK.fullmatch(address) else prose(address)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells must be Markdown."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cut(text: str, most: int) -> str:
    """Return text, shortened to `most` characters and an ellipsis."""
    return text if len(text) <= most else f"{text[:most]}…"


def _escaped(line: str) -> str:
    return _BEGINNING.sub(lambda found: f"{found[2] or ''}\\{found[1] or found[3]}", _MARKUP.sub(r"\\\1", line))


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
