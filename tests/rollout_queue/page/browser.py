"""A headless Chromium for the tests of the page, through selenium and chromedriver."""

from __future__ import annotations

import shutil
from typing import Any

from selenium.common.exceptions import TimeoutException
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S = 60.0  # for what a busy machine does late; a test that passes waits for none of it
DRAWN = "document.querySelector('.view:not([hidden])')"
READY = f"window.Plotly && slipstream.page && slipstream.page.source.page && {DRAWN}"


def find_chromium() -> tuple[str, str] | None:
    """Return the paths of a browser and its driver; None where one is missing."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser is not None and driver is not None else None


class Browser:
    """A browser with one tab. What its scripts return is JSON."""

    def __init__(self, browser: str, driver: str) -> None:
        options = ChromeOptions()
        options.binary_location = browser
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(argument)
        options.add_argument("--js-flags=--expose-gc")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = Chrome(options=options, service=Service(driver))
        self.driver.set_script_timeout(WAIT_S)

    def show(self, url: str, view: str = "", ready: str = READY, size: tuple[int, int] = (1280, 800)) -> None:
        """Open an address in a new state of the tab, and wait until the page has its data.

        Args:
            view: The hash: the view's state.
            ready: Expression that is true once the page can be looked at.
            size: Width and height, pixels; a width below 500 is a phone's.
        """
        self.driver.get("about:blank")
        self.driver.delete_all_cookies()
        self.log()
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get(f"{url}#{view}")
        self.wait(ready)

    def run(self, expression: str, *values: Any) -> Any:
        """Return the value of an expression; `arguments` holds the values."""
        return self.driver.execute_script(f"return ({expression});", *values)

    def wait(self, expression: str, *values: Any, within_s: float = WAIT_S) -> Any:
        """Wait until an expression is true, and return its value."""
        try:
            return WebDriverWait(self.driver, within_s, 0.02).until(lambda _: self.run(expression, *values))
        except TimeoutException:
            raise AssertionError(f"not true within {within_s:g} s: {expression}; log: {self.log()}") from None

    def text(self, selector: str) -> str:
        """Return the text of the first element that a CSS selector finds, shown or not."""
        return str(self.run("document.querySelector(arguments[0]).textContent", selector))

    def texts(self, selector: str) -> list[str]:
        return list(self.run("[...document.querySelectorAll(arguments[0])].map((node) => node.textContent)", selector))

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def type(self, selector: str, text: str) -> None:
        self.driver.find_element("css selector", selector).send_keys(text)

    def press(self, keys: str) -> None:
        """Press keys, wherever the focus is."""
        ActionChains(self.driver).send_keys(keys).perform()

    def point(self, selector: str, x: float, y: float) -> None:
        """Move the pointer to a place in an element, in shares of its width and height."""
        element = self.driver.find_element("css selector", selector)
        right, down = (int((share - 0.5) * element.size[side]) for share, side in ((x, "width"), (y, "height")))
        ActionChains(self.driver, 0).move_to_element_with_offset(element, right, down).perform()

    def drag(self, selector: str, start: float, end: float) -> None:
        """Drag across an element, between two shares of its width."""
        element = self.driver.find_element("css selector", selector)
        width = element.size["width"]
        chain = ActionChains(self.driver, 50).move_to_element_with_offset(element, int((start - 0.5) * width), 0)
        chain.click_and_hold().move_by_offset(int((end - start) * width), 0).release().perform()

    def log(self) -> list[str]:
        """Return what the browser has logged since the last call: errors, violations of the CSP."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def close(self) -> None:
        self.driver.quit()
