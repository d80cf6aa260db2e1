"""The rollout viewer: its filters, groups, rows and tokens, and rollouts that are written to do harm."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from tests.rollout_queue.page.page_data import Json, make_page
from tests.rollout_queue.page.page_server import PageServer, serving

if TYPE_CHECKING:
    from tests.rollout_queue.page.browser import Browser

KEYS = "[...document.querySelectorAll('ul.rollouts li')].map((node) => node.dataset.key)"
SHOWN = "[...document.querySelectorAll('.episode')].map((node) => node.dataset.episode)"


def key_of(view: Json) -> str:
    return f"{view['ticket_id']}/{view['number']}"


FILTERS: list[tuple[str, Any]] = [
    ("", lambda view: True),
    ("f.step0=3&f.step1=5", lambda view: 3 <= view["step"] <= 5),
    ("f.reward1=0.5", lambda view: view["reward"] <= 0.5),
    ("f.finish=length", lambda view: view["finish_reason"] == "length"),
    ("f.worker=worker-1", lambda view: view["worker_id"] == "worker-1"),
    ("f.server=vllm-1", lambda view: "vllm-1" in view["servers"]),
    ("f.server=vllm-0&f.worker=worker-1", lambda view: view["number"] == 0 and view["worker_id"] == "worker-1"),
    ("f.role=critic", lambda view: view["role"] == "critic"),
    ("f.kind=evaluation", lambda view: view["evaluation"] is not None),
    ("f.text=multiply+7+by", lambda view: "Multiply 7 by" in view["messages"][0]["content"]),
]


def test_filters_leave_what_they_name(browser: Browser, served: PageServer) -> None:
    views = served.page["rollouts"]
    views[0]["evaluation"] = 10
    for view in views:
        view["role"] = "critic" if view["number"] % 2 else "solver"
    browser.show(served.url, "view=rollouts")
    for state, keep in FILTERS:
        browser.run("location.hash = arguments[0]", f"view=rollouts&{state}")
        expected = [key_of(view) for view in reversed(views) if keep(view)]
        assert len(expected) > 0
        browser.wait(f"JSON.stringify({KEYS}) === JSON.stringify(arguments[0])", expected)
    roles = "[...document.querySelectorAll('select[aria-label=Role] option')].map((node) => node.value).join()"
    assert browser.run(roles) == ",critic,solver"
    assert "critic" in browser.texts("ul.rollouts .where")[0]
    browser.run("location.hash = 'view=rollouts&f.order=worst'")
    rewards = "[...document.querySelectorAll('ul.rollouts b')].map((node) => Number(node.textContent))"
    browser.wait(f"{rewards}.every((reward, i, all) => !i || all[i - 1] <= reward) && {rewards}[0] === 0")


def test_search_group_row_and_keys(browser: Browser, served: PageServer) -> None:
    views = served.page["rollouts"]
    browser.show(served.url)
    browser.press("/")
    browser.wait("document.activeElement.name === 'text'")
    browser.press("Multiply 1 by")
    of_row = [view for view in views if view["index"] == 1]
    browser.wait(f"{KEYS}.length === arguments[0]", 4)
    browser.click("button.clear")
    browser.wait(f"{KEYS}.length === arguments[0]", len(views))
    browser.press("jjj")
    browser.wait(f"{SHOWN}[0] === arguments[0]", key_of(views[-3]))
    browser.press("k")
    chosen = views[-2]
    browser.wait(f"{SHOWN}[0] === arguments[0]", key_of(chosen))
    facts = dict(zip(browser.texts(".facts dt"), browser.texts(".facts dd"), strict=True))
    assert facts["reward"] == str(int(chosen["reward"]))
    assert (facts["advantage"], facts["version"]) == (str(chosen["advantage"]), "11 to 12")
    assert (facts["ends by"], facts["row"], facts["ticket"]) == ("stop", "1", "12.0")
    assert browser.texts(".message > header") == ["user", "assistant", "assistant"]
    assert browser.text(".call summary") == "calls multiply"
    assert browser.text(".message.tool .long") == "744"
    browser.run("[...document.querySelectorAll('.detail .choice button')][1].click()")
    browser.wait(f"{SHOWN}.length === 4")
    assert browser.run(SHOWN) == [key_of(view) for view in views if view["ticket_id"] == "12.0"]
    browser.run("[...document.querySelectorAll('.detail .choice button')][2].click()")
    browser.wait(f"{SHOWN}.length === 8")
    assert browser.run(SHOWN) == [key_of(view) for view in of_row]
    state = browser.run("location.hash.slice(1)")
    browser.show(served.url, state)
    assert browser.run(SHOWN) == [key_of(view) for view in of_row], "a link leads to the same view"


def test_tokens_are_coloured_and_say_their_figures(browser: Browser, served: PageServer) -> None:
    view = served.page["rollouts"][0]
    browser.show(served.url, f"view=rollouts&rollout={key_of(view)}")
    tokens = "[...document.querySelectorAll('.tokens [data-token]')]"
    assert [text.replace("↵", "") for text in browser.run(f"{tokens}.map((node) => node.textContent)")] == [
        token[0] for token in view["tokens"]
    ]
    colours = f"{tokens}.map((node) => getComputedStyle(node).backgroundColor)"
    by: dict[str, list[str]] = {}
    for colour in ("version", "logprob", "learner", "ratio", "advantage", "mask"):
        browser.run("slipstream.state.set({ colour: arguments[0] })", colour)
        browser.wait("document.querySelector('.tokens [data-token]').style.background !== arguments[0]", "")
        by[colour] = browser.run(colours)
    same = {name: [found[i] == found[0] for i in range(len(found))] for name, found in by.items()}
    assert same["version"] == [token[1] == view["tokens"][0][1] for token in view["tokens"]]
    assert same["mask"] == same["advantage"] == [bool(token[4]) for token in view["tokens"]]
    assert not any(same["logprob"][1:])
    browser.point(".tokens [data-token='2']", 0.5, 0.5)
    figures = browser.wait("document.querySelector('.figures').textContent.startsWith('\" it')")
    assert figures
    assert (
        browser.text(".figures")
        == '" it"  version 0  log-prob -0.5  learner\'s -0.4  ratio 1.11  trains  advantage 0.5'
    )


def test_a_turn_shows_its_reward_and_its_tokens_the_turn_s_advantage(browser: Browser) -> None:
    page = make_page(steps=3)
    view = page["rollouts"][0]
    messages = [{**each, "turn_reward": 0.25 * place} for place, each in enumerate(view["messages"])]
    del messages[0]["turn_reward"]
    of = {**view, "messages": messages, "tokens": [["one", 1, -1.0, -1.0, 1, -0.75], ["two", 1, -1.0, -1.0, 1, None]]}
    page["rollouts"] = [of]
    with serving(page) as served:
        browser.show(served.url, f"view=rollouts&rollout={key_of(of)}")
        browser.wait(f"{SHOWN}[0] === arguments[0]", key_of(of))
        heads = "[...document.querySelectorAll('.message > header')].map((node) => node.textContent)"
        assert browser.run(heads) == ["user", "assistant, reward 0.25", "assistant, reward 0.75"]
        assert "other fields" not in browser.run("document.querySelector('.messages').textContent")
        for place, advantage in enumerate((-0.75, view["advantage"])):
            browser.point(f".tokens [data-token='{place}']", 0.5, 0.5)
            browser.wait(
                "document.querySelector('.figures').textContent.endsWith(arguments[0])", f"advantage {advantage}"
            )


HARM = [
    "<script>window.harmed = 1</script>",
    "<img src=x onerror='window.harmed = 1'>",
    "<svg onload='window.harmed = 1'><a xlink:href='javascript:window.harmed=1'>",
    "</div></article><iframe src='javascript:parent.harmed=1'></iframe>",
    "\x1b[31mred\x1b[0m\x07\x00\x9b2J",
    "right\u202eleft \u200b\u2066\ufeff",
    "{{constructor.constructor('window.harmed=1')()}}",
    "\ud83d\ude00 " + "x" * 5_000_000,
]


def hostile(text: str, number: int) -> Json:
    view = dict(make_page(steps=1)["rollouts"][0])
    name = text[:200]
    calls = [
        {"function": {"name": text, "arguments": text}},
        None,
        7,
        {"function": {"arguments": {name: text}}},
    ]
    content = [{"type": "text", "text": text}, text, None]
    return {
        **view,
        "ticket_id": f"{number}.{text[:60]}",
        "worker_id": name,
        "finish_reason": name,
        "reward_components": {name: 1.0, "b": None},
        "extra": {name: text},
        "tokens": [[name, 1, -1.0, None, 1], ["b", 2, None, -1, 0]],
        "messages": [
            {"role": name, "name": text, "content": text, name: {name: [text[:1000]]}},
            {"role": "assistant", "reasoning_content": text, "content": content, "tool_calls": calls},
            {"role": "tool", "name": text, "content": {"a": text}},
        ],
    }


def test_an_image_that_the_policy_saw_is_shown_by_its_preview_alone(browser: Browser) -> None:
    """What a worker says in place of a preview is never loaded."""
    page = make_page(steps=3)
    previews = [PREVIEW, "https://example.com/a.png", "javascript:alert(1)", "data:text/html,x", None]
    content = [
        {"type": "image", "image": {"hash": "ab", "width": 48, "height": 32, "tokens": 9, "preview": preview}}
        for preview in previews
    ]
    of = {**page["rollouts"][0], "messages": [{"role": "user", "content": [*content, {"type": "image"}]}]}
    page["rollouts"] = [of]
    with serving(page) as served:
        browser.show(served.url, "view=rollouts")
        browser.run("slipstream.state.set({ rollout: arguments[0] })", key_of(of))
        browser.wait(f"{SHOWN}[0] === arguments[0]", key_of(of))
        browser.wait("[...document.images].every((image) => image.complete)")
        images = "[...document.querySelectorAll('.episode img')].map((image) => [image.src, image.naturalWidth])"
        assert browser.run(images) == [[PREVIEW, 2]]
        text = browser.run("document.querySelector('.episode').textContent")
        assert text.count("image of 48 x 32 pixels, 9 tokens") == len(previews) - 1
        assert "[image]" in text


# A JPEG of two by two pixels.
_SMALL = io.BytesIO()
Image.new("RGB", (2, 2), "red").save(_SMALL, "JPEG")
PREVIEW = f"data:image/jpeg;base64,{base64.b64encode(_SMALL.getvalue()).decode()}"


@pytest.mark.parametrize("view", ["rollouts", "fleet", "charts", ""])
def test_hostile_text_runs_nothing_and_the_page_lives(browser: Browser, view: str) -> None:
    page = make_page(steps=3)
    status = page["status"]
    page["rollouts"] = [hostile(text, i) for i, text in enumerate(HARM if view == "rollouts" else HARM[:-1])]
    for i, text in enumerate(HARM[:-1]):
        status["workers"].append({**status["workers"][0], "worker_id": text, "failures": {text: 1}, "host": text})
        status["servers"].append({**status["servers"][1], "name": text, "reason": text, "waits_for": text})
        status["waits"].append({"who": text, "what": text, "since_s": 100.0 + i, "count": 1})
        status["notices"].append({"id": 9 + i, "kind": "x", "text": text, "who": text, "since_s": 1.0, "count": 1})
        page["events"].append({"at": page["now"], "kind": "notice", "who": text, "text": text})
        page["steps"][f"rewards/{text}/mean"] = [1.0, 0.5, 1.0]
        page["steps"][f"task/{text}"] = [1.0, 0.5, 1.0]
        page["time"][f"drop/{text}"] = list(page["time"]["drops_total"])
        status["drops"][text] = 1
    page["run"] = HARM[0]
    status["diagnosis"] = [{"about": "x", "text": text, "since_s": 1.0, "severity": "bad"} for text in HARM[:-1]]
    with serving(page) as served:
        browser.show(served.url, f"view={view}&as=group")
        for text, of in zip(HARM, page["rollouts"], strict=False):
            if view != "rollouts":
                break
            browser.run("slipstream.state.set({ rollout: arguments[0] })", key_of(of))
            browser.wait(f"{SHOWN}[0] === arguments[0]", key_of(of))
            shown = browser.run("document.querySelector('.episode').textContent.slice(0, 200000)")
            assert not set(shown) & {"\x1b", "\x00", "\x07", "\x9b", "\u202e", "\u2066", "\u200b", "\ufeff"}
            if "<" in text:
                assert text in shown, "hostile text is shown as it is written"
        if view == "rollouts":
            assert browser.run("document.querySelector('.episode').textContent.length") < 200_000
            size = "document.querySelector('.message .long').textContent.length"
            browser.run("document.querySelector('.message .more').click()")
            browser.wait(f"{size} > 200000")
        if view == "charts":
            browser.wait("document.querySelector('[data-chart=\"drops\"]') !== null")
            browser.run("document.querySelector('[data-chart=\"drops\"]').scrollIntoView()")
            browser.wait("document.querySelector('[data-chart=\"drops\"] .plot').data")
        assert browser.run("window.harmed") is None
        assert browser.run("document.querySelectorAll('iframe, .view img, .view a, .view script').length") == 0
        browser.press("1")
        browser.wait("!document.querySelector('.view-overview').hidden")
        served.push("status", {**status, "step": 2})
        browser.wait("document.querySelector('.progress').textContent.includes('step 2 of')")
        assert browser.log() == []
