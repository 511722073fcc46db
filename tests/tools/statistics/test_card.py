"""Dataset cards: YAML and Markdown that text of a trace cannot break out of."""

import json
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from scripted_env import Result, ToyEnv
from shell import ok, run

import gym_trace
from gym_trace.format.facts import write_facts
from gym_trace.storage.local import LocalStorage
from gym_trace.tools.statistics.card import block, code, link, paragraphs, prose

SAMPLES = sorted({path.parent for path in (Path(__file__).parents[3] / "sample_traces").rglob("*.manifest.jsonl")})
HEADINGS = ["What is recorded", "The environment", "How it was recorded", "How to read it"]
EVIL = (
    "---\n# `x`\n<img src=x onerror=alert(1)>\n![p](//a/b.png) [t](javascript:x)\n|a|b|\n|-|-|\n```\n"
    "\x1b[31m\ud800\u202e: {{"
)
MARKDOWN = MarkdownIt("commonmark").enable("table")


def front(card: str) -> dict[str, Any]:
    """Parse the YAML header: each line is a key and a JSON value."""
    start, head, _ = card.split("---\n", 2)
    assert not start
    return {key: json.loads(value) for key, _, value in (line.partition(": ") for line in head.splitlines())}


def tokens(markdown: str) -> list[Any]:
    return [token for outer in MARKDOWN.parse(markdown) for token in (outer, *(outer.children or ()))]


def headings(markdown: str) -> list[str]:
    body = MARKDOWN.parse(markdown)
    return [body[i + 1].content for i, token in enumerate(body) if token.type == "heading_open"]


def record(directory: Path, env: Any = None, episodes: int = 3, **options: Any) -> None:
    env = gymnasium.make("CartPole-v1", max_episode_steps=10) if env is None else env
    with gym_trace.TraceRecordingWrapper(env, directory, on_exist="append", **options) as recorded:
        gym_trace.record_episodes(recorded, episodes=episodes, seed=1)


def test_a_card_shows_facts_and_contents_of_the_trace(tmp_path: Path) -> None:
    record(tmp_path)
    facts = {
        "author": "Ada",
        "license": "CC-BY-4.0",
        "description": "Poles *fall*.\n\n- and fall",
        "tags": ["poles", "falling"],
        "homepage": "https://example.org/poles?a=1",
        "citation": "@misc{poles}",
        "reference_scores": {"random": 0, "expert": 20},
        "funding": {"by": "none"},
    }
    write_facts(LocalStorage(tmp_path), facts)
    card = gym_trace.dataset_card(tmp_path)
    assert front(card) == {
        "pretty_name": "CartPole-v1",
        "license": "cc-by-4.0",
        "task_categories": ["reinforcement-learning"],
        "tags": ["reinforcement-learning", "gymnasium", "gym-trace", "CartPole-v1", "poles", "falling"],
        "size_categories": ["n<1K"],
        "viewer": False,
    }
    mean = gym_trace.summarize(tmp_path)["return"]["mean"]
    for said in (
        "# CartPole-v1",
        "Poles \\*fall\\*.\n\n\\- and fall",
        "- **Author**: Ada",
        "- **Homepage**: <https://example.org/poles?a=1>",
        "- **Episodes**: 3 (",
        "- **Actions**: `Discrete(2)`",
        "| expert | 20 |",
        f"Normalised mean return: {5 * mean:.4g} (",
        "3 of 3 episodes were reset with a seed",
        "@misc{poles}",
        '- **funding**: `{"by": "none"}`',
    ):
        assert said in card
    assert headings(card.split("---\n", 2)[2])[1:] == [*HEADINGS[:2], "Reference scores", HEADINGS[2], "More",
                                                       HEADINGS[3], "Citation"]  # fmt: skip


@pytest.mark.parametrize(
    ("licence", "expected"),
    [("MIT", {"license": "mit"}), ("mit afl-3.0", {"license": "other", "license_name": "mit afl-3.0"}), ("", {})],
)
def test_an_unknown_licence_is_listed_as_other_with_its_name(
    tmp_path: Path, licence: str, expected: dict[str, str]
) -> None:
    record(tmp_path)
    write_facts(LocalStorage(tmp_path), {"license": licence})
    said = front(gym_trace.dataset_card(tmp_path))
    assert {key: said[key] for key in said if "license" in key} == expected


@pytest.mark.parametrize("steps", [0, 999, 1000, 10**6 - 1, 10**13])
def test_size_categories_are_those_of_hugging_face(steps: int) -> None:
    from gym_trace.tools.statistics.card import _header

    expected = {0: "n<1K", 999: "n<1K", 1000: "1K<n<10K", 10**6 - 1: "100K<n<1M", 10**13: "n>1T"}
    assert front(_header("x", [], {}, steps) + "\n")["size_categories"] == [expected[steps]]


def test_differing_writers_are_listed_separately(tmp_path: Path) -> None:
    record(tmp_path)
    record(tmp_path, gymnasium.make("MountainCar-v0", max_episode_steps=5), 2, split="e|val")
    ok("record", "CartPole-v1", "-o", tmp_path, "--on-exist", "append", "--episodes", 1, "--quiet")
    card = gym_trace.dataset_card(tmp_path)
    assert "- **Ids**: `CartPole-v1` (4 episodes), `MountainCar-v0` (2 episodes)" in card
    assert "(and 1 other)" in card
    assert "| e\\|val | 2 | 10 |" in card
    assert "`gym-trace record`, policy `random`" in card
    assert gym_trace.dataset_card(gym_trace.open_trace(tmp_path)[:2]).count("Bytes") == 0


def test_each_objective_of_a_return_has_a_row(tmp_path: Path) -> None:
    class Two(ToyEnv):
        observation_space = action_space = gymnasium.spaces.Discrete(2)

        def result(self, action: Any) -> Result:
            return Result(0, np.array([1.0, -2.0]), True)

    record(tmp_path, Two())
    write_facts(LocalStorage(tmp_path), {"reference_scores": {"random": [1, 2.5], "expert": 10**400}})
    card = gym_trace.dataset_card(tmp_path)
    assert "| return\\[1] | -2 | 0 | -2 | -2 | -2 |" in card
    assert "| random | 1, 2.5 |" in card
    assert "| expert | beyond all bounds |" in card


@pytest.mark.parametrize("directory", SAMPLES, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore")
def test_every_sample_has_a_card(directory: Path) -> None:
    card = gym_trace.dataset_card(directory)
    assert front(card)["size_categories"]
    assert set(HEADINGS) <= set(headings(card.split("---\n", 2)[2]))


def test_an_empty_trace_has_a_card(tmp_path: Path) -> None:
    gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path).close()
    assert "- **Episodes**: 0\n" in gym_trace.dataset_card(tmp_path)


def test_text_of_a_trace_cannot_add_markup(tmp_path: Path) -> None:
    class Odd(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Dict({EVIL.replace("\ud800", ""): gymnasium.spaces.Discrete(2)})
        action_space = gymnasium.spaces.Discrete(2)

    plain = EVIL.replace("\ud800", "")
    gym_trace.TraceRecordingWrapper(Odd(), tmp_path, split=plain, metadata={plain: plain}, uid="a").close()
    ok("record", "CartPole-v1", "-o", tmp_path, "--on-exist", "append", "--episodes", 1, "--quiet")
    evil: dict[str, Any] = dict.fromkeys(("author", "license", "description", "homepage", "citation"), EVIL)
    write_facts(LocalStorage(tmp_path), {**evil, "tags": [EVIL], "reference_scores": {EVIL: 1}, EVIL: EVIL})
    card = gym_trace.dataset_card(tmp_path)
    card.encode()
    assert all(line.isprintable() for line in card.split("\n"))
    body = card.split("---\n", 2)[2]
    assert front(card)["tags"][-1].startswith("---")
    found = [token for token in tokens(body) if token.type in ("html_inline", "html_block", "image", "link_open")]
    assert [token.content.strip() for token in found] == [
        next(line for line in body.splitlines() if line)
    ]  # our own mark
    assert headings(body) == [headings(body)[0], *HEADINGS[:2], "Reference scores", HEADINGS[2], "More", HEADINGS[3],
                              "Citation"]  # fmt: skip


@given(st.text(max_size=80) | st.text("`|\\*_<>[]()!#-+=:~&$0.1) \nwx", max_size=40))
def test_text_survives_a_markdown_renderer(text: str) -> None:
    for made in (prose(text), paragraphs(text)):
        kinds = {token.type for token in tokens(made)} - {"softbreak", "text", "text_special", "inline"}
        assert kinds <= {"paragraph_open", "paragraph_close"}
    (only,) = [token for token in tokens(f"- {code(text)}") if token.type == "code_inline"]
    assert only.content.strip() == prose_free(text)
    assert [token.type for token in tokens(block(text))] == ["fence"]
    row = tokens(f"| a | b |\n|---|---|\n| {prose(text)} | end |")
    assert sum(token.type == "td_open" for token in row) == 2
    assert link(text) == prose(text) or text.startswith("http")


def prose_free(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_or_writes_the_card_and_keeps_other_files(tmp_path: Path) -> None:
    record(tmp_path)
    shown = ok("info", tmp_path, "--card", "-").stdout
    assert shown == gym_trace.dataset_card(tmp_path)
    readme = tmp_path / "README.md"
    for _ in range(2):
        assert ok("info", tmp_path, "--card", readme).stdout == f"written to {readme}\n"
        assert readme.read_text(encoding="utf-8") == shown
    assert len(gym_trace.open_trace(tmp_path)) == 3
    assert not gym_trace.check_trace(tmp_path).damages
    readme.write_text("mine")
    refused = run("info", tmp_path, "--card", readme)
    assert refused.exit_code == 1
    assert "not an unchanged card" in refused.output
    assert readme.read_text() == "mine"


@pytest.mark.filterwarnings("default")
def test_errors_of_the_command_are_one_line(tmp_path: Path) -> None:
    missing = run("info", tmp_path / "none", "--card", "-")
    assert missing.exit_code == 1
    assert "no such directory" in missing.output
    record(tmp_path)
    (tmp_path / "facts.json").write_text("{")
    damaged = ok("info", tmp_path, "--card", "-")
    assert "facts.json: skipped all of it" in damaged.stderr
    assert "- **Damaged ranges**: 1; `gym-trace check`" in damaged.stdout
    assert run("info", tmp_path, "--card", tmp_path / "facts.json" / "README.md").exit_code == 1


@pytest.mark.parametrize("planted", ["dangling link", "pipe"])
def test_a_card_is_not_written_through_a_link_or_a_pipe(tmp_path: Path, planted: str) -> None:
    readme, outside = tmp_path / "README.md", tmp_path / "outside"
    readme.symlink_to(outside) if planted == "dangling link" else os.mkfifo(readme)
    result = run("info", SAMPLES[0], "--card", readme)
    assert result.exit_code == 1
    assert "a link, or no regular file" in result.stderr
    assert not outside.exists()


def test_a_card_lists_the_claims_of_an_audit_of_its_environment(tmp_path: Path) -> None:
    with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "t") as env:
        gym_trace.record_episodes(env, episodes=1, seed=0)
    claim = {"name": "seeded", "verdict": "no", "text": "seeds are ignored <b>"}
    report = {"environment": "CartPole-v1", "date": "2026-11-27", "versions": {"gymnasium": "1.4.0"}, "claims": [claim]}
    (tmp_path / "audit.json").write_text(json.dumps(report))
    card = ok("info", tmp_path / "t", "--card", "-", "--audit", tmp_path / "audit.json").stdout
    assert "`gym-trace audit` of CartPole-v1, 2026-11-27, with gymnasium 1.4.0." in card
    assert "- **seeded**: no: seeds are ignored \\<b\\>" in card
    for other, problem in (
        (report | {"environment": "Pong"}, "about Pong; the trace is of CartPole-v1"),
        ([], "not a"),
    ):
        (tmp_path / "audit.json").write_text(json.dumps(other))
        done = run("info", tmp_path / "t", "--card", "-", "--audit", tmp_path / "audit.json")
        assert done.exit_code == 2
        assert problem in done.stderr
    assert run("info", tmp_path / "t", "--card", "-", "--audit", tmp_path / "none.json").exit_code == 2
