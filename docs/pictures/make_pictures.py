"""Make viewer.png and viewer-dark.png: the viewer with a Pong episode, recorded here, in the system's Chromium.

Usage: python docs/pictures/make_pictures.py
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "helpers"))

import browser  # noqa: E402 - found by the line above

SIZE = (1280, 800)
PLACE = "#trace=0&episode=1&step=420"
# Everything is drawn: the picture of the step, its values, and the plots in sight.
READY = """
return document.querySelector('.picture canvas[data-step="420"]')
  && document.querySelectorAll('.panel canvas').length >= 3
  && document.querySelector('.step:not(.waiting) .values .line')
"""


def main() -> None:
    if reason := browser.missing():
        sys.exit(f"make pictures: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "pong")
        record = ["record", "ALE/Pong-v5", "--import", "ale_py", "-o", str(trace), "--episodes", "3", "--seed", "0"]
        subprocess.run([sys.executable, "-m", "gym_trace", *record, "--infos", "--quiet"], check=True)
        with browser.served(trace) as address, browser.browser(Path(folder, "profile")) as driver:
            driver.get(address)
            for theme, name in (("light", "viewer.png"), ("dark", "viewer-dark.png")):
                browser.look(driver, *SIZE, theme=theme)
                driver.get("about:blank")
                driver.get(address.partition("?")[0] + PLACE)
                end = time.monotonic() + 20
                while not driver.execute_script(READY):
                    if time.monotonic() > end:
                        sys.exit("make pictures: the page did not finish drawing in 20 s")
                    time.sleep(0.1)
                picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
                picture.quantize(192, dither=Image.Dither.NONE).save(HERE / name, optimize=True)
                print(f"{HERE / name}: {(HERE / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
