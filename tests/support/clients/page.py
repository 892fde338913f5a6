"""The page at `GET /` in a real browser, with the actions and the view of a user."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.support.clients.browser import console_messages, emulate

WAIT_S = 60.0


class Page:
    """One tab. Every wait ends after WAIT_S with an error."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        self.url = url

    def open(self) -> None:
        """Loads the page with an empty session, as in a new tab."""
        emulate(self.browser, width=1200)
        self.browser.get(f"{self.url}v2/health/live")  # has the same session, and is small
        self.browser.execute_script("sessionStorage.clear()")
        self.browser.get(self.url)
        # The browser would complain of a click that comes before this.
        self.wait(lambda: self.run("return document.activeElement.id") == "prompt", "the field has no focus")
        console_messages(self.browser)

    def find(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def last(self, selector: str) -> WebElement:
        """The first matching element of the newest turn."""
        return self.browser.find_elements(By.CSS_SELECTOR, f".turn:last-child {selector}")[0]

    def boxes(self, state: str, *selectors: str) -> list[list[float]]:
        """Left, top, right and bottom of the elements, with this state of the server in the live view."""
        return self.run(
            """
            const [state, selectors] = arguments;
            document.getElementById('state').textContent = state;
            document.getElementById('kv-usage').textContent = '9.9 %';
            return selectors.map((selector) => {
              const box = document.querySelector(selector).getBoundingClientRect();
              return [box.left, box.top, box.right, box.bottom];
            });
            """,
            state,
            selectors,
        )

    def run(self, script: str, *arguments: object) -> Any:
        return self.browser.execute_script(script, *arguments)

    def text_of(self, selector: str) -> str:
        """The whole text of an element of the newest turn, visible or not."""
        return self.last(selector).get_property("textContent")

    def fill(self, field: str, value: str) -> None:
        self.run("arguments[0].closest('details')?.setAttribute('open', '')", self.find(f"#{field}"))
        self.find(f"#{field}").clear()
        self.find(f"#{field}").send_keys(value)

    def send(self, question: str) -> None:
        self.find("#prompt").send_keys(question + Keys.ENTER)

    def wait_answered(self) -> None:
        self.wait(lambda: not self.browser.find_elements(By.CSS_SELECTOR, ".is-streaming"), "the answer goes on")
        self.wait(lambda: self.last(".actions").is_displayed(), "the answer has no end")

    def wait(self, condition: Callable[[], object], message: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(WebDriverException):  # for example, an element does not exist yet
                if condition():
                    return
            assert time.monotonic() < deadline, f"{message}; console: {console_messages(self.browser)}"
            time.sleep(0.05)
