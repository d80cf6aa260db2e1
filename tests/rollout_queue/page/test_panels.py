"""Every panel of the page against the JSON that it draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.rollout_queue.page.page_data import GROUPS_PER_STEP, make_page
from tests.rollout_queue.page.page_server import PageServer, serving

if TYPE_CHECKING:
    from tests.rollout_queue.page.browser import Browser

# Chart, line, part of PageData, column, and the factor from the one to the other.
LINES: list[tuple[str, str, str, str, float]] = [
    ("reward", "reward", "steps", "reward", 1),
    ("reward", "format", "steps", "rewards/format/mean", 1),
    ("depth", "depth", "time", "depth", 1),
    ("depth", "target", "time", "depth_target", 1),
    ("depth", "limit", "time", "limit", 1 / GROUPS_PER_STEP),
    ("staleness", "mean", "steps", "staleness_mean", 1),
    ("staleness", "in the queue", "steps", "staleness_in_queue", 1),
    ("step_time", "waits for groups", "steps", "wait_s", 1),
    ("step_time", "hands weights over", "steps", "publish_blocked_ms", 0.001),
    ("tokens", "sampled", "time", "rate_tokens_sampled", 1),
    ("tokens", "trained", "time", "rate_tokens_trained", 1),
    ("waits", "learner, for groups", "time", "learner_wait_share", 1),
    ("groups", "ready", "time", "ready", 1),
    ("drops", "zero variance", "time", "drop/zero_variance", 1),
    ("activity", "in tools", "time", "workers_in_tools", 1),
    ("entropy", "entropy", "steps", "entropy", 1),
    ("kl", "to the sampling policy", "steps", "kl", 1),
    ("clip", "high", "steps", "clip_ratio/high_mean", 1),
    ("ratio", "99th percentile", "steps", "sampler/ratio_p99", 1),
    ("turns", "mean", "steps", "rollout/turns_mean", 1),
    ("tool_failures", "all", "steps", "tools/failure_frequency", 1),
    ("finish", "stop", "steps", "finish/stop", 1),
    ("servers", "serving", "time", "servers_serving", 1),
    ("metric:house_metric", "house_metric", "steps", "house_metric", 1),
]

OPEN_ALL = "document.querySelectorAll('details.section').forEach((node) => { node.open = true; })"


def drawn(browser: Browser, chart: str) -> list[dict[str, Any]]:
    """Bring a chart into view, and return the lines that plotly has drawn."""
    selector = f'.view-charts [data-chart="{chart}"]'
    browser.run("document.querySelector(arguments[0]).scrollIntoView({ block: 'center' })", selector)
    lines = "document.querySelector(arguments[0] + ' .plot').data"
    browser.wait(lines, selector)
    return list(browser.run(f"{lines}.map(({{ name, x, y, line }}) => ({{ name, x, y, dash: line.dash }}))", selector))


@pytest.mark.parametrize("axis", ["time", "step"])
def test_every_chart_draws_its_columns(browser: Browser, served: PageServer, axis: str) -> None:
    page = served.page
    browser.show(served.url, f"view=charts&x={axis}")
    browser.run(OPEN_ALL)
    assert not {line[0] for line in LINES} - set(browser.run("[...slipstream.page.charts.byId.keys()]"))
    for chart, name, part, column, factor in LINES:
        line = next(line for line in drawn(browser, chart) if line["name"] == name)
        assert line["y"] == pytest.approx([value * factor for value in page[part][column]]), (chart, name)
        at = page[part]["at"]
        if axis == "time":
            assert [x - line["x"][0] for x in line["x"]] == pytest.approx([1000 * (t - at[0]) for t in at]), chart
        elif part == "steps":
            assert line["x"] == page["steps"]["step"], chart
        else:
            assert sorted(line["x"]) == line["x"]
            assert line["x"][-1] == page["steps"]["step"][-1]
    assert browser.log() == []


def test_charts_without_data_are_hidden_and_phases_add_up(browser: Browser, served: PageServer) -> None:
    steps = served.page["steps"]
    steps["entropy"] = [None] * len(steps["at"])
    del steps["loss"]
    browser.show(served.url, "view=charts&x=step")
    charts = browser.run("[...slipstream.page.charts.byId.keys()]")
    assert "kl" in charts
    assert not {"entropy", "loss", "evaluation"} & set(charts)
    phases = drawn(browser, "step_time")
    sums = [sum(values) for values in zip(*(line["y"] for line in phases), strict=True)]
    assert sums == pytest.approx(steps["step_time"])


def test_another_run_is_drawn_dashed_from_the_same_start(browser: Browser) -> None:
    other = make_page(steps=20)
    part = {name: {**other[name], "at": [at - 9000 for at in other[name]["at"]]} for name in ("time", "steps")}
    with serving({**make_page(), "compare": {"run": "before", **part}}) as served:
        browser.show(served.url, "view=charts")
        lines = {line["name"]: line for line in drawn(browser, "reward")}
        assert lines["reward (before)"]["y"] == part["steps"]["reward"]
        assert {name: line["dash"] for name, line in lines.items()} == {
            **dict.fromkeys(("reward", "accuracy", "format"), "solid"),
            **dict.fromkeys(("reward (before)", "accuracy (before)", "format (before)"), "dash"),
        }
        start = {name: line["x"][0] - line["x"][0] % 1000 for name, line in lines.items()}
        assert abs(start["reward (before)"] - start["reward"]) < 5000


def test_one_cursor_and_one_zoom_for_all_charts(browser: Browser, served: PageServer) -> None:
    steps = served.page["steps"]
    browser.show(served.url, "view=charts&x=step", size=(1280, 1400))
    drawn(browser, "depth")
    drawn(browser, "reward")
    browser.point('[data-chart="reward"] .plot', 0.5, 0.5)
    label = browser.wait("document.querySelector('[data-chart=\"reward\"] .cursor span').textContent")
    step = int(label.removeprefix("step "))
    cursors = "['reward', 'depth'].map((id) => document.querySelector(`[data-chart='${id}'] .cursor`))"
    assert browser.run(f"{cursors}.every((node) => !node.hidden)")
    shown = browser.text('[data-chart="reward"] .series b')
    assert float(shown) == pytest.approx(steps["reward"][steps["step"].index(step)], abs=0.002)

    browser.drag('[data-chart="reward"] .plot', 0.4, 0.7)
    browser.wait("slipstream.state.get('from') && slipstream.state.get('to')")
    zoomed = [float(browser.run("slipstream.state.get(arguments[0])", name)) for name in ("from", "to")]
    assert 10 < zoomed[0] < zoomed[1] < 35
    ranges = "['reward', 'depth'].map((id) => document.querySelector(`[data-chart='${id}'] .plot`).layout.xaxis.range)"
    together = f"{ranges}.every((range) => range.every((x, i) => Math.abs(x - arguments[0][i]) < 0.01))"
    browser.wait(together, zoomed)

    served.push("step", {"step": 41, "at": steps["at"][-1] + 2, "reward": 0.95})
    browser.wait("document.querySelector('[data-chart=\"reward\"] .plot').data[0].x.at(-1) === 41")
    assert browser.run(together, zoomed)
    browser.click(".view-charts .tools > button")
    browser.wait("document.querySelector('[data-chart=\"depth\"] .plot').layout.xaxis.range[1] > 41")


def test_lines_break_and_stacks_are_empty_while_the_run_was_stopped(browser: Browser, served: PageServer) -> None:
    page = served.page
    half, later = len(page["steps"]["at"]) // 2, 7200.0
    stopped = page["steps"]["at"][half - 1]
    for part in ("steps", "time"):
        page[part]["at"] = [at + later * (at > stopped) for at in page[part]["at"]]
    began = stopped + later - 5.0
    page["events"].append({"at": began, "kind": "run", "who": None, "text": "the queue started"})
    page["now"] += later
    browser.show(served.url, "view=charts&x=time")
    for chart in ("reward", "depth"):
        line = drawn(browser, chart)[0]
        (gap,) = [i for i, y in enumerate(line["y"]) if y is None]
        assert line["x"][gap + 1] - line["x"][gap - 1] > 1000 * 7000.0, chart
    stack = drawn(browser, "groups")[0]
    assert [y for y in stack["y"] if y == 0] == [0, 0]
    shaded = "document.querySelector('[data-chart=\"reward\"] .plot').layout.shapes.filter((s) => s.type === 'rect')"
    (stop,) = browser.run(shaded)
    assert 1000 * 7000.0 < stop["x1"] - stop["x0"] < 1000 * 7300.0
    assert "stopped for" in browser.run("slipstream.page.charts.describe(arguments[0])", began - 60.0)
    browser.show(served.url, "view=charts&x=step")
    assert None not in drawn(browser, "reward")[0]["y"]


def test_every_figure_that_is_shown_twice_comes_from_one_place(browser: Browser) -> None:
    page = make_page()
    steps, status = page["steps"], page["status"]
    steps["staleness_mean"][-1], steps["staleness_max"][-1], steps["reward"][-1] = 1.75, 3, 0.123
    page["time"]["rate_tokens_sampled"][-1] = status["rates"]["tokens_sampled"] = 777.0
    status["learner"]["wait_share"] = page["time"]["learner_wait_share"][-1] = 0.25
    status["learner_wait_share"] = 0.9  # since the queue's start
    status["workers"].append({**status["workers"][0], "worker_id": "lost", "does": "silent", "episodes_in_flight": 9})
    with serving(page) as served:
        browser.show(served.url)
        tiles = dict(zip(browser.texts(".tile span"), browser.texts(".tile b"), strict=True))
        loop = " ".join(browser.texts("svg.loop text"))
        shown = {"Reward": "0.123", "Staleness": "1.8", "Learner waits": "25 %", "Sampled": "777 tok/s"}
        assert {name: tiles[name] for name in shown} == shown
        for said in (
            "reward 0.123",
            "waits 25 % of its time",
            "777 tokens sampled a second",
            "2 workers, 1 gone, idle",
        ):
            assert said in loop, said
        assert "are 1.8 versions old on average, 3 at most; the bound is 4" in browser.text(".note")
        assert sum(worker["episodes_in_flight"] for worker in status["workers"][:2]) == 20
        assert "20 episodes" in loop
        for chart, value in (("reward", "0.123"), ("staleness", "1.75"), ("tokens", "777")):
            browser.wait(
                "document.querySelector(arguments[0]).textContent === arguments[1]",
                f'.view-overview [data-chart="{chart}"] .series b',
                value,
            )
        assert all(browser.run("[...document.querySelectorAll('.tile')].map((tile) => tile.title.length > 20)"))


def test_what_changed_is_listed_with_its_step(browser: Browser, served: PageServer) -> None:
    texts = [
        "learner.learning_rate = 0.1 (was 0.2), from step 31 on",
        "the task's file, or its tools, are not those of the session before",
    ]
    for text in texts:
        at = served.page["now"] - 1
        served.page["events"].append({"at": at, "kind": "change", "who": None, "text": text, "step": 31})
    browser.show(served.url)
    assert browser.texts("ul.changes li span") == texts[::-1]
    assert browser.texts("ul.changes li time") == ["step 31", ""]


def test_the_loop_says_rates_waits_and_versions(browser: Browser, served: PageServer) -> None:
    status = served.page["status"]
    for size in ((1280, 800), (390, 844)):
        browser.show(served.url, size=size)
        text = " ".join(browser.texts("svg.loop text"))
        groups = status["groups"]
        for said in (
            f"{groups['outstanding']} of {groups['limit']} groups",
            f"step {status['step']} of {status['total_steps']}",
            "1 of 2 serving",
            "versions 39 to 40",
            "1,930",
            "826",
            "12 generating",
            "learner: waiting 3.2 s",
            "for 12 more groups",
            "worker-1: waiting 1.4 s",
            "new weights: version 40",
        ):
            assert said in text, (said, size)
        # The tool's failures keep the run from learning, and stand first.
        told = [served.page["status"]["diagnosis"][0]["text"], status["limit"]["text"]]
        assert browser.text(".limit") == told[0]
        assert browser.texts("ul.diagnosis li span") == told
        assert "12 more groups" in browser.text("ul.waits")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert "Queue: 40 of 48 groups" in browser.run("document.querySelector('svg.loop').getAttribute('aria-label')")


def test_what_limits_the_run_is_said_in_the_queues_words(browser: Browser, served: PageServer) -> None:
    status = served.page["status"]
    status["diagnosis"] = []
    browser.show(served.url)
    served.opened.acquire(timeout=60)
    for limit in ({"part": "tools", "text": "Tools limit the run."}, {"part": None, "text": "No part by itself."}):
        served.push("status", {**status, "limit": limit})
        browser.wait("document.querySelector('.limit').textContent === arguments[0]", limit["text"])
        assert browser.texts("ul.diagnosis li span") == [limit["text"]]
    served.push("status", {**status, "limit": None})
    browser.wait("document.querySelector('.limit').textContent.includes('not known before a few steps')")


def test_rows_are_drawn_by_their_mean_reward_and_move(browser: Browser, served: PageServer) -> None:
    status = served.page["status"]
    heights = "[...document.querySelectorAll('.histogram i')].map((bar) => parseFloat(bar.style.height))"
    hidden = "document.querySelector('.panel.rows').hidden"
    browser.show(served.url)
    served.opened.acquire(timeout=60)
    assert browser.run(hidden), "rows are estimated with task.order = learnable alone"
    rows = {"rows": 4000, "tried": 8, "teaching": 3, "lowest": 0.0, "highest": 1.0, "histogram": [4, 0, 2, 1, 1]}
    served.push("status", {**status, "rows": rows})
    browser.wait(f"!{hidden}")
    assert browser.run(heights) == [100, 0, 50, 25, 25]
    assert browser.texts(".ends span") == ["0", "1"]
    assert "8 of 4,000 rows tried" in browser.text(".panel.rows p")
    titles = browser.run("[...document.querySelectorAll('.histogram i')].map((bar) => bar.title)")
    assert titles[2] == "2 rows with a mean reward of 0.4 to 0.6"
    served.push("status", {**status, "rows": {**rows, "lowest": 0.5, "highest": 0.5, "histogram": [8]}})
    browser.wait(f"{heights}.length === 1")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    served.push("status", {**status, "rows": None})
    browser.wait(hidden)
    assert browser.log() == []


def test_the_share_of_tokens_that_taught_nothing_has_a_tile(browser: Browser, served: PageServer) -> None:
    status = served.page["status"]
    status["tokens_dropped"] = {"zero_variance": status["tokens_sampled"] / 4, "overage": status["tokens_sampled"] / 4}
    status["rates"] |= {"tokens_trained": 300.0, "tokens_dropped": 100.0}
    browser.show(served.url)
    tiles = dict(zip(browser.texts(".tile span"), browser.texts(".tile b"), strict=True))
    notes = dict(zip(browser.texts(".tile span"), browser.texts(".tile small"), strict=True))
    assert (tiles["Taught nothing"], notes["Taught nothing"]) == ("50 %", "25 % in the last minute")


def test_a_stall_is_said_within_a_second_of_its_status(browser: Browser, served: PageServer) -> None:
    browser.show(served.url)
    served.opened.acquire(timeout=60)
    why = "no vLLM server is serving: vllm-0 is down (connection refused)"
    stall = {"stalled": True, "since_s": 130.0, "why": why, "after_s": 120.0}
    served.push("status", {**served.page["status"], "stall": stall})
    browser.wait("document.querySelector('.pill').textContent === 'stalled'")
    assert browser.text(".limit") == f"No optimiser step for 2 min 10 s: {why}."
    assert browser.run("document.querySelector('svg.loop .alarm') !== null")


def test_tables_sort_filter_and_page(browser: Browser) -> None:
    page = make_page()
    worker = page["status"]["workers"][0]
    page["status"]["workers"] = [
        {**worker, "worker_id": f"worker-{i}", "tokens_sampled": (i * 7919) % 1000} for i in range(1000)
    ]
    with serving(page) as served:
        browser.show(served.url, "view=fleet")
        cells = "[...document.querySelectorAll(`table[data-table='workers'] td:nth-child(${arguments[0]})`)]"
        texts = f"{cells}.map((node) => node.textContent)"
        assert browser.run(texts, 1) == [f"worker-{i}" for i in range(50)]
        browser.run("[...document.querySelectorAll('th button')].find((b) => b.textContent === 'Tokens').click()")
        assert browser.run(texts, 10) == [str(i) for i in range(50)]
        assert browser.run("slipstream.state.get('sort.workers')") == "tokens"
        browser.type("input[aria-label='Filter: Workers']", "worker-99")
        assert sorted(browser.run(texts, 1)) == sorted(["worker-99", *(f"worker-{i}" for i in range(990, 1000))])
        servers = browser.texts("table[data-table='servers'] tr:last-child td")
        assert servers[:6] == ["vllm-1", "syncing", "39", "1", "0.6 s", "version 40, which is on its way"]
        assert servers[8:11] == ["–", "–", "–"], "it has no proof yet"
        first = browser.texts("table[data-table='servers'] tr:first-child td")
        assert first[8:11] == ["3.2e−4", "0.42 s", "0.012 s"]
        assert browser.text("table[data-table='evaluations'] td:nth-child(2)") == "0.61"


def test_ranks_have_a_table_where_there_are_several(browser: Browser, served: PageServer) -> None:
    browser.show(served.url, "view=fleet")
    box = "document.querySelector(\"table[data-table='ranks']\").closest('section')"
    assert browser.run(f"{box}.hidden")
    served.opened.acquire(timeout=60)
    status = served.page["status"]
    figures = {"busy_s": 1.5, "wait_s": 0.25, "step_s": 2.0, "tokens": 4096, "memory_bytes": 3 * 2**30}
    ranks = [{"rank": rank, **figures} for rank in range(2)]
    served.push("status", {**status, "learner": {**status["learner"], "ranks": ranks}})
    browser.wait(f"!{box}.hidden")
    rows = browser.texts("table[data-table='ranks'] tbody td")
    assert rows == ["0", "1.5 s", "0.25 s", "2 s", "4,096", "3 GiB", "1", "1.5 s", "0.25 s", "2 s", "4,096", "3 GiB"]


def test_events_stand_in_the_log_and_on_the_charts(browser: Browser, served: PageServer) -> None:
    browser.show(served.url, "view=charts")
    drawn(browser, "reward")
    texts = browser.texts("table[data-table='events'] td:last-child")
    assert texts == [event["text"] for event in reversed(served.page["events"])]
    marks = browser.run("document.querySelector('[data-chart=\"reward\"] .plot').layout.shapes.length")
    assert marks == len([event for event in served.page["events"] if event["at"] >= served.page["time"]["at"][0] - 1])


# What reaches beyond a width (a phone's window grows with it), and lies in nothing that scrolls or cuts it off.
TOO_WIDE = """[...document.querySelectorAll('#root *')].filter((node) => {
  const box = node.getBoundingClientRect();
  if (!box.width || (box.right <= arguments[0] + 1 && box.left >= -1)) return false;
  for (let at = node.parentElement; at; at = at.parentElement)
    if (getComputedStyle(at).overflowX !== 'visible') return false;
  return true;
}).map((node) => node.outerHTML.slice(0, 200))"""

# Contrast of two colours, from 1 to 21.
CONTRAST = """((a, b) => {
  const light = (text) => {
    const shade = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((value) => shade(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
})(getComputedStyle(document.querySelector(arguments[0])).color,
   getComputedStyle(document.querySelector('.panel')).backgroundColor)"""


@pytest.mark.parametrize("size", [(390, 844), pytest.param((1280, 800), marks=pytest.mark.wide)])
def test_nothing_overflows_on_a_phone_or_a_laptop_in_either_theme(browser: Browser, size: tuple[int, int]) -> None:
    page = make_page()
    status, long = page["status"], "a_name_without_a_break_" * 9
    status["workers"].append({**status["workers"][0], "worker_id": long, "does": "refused", "reason": long})
    status["servers"].append({**status["servers"][1], "name": long, "url": long, "reason": long})
    status["waits"].append({"who": long, "what": long, "since_s": 100.0, "count": 1})
    status["notices"].append({"id": 9, "kind": "x", "text": long, "who": long, "since_s": 1.0, "count": 1})
    page["events"].append({"at": page["now"], "kind": "notice", "who": long, "text": long})
    page["steps"][f"rewards/{long}/mean"] = page["steps"]["reward"]
    page["rollouts"][-1] |= {"worker_id": long, "servers": [long, long], "finish_reason": long}
    page["run"] = long
    emulate = browser.driver.execute_cdp_cmd
    with serving(page) as served:
        for theme in ("light", "dark"):
            preferred = {"name": "prefers-color-scheme", "value": theme}
            emulate("Emulation.setEmulatedMedia", {"features": [preferred]})
            for view in (
                "",
                "view=charts",
                "view=fleet",
                f"view=rollouts&rollout={page['rollouts'][-1]['ticket_id']}/3",
            ):
                if theme == "dark" and view in ("view=charts", "view=fleet"):
                    continue  # it is as wide
                for beside in ("", "&as=group&life=1") if "rollouts" in view else ("",):
                    browser.show(served.url, view + beside, size=size)
                    browser.wait("document.documentElement.dataset.theme === arguments[0]", theme)
                    browser.wait("document.querySelector('.view:not([hidden])').children.length > 0")
                    assert browser.run(TOO_WIDE, size[0]) == [], (view, theme)
                    assert browser.run("document.documentElement.scrollWidth") <= size[0], (view, theme)
            browser.press("3")
            browser.wait("document.querySelector('.does-refused') !== null")
            for text in ("h1", ".limit", ".dim", "td", "th button", ".good", ".badge.does-refused", ".figures"):
                assert browser.run(CONTRAST, text) >= 4.5, (text, theme)
            tables = "[...document.querySelectorAll('.table .scroll')].map((node) => getComputedStyle(node).overflowX)"
            assert {*browser.run(tables)} == {"auto"}
    emulate("Emulation.setEmulatedMedia", {"features": []})
