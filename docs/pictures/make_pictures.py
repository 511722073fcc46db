"""Make the pictures of the viewer in the documents, from recordings made here, in the system's Chromium.

viewer.png and viewer-dark.png show an episode of Pong; killed.webp a run that is killed, opened, and branched.

Usage: python docs/pictures/make_pictures.py
"""

from __future__ import annotations

import html
import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image

from gym_trace import open_trace
from gym_trace.errors import TraceNotFound

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "helpers"))

import browser  # noqa: E402 - found by the line above

SIZE = (1280, 800)
PLACE = "#trace=0&episode=1&step=420"
# Everything is drawn: the picture of the step, its values, and the plots in sight.
READY = """
document.querySelector('.picture canvas[data-step="420"]')
  && document.querySelectorAll('.panel canvas').length >= 3
  && document.querySelector('.step:not(.waiting) .values .line')
"""
TERMINAL = """<style>body { margin: 0; padding: 48px; background: #11151c; color: #d8dee9;
font: 28px/1.6 'DejaVu Sans Mono', monospace; white-space: pre-wrap }</style><body>"""
SCRUB = "const e = document.querySelector('.scrubber'); e.value = arguments[0]; e.dispatchEvent(new Event('input'))"
KEY = "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}))"
BRANCH = "document.querySelector('.whatif input').value = 8; document.querySelector('.whatif form').requestSubmit()"
FIRST_BRANCH = """
for (const key of ['Home', 'Enter'])
  document.querySelector('.strip').dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}))
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "gym_trace", *words]


def until(driver: Any, condition: str) -> None:
    end = time.monotonic() + 60
    while not driver.execute_script(f"return ({condition})"):
        if time.monotonic() > end:
            sys.exit(f"make pictures: the page did not come to this in 60 s: {condition}")
        time.sleep(0.1)


def photograph(driver: Any) -> Image.Image:
    return Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")


def stills(driver: Any, folder: Path) -> None:
    pong = folder / "pong"
    record = command("record", "ALE/Pong-v5", "--import", "ale_py", "-o", str(pong), "--episodes", "3", "--seed", "0")
    subprocess.run([*record, "--infos", "--quiet"], check=True)
    with browser.served(pong) as address:
        driver.get(address)
        for theme, name in (("light", "viewer.png"), ("dark", "viewer-dark.png")):
            browser.look(driver, *SIZE, theme=theme)
            driver.get("about:blank")
            driver.get(address.partition("?")[0] + PLACE)
            until(driver, READY)
            picture = photograph(driver)
            picture.quantize(192, dither=Image.Dither.NONE).save(HERE / name, optimize=True)


def animation(driver: Any, folder: Path) -> None:
    """Record Pendulum, kill -9, open, scrub, branch, and see two curves part, in ten seconds."""
    run, frames = folder / "run", []

    def frame(seconds: float) -> None:
        frames.append((photograph(driver).resize((960, 600), Image.Resampling.LANCZOS), int(1000 * seconds)))

    def scrub(step: int, pictures: int = 1) -> None:
        driver.execute_script(SCRUB, step)
        until(driver, f"document.querySelectorAll('.picture canvas[data-step=\"{step}\"]').length === {pictures}")

    browser.look(driver, *SIZE)
    words = ("record", "Pendulum-v1", "-o", str(run), "--episodes", "9999", "--seed", "0", "--quiet")
    with subprocess.Popen(command(*words)) as process:
        while not has_episodes(run, 12):
            time.sleep(0.1)
        process.kill()
    said = ""
    for line in ("$ gym-trace record Pendulum-v1 -o run &\n", "$ kill -9 %1\n[1]+  Killed\n", "$ gym-trace view run\n"):
        said += line
        driver.get(f"data:text/html;charset=utf-8,{quote(TERMINAL + html.escape(said))}")
        frame(0.7)
    with browser.served(run) as address:
        driver.get(address)
        until(
            driver, "document.querySelectorAll('.space .row').length > 6 && document.querySelector('.learning .chart')"
        )
        frame(1)
        driver.get("about:blank")
        driver.get(address + "#trace=0&episode=0&step=0")
        until(
            driver, "document.querySelectorAll('.panel canvas').length >= 4 && document.querySelector('.whatif option')"
        )
        for step in range(0, 81, 8):
            scrub(step)
            frame(0.12)
        driver.execute_script(KEY, "i")
        frame(0.5)
        driver.execute_script(BRANCH)
        until(driver, "document.querySelector('.whatif output').textContent.startsWith('8 branches')")
        until(driver, "document.querySelectorAll('.strip .dot').length === 8")
        time.sleep(1)  # the curves are drawn
        frame(1.5)
        driver.execute_script(FIRST_BRANCH)
        until(driver, "document.querySelector('.banner.difference')")
        driver.execute_script(KEY, "i")
        for step in range(80, 141, 5):
            scrub(step, pictures=2)
            frame(0.15)
    first, *others = (picture for picture, _ in frames)
    durations = [duration for _, duration in frames[:-1]] + [2000]
    first.save(
        HERE / "killed.webp", save_all=True, append_images=others, duration=durations, loop=0, quality=80, method=6
    )


def has_episodes(directory: Path, number: int) -> bool:
    try:
        return len(open_trace(directory)) >= number
    except TraceNotFound:
        return False


def main() -> None:
    if reason := browser.missing():
        sys.exit(f"make pictures: {reason}")
    with tempfile.TemporaryDirectory() as folder, browser.browser(Path(folder, "profile")) as driver:
        stills(driver, Path(folder))
        animation(driver, Path(folder))
    for path in sorted([*HERE.glob("*.png"), *HERE.glob("*.webp")]):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
