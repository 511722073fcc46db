"""gym-trace doctor"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

import gym_trace
from gym_trace.printable import error_text, printable
from gym_trace.recording import why_pure
from gym_trace.storage import LocalStorage
from gym_trace_cli import show
from gym_trace_cli.exit_codes import ERROR, FINE
from gym_trace_cli.help import headed, section
from gym_trace_cli.options import PATH, json_option

OK, NO, BROKEN = "ok", "no", "broken"
_DEVELOPMENT = ("bench", "dev", "docs", "envs", "release", "test")  # extras of a checkout
_REQUIREMENT = re.compile(r"([\w.-]+)[^<>=!~]*([^;]*)(?:;(.*))?")
_BOUND = re.compile(r">=\s*([\d.]+)")
_EXTRA, _PYTHON = (
    re.compile(r"extra == ['\"]([\w-]+)['\"]"),
    re.compile(r"python_version (<|>=) ['\"](\d+)\.(\d+)['\"]"),
)
COMPLETION = {  # the line that turns on completion, and where it stays on
    "bash": ('eval "$(_GYM_TRACE_COMPLETE=bash_source gym-trace)"', "~/.bashrc"),
    "zsh": ('eval "$(_GYM_TRACE_COMPLETE=zsh_source gym-trace)"', "~/.zshrc, after compinit"),
    "fish": ("_GYM_TRACE_COMPLETE=fish_source gym-trace | source", "~/.config/fish/config.fish"),
}
_FREE = 10**9  # bytes
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, WSL
_GPU_LIBRARIES = {
    "torch": "import torch; print(torch.cuda.is_available())",
    "jax": "import jax; print(jax.default_backend() != 'cpu')",
    "cupy": "import cupy; print(cupy.cuda.is_available())",
}
_SECONDS = 60  # timeout of an import of such a library
_CREDENTIALS = re.compile(
    r"AWS_(ACCESS_KEY_ID|PROFILE|ROLE_ARN|WEB_IDENTITY_TOKEN_FILE|SKIP_SIGNATURE)|GOOGLE_(APPLICATION_CREDENTIALS|"
    r"SERVICE_ACCOUNT)|AZURE_(STORAGE_[A-Z_]+|CLIENT_ID)|HF_TOKEN"
)
_CREDENTIAL_FILES = (
    *("~/.aws/credentials", "~/.config/gcloud/application_default_credentials.json"),
    *("~/.azure/azureProfile.json", "~/.cache/huggingface/token"),
)


@dataclass(frozen=True)
class Finding:
    """A line of the report. state: ok; no (recording works without it); broken (it does not)."""

    name: str
    state: str
    found: str
    advice: str = ""


@headed("doctor")
@click.argument("directory", metavar="[DIR]", default=".", type=PATH)
@section("Output", json_option)
def command(directory: str, as_json: bool) -> int:
    """Check whether recording works here, and what this installation can do.

    Records, checks and replays a short trace in a temporary directory in DIR
    (default: the current directory). For bug reports: the text names no host,
    user or path. Exit code: 1 if a plain recording fails.

    \b
    gym-trace doctor /scratch/runs
    """
    if not os.path.isdir(directory):
        raise click.UsageError(f"{printable(directory)}: no such directory; make it, or pass one that exists")
    findings, extras = list(_findings(directory)), list(_extras())
    is_broken = any(finding.state == BROKEN for finding in findings)
    if as_json:
        document = {"gym_trace": gym_trace.__version__, "works": not is_broken}
        show.json_line(document | {"findings": [*map(asdict, findings)], "extras": [*map(asdict, extras)]})
        return ERROR if is_broken else FINE
    click.echo(f"gym-trace {gym_trace.__version__}")
    _print(findings)
    show.title("extras")
    _print(extras)
    click.echo("\nrecording fails here: see 'broken' above" if is_broken else "\nrecording works here")
    return ERROR if is_broken else FINE


def _print(findings: list[Finding]) -> None:
    width = max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        state = click.style(finding.state.ljust(len(BROKEN)), fg={OK: "green", BROKEN: "red"}.get(finding.state))
        text = printable("; ".join(filter(None, (finding.found, finding.advice))))
        indent = len(BROKEN) + width + 2
        click.echo(f"{state} {finding.name.ljust(width)} {show.folded(text, indent, sys.stdout)}")


def _findings(directory: str) -> Iterator[Finding]:
    system = " ".join((platform.system(), platform.release(), platform.machine(), *platform.libc_ver())).strip()
    yield Finding("Python", OK, f"{platform.python_version()}, {platform.python_implementation()}; {system}")
    packages = _packages()
    yield packages
    if packages.state == BROKEN:
        recording = Finding("recording", BROKEN, "not tried, because of these packages")
        yield recording
    else:
        yield _core()
        recording, has_ring, commit = _recording(directory)
        yield recording
        yield _ring(directory, recording, has_ring)
        yield _git(commit is not None or recording.state == BROKEN)
    yield _disk(directory)
    yield _gpu()
    yield _object_stores()
    yield _shell()


# -- packages ---------------------------------------------------------------------------------------------------------


def _requirements() -> Iterator[tuple[str, str, str]]:
    """Yield extra ("": always needed), package and oldest release of what gym-trace needs in this Python."""
    for line in importlib.metadata.requires("gym-trace") or ():
        found = _REQUIREMENT.fullmatch(line)
        assert found is not None
        name, specifier, marker = found[1], found[2], found[3] or ""
        python, extra, bound = _PYTHON.search(marker), _EXTRA.search(marker), _BOUND.search(specifier)
        if python is not None:
            is_older = sys.version_info[:2] < (int(python[2]), int(python[3]))
            if is_older != (python[1] == "<"):
                continue
        yield extra[1] if extra else "", name, bound[1] if bound else "0"


def _installed(name: str, oldest: str) -> tuple[str, bool]:
    """Return a package with its version and True if it is recent enough; otherwise what is needed, and False."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return name, False
    if _numbers(version) < _numbers(oldest):
        return f"{name} {oldest} (found {version})", False
    return f"{name} {version}", True


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]


def _packages() -> Finding:
    """Import the packages that every recording needs."""
    shown, wrong = [], []
    try:
        needed = [(name, oldest) for extra, name, oldest in _requirements() if not extra]
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", BROKEN, "gym-trace is not installed, only imported", "pip install gym-trace")
    for name, oldest in needed:
        text, is_right = _installed(name, oldest)
        if is_right:
            try:
                importlib.import_module(name)
            except Exception as error:  # a broken installation may raise anything
                text, is_right = f"{text}: {error_text(error)[:200]}", False
        shown.append(text)
        if not is_right:
            wrong.append((text, name))
    if wrong:
        advice = f"pip install --upgrade --force-reinstall {' '.join(name for _, name in wrong)}"
        return Finding("packages", BROKEN, f"needs {', '.join(text for text, _ in wrong)}", advice)
    return Finding("packages", OK, ", ".join(shown))


def _extras() -> Iterator[Finding]:
    """Yield a finding for each extra, by metadata alone: imports of some take seconds."""
    extras: dict[str, list[tuple[str, str]]] = {}
    with suppress(importlib.metadata.PackageNotFoundError):
        for extra, name, oldest in _requirements():
            if extra and extra not in _DEVELOPMENT:
                extras.setdefault(extra, []).append((name, oldest))
    for extra, packages in sorted(extras.items()):
        found = [_installed(name, oldest) for name, oldest in sorted(packages)]
        wrong = [text for text, is_right in found if not is_right]
        if wrong:
            yield Finding(extra, NO, f"needs {', '.join(wrong)}", f"pip install 'gym-trace[{extra}]'")
        else:
            yield Finding(extra, OK, ", ".join(text for text, _ in found))


def _core() -> Finding:
    reason = why_pure()
    if reason is None:
        return Finding("C core", OK, "compiled")
    advice = "unset it" if reason.startswith("GYM_TRACE_PURE") else "recording is slower, the files are the same"
    return Finding("C core", NO, reason, advice)


# -- a recording ------------------------------------------------------------------------------------------------------


def _recording(directory: str) -> tuple[Finding, bool, str | None]:
    """Record, check and replay; return the finding, whether there was a ring, and the commit that the trace stores."""
    import gymnasium

    quiet, has_ring, commit = logging.getLogger("gym_trace"), False, None
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # a recorder without a ring warns; the report says so
    try:
        with tempfile.TemporaryDirectory(prefix="gym-trace-doctor-", dir=directory) as scratch:
            trace = Path(scratch, "trace")
            with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), trace) as env:
                gym_trace.record_episodes(env, episodes=1, seed=0)
                has_ring = any(trace.glob("*.ring"))
            checked = gym_trace.check_trace(trace)
            (verdict,) = gym_trace.verify_trace(gym_trace.open_trace(trace))
            commit = dict(gym_trace.describe(trace)["provenance"] or {}).get("commit")
    except Exception as error:  # any error is the finding
        text = error.strerror if isinstance(error, OSError) and error.strerror else error_text(error)
        text = text.replace(os.path.realpath(directory), "DIR")
        return Finding("recording", BROKEN, text, "try another directory: gym-trace doctor DIR"), has_ring, None
    finally:
        quiet.setLevel(level)
    steps = show.count(checked.steps, "step")
    if checked.damages or not verdict.matches:
        found = f"{steps} of CartPole-v1 do not come back as they were recorded"
        return Finding("recording", BROKEN, found, "please report a bug, with this text"), has_ring, commit
    found = f"{steps} of CartPole-v1 recorded, checked, and replayed bit for bit"
    return Finding("recording", OK, found), has_ring, commit


def _ring(directory: str, recording: Finding, has_ring: bool) -> Finding:
    reason = LocalStorage(directory).why_unmapped()
    if reason is not None:
        advice = "a kill can lose the last second; record into a local directory, such as one on ext4, XFS or tmpfs"
        return Finding("ring", NO, reason, advice)
    if has_ring:
        return Finding("ring", OK, "a killed process loses no step")
    if recording.state == BROKEN:
        return Finding("ring", NO, "not tried", "mend the recording first")
    return Finding("ring", NO, "no free file descriptor", "a kill can lose the last second; raise 'ulimit -n'")


# -- the machine ------------------------------------------------------------------------------------------------------


def _git(finds_commit: bool) -> Finding:
    try:
        done = subprocess.run(["git", "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        missing = "not found" if isinstance(error, FileNotFoundError) else error_text(error)
        return Finding("git", NO, missing, "traces do not store the commit of your code; install git")
    version = done.stdout.strip().removeprefix("git version ")
    if not finds_commit:
        advice = "traces store no commit; start programs in a repository that 'git log' can read"
        return Finding("git", NO, f"{version}, no commit here", advice)
    return Finding("git", OK, version)


def _disk(directory: str) -> Finding:
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return Finding("disk", NO, error_text(error), "pass another directory: gym-trace doctor DIR")
    if free < _FREE:
        return Finding("disk", NO, f"{show.size(free)} free", "make space, or record elsewhere")
    return Finding("disk", OK, f"{show.size(free)} free")


def _gpu() -> Finding:
    """Look for a GPU; only if there is one, ask the installed libraries, whose imports are slow."""
    installed = {}
    for name in _GPU_LIBRARIES:
        distributions: Mapping[str, list[str]] = {name: [name]}
        if name == "cupy":  # the name of its package depends on the version of CUDA
            distributions = importlib.metadata.packages_distributions() if importlib.util.find_spec(name) else {}
        for distribution in distributions.get(name, ())[:1]:
            with suppress(importlib.metadata.PackageNotFoundError):
                installed[name] = importlib.metadata.version(distribution)
    shown = ", ".join(f"{name} {version}" for name, version in installed.items())
    if not any(map(os.path.exists, _GPU_FILES)):
        return Finding("GPU", NO, f"no driver; {shown}".removesuffix("; "), "only simulators on a GPU need one")
    if not installed:
        return Finding("GPU", NO, "a driver; no torch, JAX or CuPy", "install what your simulator uses")
    blind = [name for name in installed if not _sees_gpu(name)]
    if blind:
        advice = f"install {' and '.join(blind)} for this driver, if your simulator uses it"
        return Finding("GPU", NO, f"not seen by {', '.join(blind)}; {shown}", advice)
    return Finding("GPU", OK, shown)


def _sees_gpu(name: str) -> bool:
    script = [sys.executable, "-I", "-c", _GPU_LIBRARIES[name]]
    try:
        return subprocess.run(script, capture_output=True, text=True, timeout=_SECONDS).stdout.strip() == "True"
    except (OSError, subprocess.SubprocessError):
        return False


def _object_stores() -> Finding:
    """Name the credentials that are set; their values are secret."""
    names: list[Any] = [*sorted(filter(_CREDENTIALS.fullmatch, os.environ))]
    names += [path for path in _CREDENTIAL_FILES if os.path.exists(os.path.expanduser(path))]
    if not names:
        return Finding("URLs", NO, "no credentials", "only private buckets need them: docs/guides/remote.md")
    return Finding("URLs", OK, f"credentials in {', '.join(names)}")


def _shell() -> Finding:
    name = os.path.basename(os.environ.get("SHELL", ""))
    if name not in COMPLETION:
        return Finding("shell", NO, f"{name or 'unknown'}, without completion", "bash, zsh and fish have it")
    line, file = COMPLETION[name]
    return Finding("shell", OK, f"{name}; completion: {line} in {file}")
