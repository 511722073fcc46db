"""The system's Chromium, driven by selenium, and a server for it to look at."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_python

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
)


def missing() -> str | None:
    """Return why no browser can be driven here, or None."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "needs selenium"
    if not _found("CHROMIUM", "chromium", "chromium-browser", "google-chrome"):
        return "needs Chromium"
    return None if _found("CHROMEDRIVER", "chromedriver") else "needs chromedriver"


def _found(variable: str, *names: str) -> str | None:
    return os.environ.get(variable) or next((path for name in names if (path := shutil.which(name))), None)


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Any]:
    """A driver of a new browser with the profile in a folder."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = _found("CHROMIUM", "chromium", "chromium-browser", "google-chrome")
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    # Instead of the page of a new tab, which takes a second.
    blank = {"session.restore_on_startup": 4, "session.startup_urls": ["about:blank"]}
    options.add_experimental_option("prefs", blank)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(_found("CHROMEDRIVER", "chromedriver")))
    try:
        driver.set_script_timeout(60)
        look(driver)
        yield driver
    finally:
        driver.quit()


def look(driver: Any, width: int = 1280, height: int = 800, theme: str = "light", scale: int = 1) -> None:
    """Set the size of the window, and light or dark."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": theme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


@contextlib.contextmanager
def served(*traces: Path) -> Iterator[str]:
    """The address of a server of these traces, in a process of its own."""
    command = [sys.executable, "-c", "from gym_trace_cli.main import cli; cli()", "view", "--no-browser"]
    with forked_python.Popen([*command, *map(str, traces)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
