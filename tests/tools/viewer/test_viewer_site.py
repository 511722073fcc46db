"""A static site: what is written, and that its reader in the browser gives the answers of the server."""

import base64
import json
import shutil
import subprocess
from io import BytesIO
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

import numpy as np
import pytest
from PIL import Image
from shell import ok, run
from viewer_requests import cartpoles, compacted_noise

from gym_trace import edit, open_trace
from gym_trace.errors import TraceExists
from gym_trace.tools.viewer import container
from gym_trace.tools.viewer.answers import Answers, Refused
from gym_trace.viewer import save_site

SAMPLES = Path(__file__).parents[3] / "sample_traces"
READ = (
    "1.0/batches",
    "1.0/damaged",
    "1.1/pictures",
    "1.1/outcomes",
    "1.1/two-writers",
    "1.1/filtered",
    "1.1/agents",
    "1.2/compacted",
)
CONDITIONS = (
    "return > 1 and steps <= 20 or not outcome == 'terminated'",
    "not (seed in [1, 2, 3] or start_time > '2020-01-01') and abs(-steps + 2 * 3) % 7 >= 1.5",
    "flag is None and 2 <= steps < 1_000 and 'a' in writer and has_final_observation != False",
    "seed is not None or duration / 0 > 1 or outcome not in ('cut', 'lost')",
)
WRONG = (
    "steps >",
    "steps > 'x'",
    "retrun > 1",
    "(steps > 1",
    "steps = 3",
    "steps is 3",
    "'open",
    "steps",
    "steps in 3",
)
APART = ("spaces", "renderable", "branches", "notes", "identity")  # a site has no simulator; nothing grows there

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def site_answers(jobs):
    """Answers of the reader in JavaScript to [(directory, requests)]: bytes, or the error as a dict."""
    script = Path(__file__).with_name("site_answers.mjs")
    text = json.dumps([(str(directory), requests) for directory, requests in jobs])
    done = subprocess.run(["node", script], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [
        [one if isinstance(one, dict) else base64.b64decode(one) for one in found] for found in json.loads(done.stdout)
    ]


def server_answer(answers, request):
    """The answer of the server; the status if it refuses."""
    url = urlsplit(request)
    try:
        return answers.get(url.path, dict(parse_qsl(url.query, keep_blank_values=True))).body
    except Refused as refused:
        return refused.status


def requests_for(answers):
    """Requests for the list, and for the first, the last and another episode."""
    listed = [f"&where={quote(where)}&search=&sort=" for where in ("", *CONDITIONS)]
    found = ["/api/traces", *(f"/api/{name}?trace=0{one}" for one in listed for name in ("histograms", "learning"))]
    found += [f"/api/episodes?trace=0{one}{sort}" for one in listed for sort in ("", "-return", "length,-episode")]
    trace = answers.traces[0]
    for episode in {0, len(trace.trace) // 2, len(trace.trace) - 1}:
        of = f"trace=0&episode={episode}"
        found += [f"/api/episode?{of}", f"/api/steps?{of}&from=0&count=40", f"/api/compare?a=0:0&b=0:{min(1, episode)}"]
        for column in trace.episode(episode).columns.values():
            name = quote(column.name)
            if column.kind == "numeric":
                found += [
                    f"/api/plot?{of}&column={name}&pixels=700",
                    f"/api/plot?{of}&column={name}&from=3&to=50&pixels=9",
                    f"/api/plot?{of}&column={name}&pixels=7&minus=0:{min(1, len(trace.trace) - 1)}",
                ]
            elif column.kind == "frames":
                found.append(f"/api/frames?{of}&column={name}&from=3&count=20")
    return found


def pixels(data):
    return np.asarray(Image.open(BytesIO(data.tobytes())).convert("RGB"))


def content(request, body):
    """An answer in a form that can be compared."""
    if request.startswith(("/api/plot", "/api/frames", "/api/episodes", "/api/learning")):
        head, arrays = container.unpacked(body)
        convert = pixels if "frames" in request else lambda array: array.astype(float).round(6)  # times are floats
        known = {name: convert(array) for name, array in arrays.items()}
        return {key: value for key, value in head.items() if key not in ("arrays", "mime", "ys")} | known
    known = json.loads(body.replace(b", ", b",").replace(b": ", b":"))  # also in texts that are JSON
    if "compare" in request:  # a value is described leaf by leaf
        return {key: known[key] for key in ("same", "step")}
    return {key: value for key, value in (known[0] if isinstance(known, list) else known).items() if key not in APART}


def check_answers(directories, wanted=""):
    """Compare the answers of the site to requests with this text with those of the server."""
    jobs, expected = [], []
    for directory in directories:
        answers = Answers([open_trace(directory)], is_shared=True)
        jobs.append((directory, [request for request in requests_for(answers) if wanted in request]))
        expected.append([server_answer(answers, request) for request in jobs[-1][1]])
    for (directory, requests), seen, known in zip(jobs, site_answers(jobs), expected, strict=True):
        for request, mine, theirs in zip(requests, seen, known, strict=True):
            if not (isinstance(mine, bytes) and isinstance(theirs, bytes)):
                assert mine["status"] == theirs, (directory, request, mine)
                continue
            one, other = content(request, mine), content(request, theirs)
            np.testing.assert_equal(one, other, f"{directory} {request}")


@needs_node
def test_a_site_gives_the_answers_of_the_server():
    check_answers(SAMPLES / f"format-{name}" for name in READ)


@needs_node
def test_a_site_gives_the_episodes_of_a_compacted_trace(tmp_path):
    check_answers([compacted_noise(tmp_path / "t")], "episode=")


@needs_node
def test_a_site_refuses_the_conditions_that_the_server_refuses():
    answers = Answers([open_trace(SAMPLES / "format-1.1" / "cartpole")])
    requests = [f"/api/episodes?trace=0&where={quote(where)}" for where in WRONG]
    assert [server_answer(answers, request) for request in requests] == [400] * len(WRONG)
    (seen,) = site_answers([(SAMPLES / "format-1.1" / "cartpole", [*requests, "/api/episodes?where=metadata.x+%3E+1"])])
    assert [one["status"] for one in seen] == [400] * (len(WRONG) + 1)
    assert seen[1]["error"].startswith("steps is a number, 'x' is text; they cannot be compared\n  steps > 'x'\n")
    assert "'gym-trace view' on a machine knows it" in seen[-1]["error"]


@needs_node
def test_a_site_shows_flags_and_says_what_it_does_not_read(tmp_path):
    cartpoles(tmp_path / "t", 3)
    edit.annotate(tmp_path / "t", {"flags": {open_trace(tmp_path / "t").writers[0]: {"bad": [1]}}})
    (tmp_path / "t" / "other.000000.gtb.part").write_bytes(b"")
    (tmp_path / "t" / "torn.000000.gtb").write_bytes(bytes(1000))
    (seen,) = site_answers(
        [(tmp_path / "t", ["/api/traces", "/api/episodes?where=flag+%3D%3D+%22bad%22", "/api/render?job=1"])]
    )
    (facts,), (head, arrays) = json.loads(seen[0]), container.unpacked(seen[1])
    assert facts["damage_notes"] == [
        "torn.000000.gtb: damaged: the header of the file",
        "torn.000000.gtb: damaged: the file has no footer",
    ]
    (note,) = facts["notes"]
    assert note.startswith("1 unfinished file is not read here: 'gym-trace edit repair' puts")
    assert (head["matched"], arrays["episode"].tolist()) == (1, [1])
    assert seen[2]["status"] == 404


def test_a_trace_inside_the_site_stays_and_others_are_copied(tmp_path):
    inside, elsewhere = tmp_path / "site" / "runs" / "a b", tmp_path / "other" / "a b"
    for directory in (inside, elsewhere):
        cartpoles(directory, 3)
    shown = ok("view", str(inside), str(elsewhere), "-o", str(tmp_path / "site"))
    assert "6 episodes" in shown.output
    assert "1 trace copied" in shown.output
    listed = json.loads((tmp_path / "site" / "traces.json").read_text())["traces"]
    assert [(one["name"], one["url"]) for one in listed] == [("a b", "runs/a%20b/"), ("a b", "a%20b/")]
    for one, directory in zip(listed, (inside, tmp_path / "site" / "a b")):
        assert one["files"] == [[path.name, path.stat().st_size] for path in sorted(directory.glob("*.gtb"))]
    page = (tmp_path / "site" / "index.html").read_text()
    assert 'name="gym-trace-site"' in page
    assert "default-src 'none'" in page


def test_a_site_holds_only_the_selected_episodes(tmp_path):
    cartpoles(tmp_path / "t", 5)
    ok("view", str(tmp_path / "t"), "--limit", "2", "-o", str(tmp_path / "site"))
    assert len(open_trace(tmp_path / "site" / "t")) == 2
    with pytest.raises(TraceExists):
        save_site(tmp_path / "t", target=tmp_path / "site")


def test_site_excludes_what_needs_a_server(tmp_path):
    cartpoles(tmp_path / "t", 1)
    for words in (["--port", "8000"], ["--episode", "0"]):
        assert "exclude" in run("view", str(tmp_path / "t"), "-o", str(tmp_path / "site"), *words).output
    assert not (tmp_path / "site").exists()


@needs_node
def test_a_link_to_the_hugging_face_hub_lists_all_pages_of_a_folder():
    script = Path(__file__).parents[2] / "node_reader" / "reader.mjs"
    page = """
        const { reader } = await import(SCRIPT);
        const asked = [];
        globalThis.fetch = async (url) => {
            asked.push(url);
            const last = url.includes("cursor");
            const file = {type: last ? "file" : "directory", path: "runs/b/w.000000.gtb", size: 7};
            const headers = last ? {} : {Link: `<${url}?cursor=2>; rel="next"`};
            return new Response(JSON.stringify([file]), {headers});
        };
        const [listing] = await reader.listed("http://127.0.0.1/", ["hf://datasets/me/data@v1/runs/b"]);
        console.log(JSON.stringify([asked, listing]));
    """.replace("SCRIPT", json.dumps(script.as_uri()))
    done = subprocess.run(["node", "--input-type=module", "-e", page], capture_output=True, text=True, timeout=60)
    asked, listing = json.loads(done.stdout)
    first = "https://huggingface.co/api/datasets/me/data/tree/v1/runs/b"
    assert asked == [first, f"{first}?cursor=2"]
    url = "https://huggingface.co/datasets/me/data/resolve/v1/runs/b/"
    assert listing == {"name": "b", "url": url, "files": [["w.000000.gtb", 7]]}
