"""The live page: sign-in, a stream that breaks off and comes back, and a tab that is left open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.rollout_queue.page.page_data import made_up_steps, make_page, make_status
from tests.rollout_queue.page.page_server import PageServer, serving

if TYPE_CHECKING:
    from tests.rollout_queue.page.browser import Browser

BANNER = "document.querySelector('.banner')"


def test_sign_in_with_a_viewers_token(browser: Browser, served: PageServer) -> None:
    served.token = "the viewer's"
    browser.show(served.url, ready="document.querySelector('.sign-in:not([hidden])') !== null")
    assert not browser.driver.find_element("css selector", "main").is_displayed()
    browser.type(".sign-in input", "a wrong one\n")
    browser.wait("document.querySelector('.sign-in [role=alert]').textContent")
    assert browser.text(".sign-in [role=alert]") == "This is no viewer's token of this run."
    browser.driver.find_element("css selector", ".sign-in input").clear()
    browser.type(".sign-in input", "the viewer's\n")
    browser.wait("document.querySelector('.sign-in[hidden]') !== null && !document.querySelector('main').hidden")
    browser.wait("document.querySelector('h1').textContent === 'multiply'")
    assert browser.run("slipstream.page.source.connection.state") == "live"
    assert "the viewer" not in browser.run("location.href + JSON.stringify(localStorage)")


def test_a_broken_stream_is_said_polled_over_and_opened_again(browser: Browser, served: PageServer) -> None:
    browser.show(served.url)
    browser.wait("slipstream.page.source.connection.state === 'live'")
    served.down = True
    served.break_streams()
    browser.wait(f"!{BANNER}.hidden && {BANNER}.textContent.includes('the queue answered 503')")
    assert browser.text(".banner").startswith("Nothing has come since ")
    assert browser.run("document.querySelector('svg.loop text') !== null")
    served.page = {**served.page, "status": make_status(made_up_steps(41), 41, 90.0)}
    served.down = False
    browser.wait(f"{BANNER}.hidden && slipstream.page.source.connection.state === 'live'")
    browser.wait("document.querySelector('.progress').textContent.includes('step 41 of 41')")
    served.push("status", make_status(made_up_steps(42), 42, 92.0))
    browser.wait("document.querySelector('.progress').textContent.includes('step 42 of 42')")


def test_a_page_that_nobody_looks_at_holds_no_connection(browser: Browser, served: PageServer) -> None:
    """A browser has six to a queue: the seventh page would wait for ever."""

    def streams(count: int) -> None:
        step = 40
        while served.streams() != count:  # an end is noticed by what is sent
            step += 1
            served.push("status", {**served.page["status"], "step": step})
            browser.run("new Promise((done) => setTimeout(done, 20))")

    for _ in range(7):
        browser.show(served.url)
        browser.wait("slipstream.page.source.connection.state === 'live'")
    streams(1)
    hide = "Object.defineProperty(document, 'hidden', { value: arguments[0], configurable: true })"
    change = "document.dispatchEvent(new Event('visibilitychange'))"
    browser.run("slipstream.source.TIMES.hidden = 0")
    browser.run(f"{hide} && {change}", True)
    browser.wait("slipstream.page.source.connection.state === 'resting'")
    streams(0)
    served.page["run"] = "later"
    browser.run(f"{hide} && {change}", False)
    browser.wait("slipstream.page.source.connection.state === 'live'")
    browser.wait("document.querySelector('h1').textContent === 'later'")


def test_a_tab_outlives_a_queue_that_is_started_again(browser: Browser) -> None:
    page = make_page()
    with serving(page) as before:
        browser.show(before.url, "view=fleet")
        browser.wait("slipstream.page.source.connection.state === 'live'")
        port = int(before.url.rstrip("/").rpartition(":")[2])
    browser.wait(f"!{BANNER}.hidden && {BANNER}.textContent.includes('the queue does not answer')")
    assert browser.texts("table[data-table='servers'] td:first-child") == ["vllm-0", "vllm-1"]
    with serving({**page, "run": "again"}, port):
        browser.wait(f"{BANNER}.hidden && document.querySelector('h1').textContent === 'again'")
        assert browser.run("slipstream.state.get('view')") == "fleet"


def test_a_queue_that_ends_after_its_run_is_no_alarm(browser: Browser) -> None:
    page = make_page()
    with serving(page) as server:
        browser.show(server.url)
        browser.wait("slipstream.page.source.connection.state === 'live'")
        server.push("status", {**page["status"], "finished": True})
        browser.wait("document.querySelector('.pill').textContent === 'finished'")
    browser.wait("slipstream.page.source.connection.state === 'lost'")
    browser.wait("document.querySelector('.connection').textContent === 'the run is over'")
    assert browser.run(f"{BANNER}.hidden")


def test_an_evaluation_of_a_status_stands_beside_the_earlier_ones(browser: Browser, served: PageServer) -> None:
    browser.show(served.url, "view=fleet")
    served.opened.acquire(timeout=60)
    newer = {**served.page["evaluations"][0], "step": 20, "reward": 0.75}
    served.push("status", {**served.page["status"], "evaluations": [newer]})
    rewards = (
        "[...document.querySelectorAll('table[data-table=evaluations] td:nth-child(2)')].map((n) => n.textContent)"
    )
    browser.wait(f"{rewards}.join() === '0.75,0.61'")


def test_an_event_that_cannot_be_read_ends_nothing(browser: Browser, served: PageServer) -> None:
    browser.show(served.url, "view=charts")
    served.opened.acquire(timeout=60)
    served.push_text("step", "{not JSON")
    served.push("step", {"step": 41, "at": served.page["now"] + 1, "reward": 1.0})
    browser.wait("slipstream.page.source.page.steps.step.at(-1) === 41")
    assert browser.run("slipstream.page.source.connection.state") == "live"


def test_a_resumed_run_replaces_the_steps_that_it_makes_again(browser: Browser, served: PageServer) -> None:
    browser.show(served.url)
    served.opened.acquire(timeout=60)
    served.push("step", {"step": 31, "at": served.page["now"] + 1, "reward": 0.125})
    browser.wait("slipstream.page.source.page.steps.step.at(-1) === 31")
    assert browser.run("slipstream.page.source.page.steps.step") == list(range(1, 32))
    assert browser.run("slipstream.page.source.page.steps.reward")[-2:] == [served.page["steps"]["reward"][29], 0.125]


@pytest.mark.wide
def test_a_tab_left_open_holds_its_memory(browser: Browser) -> None:
    page = make_page()
    with serving(page) as served:
        browser.show(served.url, "view=charts")
        browser.wait("document.querySelector('[data-chart=\"reward\"] .plot').data")
        served.opened.acquire(timeout=60)
        view = page["rollouts"][0]
        limits: dict[str, Any] = browser.run("slipstream.source.LIMITS")
        nodes: list[int] = []
        for batch in range(4):
            for i in range(1250):
                number = 1250 * batch + i
                at = page["now"] + number
                served.push("time", {"at": at, "depth": 1.0, "step": 40 + number})
                served.push("step", {"step": 41 + number, "at": at, "reward": 0.5, "entropy": 0.1})
                served.push("event", {"at": at, "kind": "worker", "who": f"w{number}", "text": "joined"})
                served.push("rollouts", [{**view, "ticket_id": f"{number}.1", "step": 41 + number}])
            browser.wait("slipstream.page.source.page.steps.step.at(-1) === arguments[0]", 41 + number)
            shown = "document.querySelector('[data-chart=\"reward\"] .plot').data[0].x.length"
            browser.wait(f"{shown} === slipstream.page.source.page.steps.at.length")
            nodes.append(browser.run("document.getElementsByTagName('*').length"))
        lengths = browser.run(
            "(({ time, steps, events, rollouts }) => ({ time: Math.max(...Object.values(time).map((c) => c.length)),"
            " steps: Math.max(...Object.values(steps).map((c) => c.length)), events: events.length,"
            " rollouts: rollouts.length }))(slipstream.page.source.page)"
        )
        assert all(0 < length <= limits[name] for name, length in lengths.items()), lengths
        even = "new Set(Object.values(slipstream.page.source.page.steps).map((c) => c.length)).size === 1"
        assert browser.run(even)
        assert browser.run("slipstream.page.source.page.steps.step[0]") == 1, "the run's beginning stays visible"
        assert nodes[-1] <= nodes[1] + 50, nodes
        assert browser.log() == []


def test_views_theme_and_help_by_keyboard(browser: Browser, served: PageServer) -> None:
    browser.show(served.url)
    dark = browser.run("document.documentElement.dataset.theme")
    browser.press("t")
    assert browser.run("document.documentElement.dataset.theme") != dark
    browser.press("3")
    browser.wait("!document.querySelector('.view-fleet').hidden")
    assert browser.run("location.hash") == "#view=fleet"
    browser.press("?")
    browser.wait("document.querySelector('dialog').open")
    browser.click("dialog button")
    browser.driver.back()
    browser.wait("!document.querySelector('.view-overview').hidden")
    assert browser.run(
        "[...document.querySelectorAll('button, input, select')].every((node) => "
        "(node.getAttribute('aria-label') || node.textContent || node.labels?.length))"
    )
