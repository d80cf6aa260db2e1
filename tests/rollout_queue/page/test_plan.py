"""The page of a run that is planned: one file with the loop, what each change brings, and what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from slipstream.deploy.commands.plan_page import page_data, view
from slipstream.deploy.planning.advice import plan
from slipstream.deploy.planning.rates import EpisodeTimes, Measured, PublicationTimes, Rates, Record
from slipstream.deploy.planning.serving import Curve
from slipstream.protocol.history import PageData
from tests.kit.config import config
from tests.rollout_queue.page.page_server import write_report

if TYPE_CHECKING:
    from tests.rollout_queue.page.browser import Browser

READY = "window.slipstream && slipstream.page && slipstream.page.source.page && document.querySelector('svg.loop text')"
RUN = config(
    {
        "rollout": {"group_size": 4},
        "learner": {"groups_per_step": 4},
        "worker": {"episodes": 16},
        "vllm": {"max_num_seqs": 16},
    }
)
RATES = Rates(
    episodes=(EpisodeTimes(2, 20.0),),
    curve=Curve.line(0.01, 0.005),
    publications=(PublicationTimes(0.02, 0.005, 0.04),),
    zero_variance=(0.5,),
    step_s=0.2,
    trained_token_s=0.0,
)
MEASURED = Measured(19, 1.119, 4068.0, 2624.0, 1.16, 4, 0.82, None)


def planned(rates: Rates = RATES) -> PageData:
    made = plan(RUN, rates, 40, notes=("<script>alert(1)</script>",))
    return page_data(made, RUN, view(made, RUN, Record(RUN, rates, MEASURED, ()), "runs/night"))


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
def test_a_plan_is_drawn_with_its_waits_and_advice(browser: Browser, tmp_path: Path, size: tuple[int, int]) -> None:
    page = planned()
    assert page.plan is not None
    assert page.status is not None
    assert page.status.limit is not None
    url = write_report(msgspec.to_builtins(page), tmp_path / "plan.html").as_uri()
    browser.show(url, ready=READY, size=size)
    view_of = "document.querySelector('.view:not([hidden])')"
    assert browser.text(".pill") == "planned"
    assert browser.text(".progress") == page.plan.title
    assert browser.text(".view:not([hidden]) .limit") == page.status.limit.text
    assert page.status.limit.part == "servers"
    assert browser.text(".advice") == page.plan.advice
    drawn = " ".join(browser.texts(".view:not([hidden]) svg.loop text"))
    wait = next(wait for wait in page.status.waits if wait.who == "learner")
    for said in (page.plan.weights, f"learner {wait.what}"):
        assert "".join(said.split()) in "".join(drawn.split())
    for node in page.plan.nodes.values():
        assert node.big in drawn
    rows = (
        "[...document.querySelectorAll(arguments[0])].map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    tables = browser.run(f"[...{view_of}.querySelectorAll('table')].length")
    assert tables == 2
    changes, figures = (browser.run(rows, f".view .columns > :nth-child({n}) .plan tbody tr") for n in (1, 2))
    assert figures == [list(figure) for figure in page.plan.figures]
    assert figures[0][2] == "1.119"
    assert changes == [[c.text, "", c.shown_gain, c.steps_per_s, c.staleness] for c in page.plan.changes]
    widths = browser.run("[...document.querySelectorAll('.bar i')].map((bar) => bar.getBoundingClientRect().width)")
    gains = [abs(change.gain) for change in page.plan.changes]
    assert widths == pytest.approx([widths[0] * gain / gains[0] for gain in gains], abs=1.0)
    assert widths[0] > 20
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert "<script>" in browser.text(".view:not([hidden])"), "hostile text is text"
    # It has no other views.
    assert browser.run("document.querySelector('.top nav').hidden")
    browser.press("3")
    assert browser.run(f"{view_of}.querySelector('.advice') !== null")
    assert browser.log() == []


def test_what_waits_for_nobody_is_said_so(browser: Browser, tmp_path: Path) -> None:
    page = planned(replace(RATES, step_s=20.0))
    assert page.status is not None
    assert page.status.limit is not None
    assert page.status.limit.part == "learner"
    url = write_report(msgspec.to_builtins(page), tmp_path / "plan.html").as_uri()
    browser.show(url, ready=READY)
    drawn = browser.texts(".view:not([hidden]) svg.loop text")
    assert any(text.startswith("each slot waits") for text in drawn)
    assert browser.run("[...document.querySelectorAll('.view:not([hidden]) .node.waits')].length") == 2
