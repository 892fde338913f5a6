"""A headless Chromium with its own profile, for tests of the page. Debian has packages of it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from selenium import webdriver

PROGRAMS = ("chromium", "chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # Chromium has no sandbox for root, and tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",  # /dev/shm is small in containers
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PAGE_TIMEOUT_S = 60.0


@contextlib.contextmanager
def running_browser() -> Iterator[webdriver.Chrome]:
    """A new browser. Skips the test where Chromium or its driver is missing."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian packages: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        browser.set_page_load_timeout(PAGE_TIMEOUT_S)
        browser.set_script_timeout(PAGE_TIMEOUT_S)
        try:
            yield browser
        finally:
            browser.quit()


def console_messages(browser: webdriver.Chrome) -> list[str]:
    """The messages of the page and the warnings of the browser in the console since the last call."""
    return [entry["message"] for entry in browser.get_log("browser")]


def emulate(browser: webdriver.Chrome, *, width: int, height: int = 800, **media: str) -> None:
    """Sets the size of the window and media features such as `prefers_color_scheme="dark"`."""
    features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
    metrics: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
