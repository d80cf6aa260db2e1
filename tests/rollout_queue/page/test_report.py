"""The page of a run that is over: one file, without a network, with a time slider."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.rollout_queue.page.page_data import make_page
from tests.rollout_queue.page.page_server import write_report

if TYPE_CHECKING:
    from tests.rollout_queue.page.browser import Browser

SLIDE = (
    "((range) => { range.value = arguments[0]; range.dispatchEvent(new Event('input')); })"
    "(document.querySelector('.slider input'))"
)


def test_a_report_shows_the_run_without_a_network(browser: Browser, tmp_path: Path) -> None:
    page = make_page(live=False)
    url = write_report(page, tmp_path / "report.html").as_uri()
    browser.show(url, "view=charts")
    browser.wait("document.querySelector('.view-charts [data-chart=reward] .plot').data")
    assert (
        browser.run("document.querySelector('.view-charts [data-chart=reward] .plot').data[0].y")
        == page["steps"]["reward"]
    )
    assert browser.text(".pill") == "finished"
    for view in ("1", "3", "4"):
        browser.press(view)
    browser.press("j")
    browser.wait("document.querySelector('.episode') !== null")
    assert browser.run("performance.getEntriesByType('resource').map((entry) => entry.name)") == []
    assert browser.log() == []


def test_the_slider_sets_picture_and_tables_to_its_second(browser: Browser, tmp_path: Path) -> None:
    page = make_page(live=False)
    for at, status in page["statuses"][:20]:
        status["servers"][1] |= {"state": "quarantined", "reason": f"failed at {at}"}
        status["stall"] |= {"stalled": True, "since_s": 7.0, "why": "no worker"}
    url = write_report(page, tmp_path / "report.html").as_uri()
    browser.show(url)
    assert "step 40 of 40" in browser.text("svg.loop")
    first = page["statuses"][0][0]
    at, status = page["statuses"][10]
    browser.run(SLIDE, round(at - first))
    browser.wait("document.querySelector('svg.loop').textContent.includes('step 10 of 40')")
    assert browser.text(".limit") == "No optimiser step for 7 s: no worker."
    assert float(browser.run("slipstream.state.get('at')")) == at
    browser.press("3")
    row = "table[data-table=servers] tr:last-child td"
    cells = f"[...document.querySelectorAll('{row}')].map((node) => node.textContent)"
    browser.wait(f"{cells}[1] === 'quarantined'")
    assert browser.run(cells)[2] == "9"
    assert browser.run(cells)[6] == f"failed at {at}"
    browser.press("]")
    browser.wait(f"{cells}[2] === '10'")
    browser.press("2")
    browser.wait("document.querySelector('.view-charts [data-chart=reward] .plot').data")
    shapes = "document.querySelector('.view-charts [data-chart=reward] .plot').layout.shapes"
    assert browser.run(f"{shapes}.filter((shape) => shape.line.width === 2).length") == 1
    state = browser.run("location.hash.slice(1)")
    browser.show(url, state)
    after = round(page["statuses"][11][0] - first)
    browser.wait(f"document.querySelector('.slider input').value === '{after}'")
    browser.run(SLIDE, round(page["statuses"][-1][0] - first))
    browser.wait("!slipstream.state.get('at')")


def test_a_slider_plays_to_the_end(browser: Browser, tmp_path: Path) -> None:
    url = write_report(make_page(live=False, steps=12), tmp_path / "report.html").as_uri()
    browser.show(url)
    browser.click(".slider button")
    browser.wait("document.querySelector('.slider button').textContent === 'Stop'")
    browser.wait("document.querySelector('.slider button').textContent === 'Play'")
    assert browser.run("document.querySelector('.slider input').value === document.querySelector('.slider input').max")


def test_a_run_without_any_history_is_shown_too(browser: Browser, tmp_path: Path) -> None:
    page = {"run": "crashed", "live": False, "now": 0.0, "max_staleness": 4, "group_size": 8, "groups_per_step": 16}
    url = write_report({**page, "status": None}, tmp_path / "report.html").as_uri()
    browser.show(url)
    browser.wait("document.querySelector('.limit').textContent === 'No state of the run is known.'")
    for view in ("2", "3", "4", "1"):
        browser.press(view)
        browser.wait(
            "slipstream.state.get('view') === arguments[0]", ["", "charts", "fleet", "rollouts"][int(view) - 1]
        )
    assert browser.log() == []


def test_a_run_whose_times_are_not_known_is_drawn_over_steps(browser: Browser, tmp_path: Path) -> None:
    page = make_page(live=False)
    page["steps"]["at"] = [None] * len(page["steps"]["step"])
    url = write_report({**page, "time": {}, "statuses": []}, tmp_path / "report.html").as_uri()
    browser.show(url, "view=charts")
    line = browser.wait("document.querySelector('.view-charts [data-chart=reward] .plot').data?.[0]")
    assert (line["x"], line["y"]) == (page["steps"]["step"], page["steps"]["reward"])
    assert browser.log() == []
