"""The page as a file: what is in it, how large it is, and what may run in it."""

import base64
import gzip
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gymnasium
import numpy as np
import pytest
from PIL import Image
from scripted_env import Result, ScriptedEnv
from shell import run
from viewer_requests import asked, cartpoles, viewed

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.errors import TraceError
from gym_trace.tools.viewer import page
from gym_trace.tools.viewer.container import unpacked
from gym_trace.viewer import save_page

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cartpoles(tmp_path_factory.mktemp("saving") / "cartpole", 6)


def answers_in(target: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the head and the answers, by the request, that are in a page."""
    (data,) = re.findall(r'<script type="application/x-gym-trace-saved">([^<]*)</script>', target.read_text())
    head, arrays = unpacked(gzip.decompress(base64.b64decode(data)))
    return head, {name: array.tobytes() for name, array in arrays.items()}


def test_the_directory_of_a_saved_page_is_made(directory: Path, tmp_path: Path) -> None:
    save_page(directory, target=tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").is_file()


def test_a_saved_page_has_the_answers_of_a_server(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    saved = save_page(directory, target=target)
    assert saved == (6, 0, target.stat().st_size)
    head, found = answers_in(target)
    assert (head["page"], head["start"]) == ("saved", None)
    answers = viewed(directory)
    for url in found:
        if url.startswith("/api/steps"):
            assert json.loads(found[url]) == asked(answers, url)
        elif url.startswith("/api/plot") and url.endswith("&full=1"):
            _, arrays = unpacked(found[url])
            np.testing.assert_array_equal(arrays["y"], asked(answers, url.removesuffix("&full=1"))[1]["y"])
    for episode in range(6):
        names = [one["name"] for one in json.loads(found[f"/api/episode?trace=0&episode={episode}"])["columns"]]
        assert {"observations", "actions", "rewards", "return", "annotations.value"} <= set(names)
        for name in names:
            assert f"/api/plot?trace=0&episode={episode}&column={quote(name)}&full=1" in found
        assert f"/api/steps?trace=0&episode={episode}&from=0&count=32" in found
    assert unpacked(found["/api/episodes?trace=0"])[1]["episode"].tolist() == list(range(6))
    assert json.loads(found["/api/histograms?trace=0"])["total"] == 6
    assert json.loads(found["/api/traces"])[0]["episodes"] == 6


def test_chosen_episodes_keep_their_numbers(directory: Path, tmp_path: Path) -> None:
    save_page(open_trace(directory).select(sort="-return", limit=3), target=tmp_path / "page.html")
    _, found = answers_in(tmp_path / "page.html")
    best = open_trace(directory).select(sort="-return", limit=3).indices.tolist()
    assert unpacked(found["/api/episodes?trace=0"])[1]["episode"].tolist() == best
    assert {int(url.partition("episode=")[2]) for url in found if url.startswith("/api/episode?")} == set(best)


def test_two_episodes_open_side_by_side_with_their_difference(directory: Path, tmp_path: Path) -> None:
    save_page(open_trace(directory)[[1, 4]], target=tmp_path / "page.html")
    head, found = answers_in(tmp_path / "page.html")
    assert head["start"] == "#trace=0&episode=1&compare=0:4"
    assert json.loads(found["/api/compare?a=0%3A1&b=0%3A4"])["same"] is False
    assert "/api/compare?a=0%3A4&b=0%3A1" in found


def test_only_the_script_and_the_style_of_the_page_may_run(directory: Path, tmp_path: Path) -> None:
    save_page(directory, target=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_bytes()
    policy = re.search(rb'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    for tag, content in ((b"script", rb'<script type="module">(.*?)</script>'), (b"style", rb"<style>(.*?)</style>")):
        (inside,) = re.findall(content, text, re.DOTALL)
        assert base64.b64encode(hashlib.sha256(inside).digest()) in policy[1]
        assert inside == page.static_files()["app.js" if tag == b"script" else "app.css"]
    assert b"unsafe" not in policy[1]
    assert b"default-src 'none'" in policy[1]
    assert text.index(b"Content-Security-Policy") < text.index(b"<style>")
    assert not re.findall(rb'(?:src|href)="(?!data:,")', text[: text.index(b"<style>")])


def test_recorded_strings_are_packed_away(tmp_path: Path) -> None:
    space = gymnasium.spaces.Text(64)
    env = ScriptedEnv(space, gymnasium.spaces.Discrete(2), [(SCRIPT, [Result(SCRIPT, info={SCRIPT: SCRIPT})])])
    with TraceRecordingWrapper(env, tmp_path / "</script><b>", record_infos=True, split=SCRIPT) as recorder:
        recorder.reset()
        recorder.step(0)
    save_page(tmp_path / "</script><b>", target=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert SCRIPT not in text
    assert text.count("</script>") == 2
    assert "alert" in json.dumps([body.decode("latin-1") for body in answers_in(tmp_path / "page.html")[1].values()])


def test_a_page_to_send_does_not_say_where_the_trace_lies(directory: Path, tmp_path: Path) -> None:
    save_page(directory, target=tmp_path / "page.html")
    assert not [
        url for url, body in answers_in(tmp_path / "page.html")[1].items() if str(directory.parent).encode() in body
    ]


def test_pictures_are_saved_without_loss(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (20, 24, 32, 3), np.uint8)
    space = gymnasium.spaces.Box(0, 255, (24, 32, 3), np.uint8)
    env = ScriptedEnv(space, gymnasium.spaces.Discrete(2), [(rows[0], [Result(row) for row in rows[1:]])])
    with TraceRecordingWrapper(env, tmp_path / "t") as recorder:
        recorder.reset()
        for _ in range(19):
            recorder.step(0)
    save_page(tmp_path / "t", target=tmp_path / "page.html")
    _, found = answers_in(tmp_path / "page.html")
    for start in (0, 16):
        head, arrays = unpacked(
            found[f"/api/frames?trace=0&episode=0&column=observations&from={start}&count=16&scale=1"]
        )
        assert head["mime"] == "image/webp"
        for row, data in arrays.items():
            picture = np.asarray(Image.open(io.BytesIO(data.tobytes())).convert("RGB"))
            np.testing.assert_array_equal(picture, rows[int(row)])


def empty_page() -> int:
    return sum(len(page.static_files()[name]) for name in ("index.html", "app.js", "app.css"))


def test_episodes_that_do_not_fit_are_left_out(directory: Path, tmp_path: Path) -> None:
    most = empty_page() + 75_000
    saved = save_page(directory, target=tmp_path / "page.html", max_bytes=most)
    assert 0 < saved.episodes < 6
    assert saved.left_out == 6 - saved.episodes
    assert saved.bytes <= most
    _, found = answers_in(tmp_path / "page.html")
    assert len(unpacked(found["/api/episodes?trace=0"])[1]["episode"]) == saved.episodes


@pytest.mark.parametrize("most", [0, 1000, 150_000])
def test_a_limit_below_one_episode_is_refused(directory: Path, tmp_path: Path, most: int) -> None:
    with pytest.raises(TraceError, match="the first episode alone takes"):
        save_page(directory, target=tmp_path / "page.html", max_bytes=most)
    assert not (tmp_path / "page.html").exists()


def test_nothing_to_save_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no episode"):
        save_page(open_trace(directory)[:0], target=tmp_path / "page.html")


def test_a_page_of_another_version_is_not_filled_in(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {**page.static_files(), "app.js": b"let x = '</script>'"}
    monkeypatch.setattr(page, "static_files", lambda: files)
    with pytest.raises(TraceError, match="make viewer"):
        save_page(directory, target=tmp_path / "page.html")


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_saves_selected_episodes_and_says_how_large_they_are(directory: Path, tmp_path: Path) -> None:
    done = run("view", str(directory), "-o", str(tmp_path / "x.html"), "--where", "index > 1")
    assert done.exit_code == 0, done.output
    first, last = done.output.splitlines()
    assert re.fullmatch(r"about [\d.]+ kB for 4 episodes", first)
    assert re.fullmatch(r".*x\.html: 4 episodes, [\d.]+ kB", last)
    _, found = answers_in(tmp_path / "x.html")
    assert unpacked(found["/api/episodes?trace=0"])[1]["episode"].tolist() == [2, 3, 4, 5]


def test_the_command_says_what_it_left_out(directory: Path, tmp_path: Path) -> None:
    limit = empty_page() // 1000 + 75
    done = run("view", str(directory), "-o", str(tmp_path / "x.html"), "--max-bytes", f"{limit}kB")
    assert done.exit_code == 0, done.output
    assert f"skipped, beyond {limit} kB" in done.output
    assert (tmp_path / "x.html").stat().st_size <= 1000 * limit


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-bytes", "5MB"], "--max-bytes: needs -o FILE.html"),
        (["-o", "x.html", "--port", "80"], "-o excludes"),
        (["-o", "x.html", "--max-bytes", "many"], "'many' is not a size; write 25MB, 500kB or a number of bytes"),
        (["-o", "x.html", "--max-bytes", "0"], "'0' is not a size"),
        (["-o", "x.html", "--where", "retrun > 1"], "did you mean 'return'"),
        (["-o", "x.html", "--max-bytes", "1kB"], "the first episode alone takes"),
    ],
)
def test_wrong_usage_of_save_is_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("view", str(directory), *words)
    assert done.exit_code == (1 if "alone" in said else 2)
    assert said in done.output
    assert not (tmp_path / "x.html").exists()


def test_a_selection_without_episodes_is_an_error(directory: Path, tmp_path: Path) -> None:
    done = run("view", str(directory), "-o", str(tmp_path / "x.html"), "--where", "return > 1e9")
    assert done.exit_code == 1
    assert "none of 6 episodes matches" in done.output
