"""gym-trace view"""

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from gym_trace_cli.main import cli
from shell import process, run, wait_for
from viewer_requests import FILES, cartpoles

from gym_trace import open_trace
from gym_trace.errors import InvalidOption, MissingExtra, TraceError
from gym_trace.tools.viewer import page
from gym_trace.viewer import serve


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cartpoles(tmp_path_factory.mktemp("view") / "cartpole", 2)


def started(*words: str | Path) -> tuple[subprocess.Popen[str], str]:
    """Start the command; return its process and the address that it prints."""
    running = process("view", *words)
    assert running.stdout is not None
    return running, running.stdout.readline().strip()


def ended(running: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = running.communicate(timeout=60)
    return running.returncode, out + err


def test_the_printed_address_shows_the_page_and_ctrl_c_stops_it(directory: Path) -> None:
    running, address = started(directory, "--no-browser")
    try:
        page_of = urllib.request.urlopen(address, timeout=30)
        assert page_of.status == 200
        assert b"app.js" in page_of.read()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{address.partition('?')[0]}api/traces", timeout=30)
    finally:
        running.send_signal(signal.SIGINT)
    code, text = ended(running)
    assert (code, text.strip().splitlines()[-1]) == (0, "stopped"), text
    assert "Traceback" not in text


INTERRUPTED_IN_THE_LOOP = """
import asyncio
import signal
from gym_trace_cli.main import cli

init = asyncio.BaseEventLoop.__init__

def interrupted(self):
    signal.raise_signal(signal.SIGINT)
    init(self)

asyncio.BaseEventLoop.__init__ = interrupted
cli()
"""


def test_ctrl_c_while_the_server_starts_stops_it_without_a_complaint(directory: Path) -> None:
    running = process("view", directory, "--no-browser", script=INTERRUPTED_IN_THE_LOOP)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err.strip()) == (0, "stopped")
    assert out.startswith("http://127.0.0.1:")


def test_sigterm_ends_it_with_the_usual_code(directory: Path) -> None:
    running, address = started(directory, "--no-browser")
    assert address.startswith("http://127.0.0.1:")
    running.terminate()
    code, text = ended(running)
    assert code == 143
    assert "terminated" in text


def test_a_private_file_hands_the_address_to_the_browser(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    running, address = started(directory)
    wait_for(lambda: opened.exists() and opened.read_text())
    shown = opened.read_text().strip()  # the command line, which every user can read
    assert "token" not in shown
    file = Path(urllib.request.url2pathname(shown.removeprefix("file://")))
    assert file.parent.stat().st_mode & 0o077 == 0
    assert address in file.read_text()
    running.send_signal(signal.SIGINT)
    ended(running)
    assert not file.parent.exists()


def test_a_directory_of_a_training_run_shows_its_trace(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "trace").symlink_to(directory)
    (tmp_path / "run.json").write_text("{}")
    running, address = started(tmp_path, "--no-browser")
    assert address.startswith("http://127.0.0.1:")
    running.send_signal(signal.SIGINT)
    code, text = ended(running)
    assert code == 0, text


def test_a_taken_port_names_what_to_do(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "static_files", lambda: FILES)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("view", str(directory), "--no-browser", "--port", str(port))
    assert done.exit_code == 1
    assert f"port {port}: Address already in use; choose another one" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["view"], "missing argument '[name=]dir...'"),
        (["view", "nowhere"], "nowhere"),
        (["view", ".", "--port", "70000"], "70000"),
        (["view", ".", "--port", "-1"], "-1"),
    ],
)
def test_wrong_usage_is_refused(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert done.exit_code in (1, 2)
    assert said in done.output.lower()


def test_an_address_that_is_not_of_this_machine_is_an_error(directory: Path) -> None:
    done = run("view", str(directory), "--no-browser", "--host", "192.0.2.1")
    assert done.exit_code == 1
    assert "192.0.2.1" in done.output


def test_an_unknown_host_is_named(directory: Path) -> None:
    done = run("view", str(directory), "--no-browser", "--host", "no such host")
    assert done.exit_code == 1
    assert done.output.startswith("error: no such host port 0: ")
    assert done.output.endswith("; choose another one\n")


def test_a_host_for_other_machines_comes_with_a_warning(directory: Path) -> None:
    running, address = started(directory, "--no-browser", "--host", "0.0.0.0")
    running.send_signal(signal.SIGINT)
    _, text = ended(running)
    assert "warning: host 0.0.0.0: other machines can connect, unencrypted" in text
    assert address.startswith("http://")


def test_a_missing_extra_names_the_pip_command(directory: Path) -> None:
    script = "import sys\nsys.modules['uvicorn'] = None\nfrom gym_trace_cli.main import cli\ncli(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", script, "view", str(directory), "--no-browser"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "pip install 'gym-trace[view]'" in done.stderr
    assert issubclass(MissingExtra, TraceError)


def test_serving_nothing_is_refused() -> None:
    with pytest.raises(InvalidOption, match="at least one"):
        serve()


def test_a_page_that_was_not_built_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page, "files", lambda package: tmp_path)
    with pytest.raises(TraceError, match="make viewer"):
        page.static_files()


def test_viewing_changes_no_file_of_the_trace(directory: Path) -> None:
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    running, address = started(directory, "--no-browser")
    base, _, token = address.partition("?token=")
    for path in ("api/traces", "api/episodes", "api/episode?episode=0", "api/steps?episode=0", "api/changes?since=0"):
        request = urllib.request.Request(base + path, headers={"Authorization": f"Bearer {token}"})
        assert urllib.request.urlopen(request, timeout=30).status == 200
    running.send_signal(signal.SIGINT)
    ended(running)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert len(open_trace(directory)) == 2


def test_the_help_names_every_option() -> None:
    done = run("view", "--help")
    assert all(name in done.output for name in ("--port", "--host", "--no-browser"))
    assert "view" in cli.list_commands(None)  # type: ignore[arg-type]


def test_the_page_opens_at_a_step(directory: Path) -> None:
    running, address = started(directory, "--no-browser", "--episode", "-1", "--step", "3")
    running.terminate()
    ended(running)
    assert address.endswith("#trace=0&episode=1&step=3")


def test_a_step_that_is_not_there_is_refused(directory: Path) -> None:
    for options, told in (
        (["--episode", "2"], "'--episode': 2: the trace has 2 episodes"),
        (["--episode", "0", "--step", "900"], "--step: 900: episode 0 has"),
        (["--step", "1"], "--step: needs --episode; pass both"),
        (
            ["--episode", "0", "--limit", "1"],
            "--episode and --step exclude -o and the selection of episodes",
        ),
    ):
        refused = run("view", directory, *options)
        assert refused.exit_code == 2
        assert told in refused.stderr
