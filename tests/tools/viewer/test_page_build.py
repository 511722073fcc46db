"""The built page: it belongs to its sources, is small, and has no way to run what was recorded."""

import gzip
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "viewer"
STATIC = ROOT / "gym_trace" / "tools" / "viewer" / "static"
SCRIPTS = [path for path in (SOURCES / "src").rglob("*") if path.is_file()]
MOST_BYTES = 150_000  # size of the whole empty page, compressed


def test_the_built_page_belongs_to_its_sources():
    names = [
        "package-lock.json",
        "build.mjs",
        "index.html",
        *(path.relative_to(SOURCES).as_posix() for path in SCRIPTS),
    ]
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(name.encode() + b"\0" + (SOURCES / name).read_bytes() + b"\0")
    first = (STATIC / "app.js").read_text().partition("\n")[0]
    assert first == f"/* sources {digest.hexdigest()[:32]} */", "the built page is stale: run 'make viewer'"


@pytest.mark.skipif(
    shutil.which("node") is None or not (SOURCES / "node_modules").is_dir(), reason="needs Node and 'make viewer' once"
)
def test_a_new_build_has_the_committed_bytes(tmp_path):
    subprocess.run(["node", SOURCES / "build.mjs", tmp_path], check=True, timeout=60)
    for path in sorted(STATIC.iterdir()):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_empty_page_is_small():
    files = [re.sub(rb'"AGFzb[^"]+"', b"", path.read_bytes()) for path in STATIC.iterdir()]  # without WebAssembly
    assert sum(len(gzip.compress(data)) for data in files) < MOST_BYTES


def test_the_page_never_parses_text_as_html_or_code():
    parsing = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|createContextualFragment"
    )
    for path in SCRIPTS:
        assert not parsing.search(path.read_text()), path.name


def test_the_page_asks_for_nothing_outside_of_its_server():
    known = {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot", "https://github.com/donmccurdy/zstddec"}
    for path in STATIC.iterdir():
        addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]{2,}[^\s\"'`)]*", path.read_text()))
        hub = {"https://huggingface.co"} if path.name == "site.js" else set()  # for ?t=hf://…
        assert addresses <= known | hub, path.name


def test_the_scripts_carry_the_licences_of_what_is_in_them():
    for name, author in (("app.js", "Leon Sorokin"), ("site.js", "Yann Collet, Facebook")):
        script = (STATIC / name).read_text()
        assert author in script
        assert "The above copyright notice and this permission notice shall be included" in script


def test_the_script_can_stand_inside_an_html_file():
    assert "</script" not in (STATIC / "app.js").read_text().lower()
    assert "</style" not in (STATIC / "app.css").read_text().lower()
