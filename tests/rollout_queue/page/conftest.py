"""One browser for the tests of a file, and a server with made-up data for each test."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.rollout_queue.page.page_data import make_page
from tests.rollout_queue.page.page_server import PageServer, serving


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """Start a browser. Skips the test where the machine has none."""
    if find_spec("selenium") is None:
        pytest.skip("the page was not tried: Python's package selenium is not installed")
    from tests.rollout_queue.page.browser import Browser, find_chromium

    if (found := find_chromium()) is None:
        pytest.skip("the page was not tried: install Debian's packages chromium and chromium-driver")
    shown = Browser(*found)
    yield shown
    shown.close()


@pytest.fixture
def served() -> Iterator[PageServer]:
    with serving(make_page()) as server:
        yield server
