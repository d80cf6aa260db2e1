"""The page of a real queue, a process with its real stream: what goes wrong is on it within 5 s, in words."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pytest

from slipstream.protocol.client import QueueClient, QueueRefused
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import (
    BeginSession,
    Fingerprint,
    LeaseAck,
    LeaseRequest,
    Notice,
    Rollout,
    ServerState,
    TicketFailure,
    TicketRequest,
    WorkerReport,
)
from slipstream.rollout_queue import service
from slipstream.rollout_queue.observe import workers
from tests import kit
from tests.kit.copies import Copy, start_function
from tests.kit.messages import SERVER, group, segment
from tests.kit.ports import free_port
from tests.kit.queue import move_server, serve_version

if TYPE_CHECKING:
    from tests.rollout_queue.page.browser import Browser

T = TypeVar("T")

SEEN_WITHIN_S = 20.0  # on a busy machine too; a quiet one shows it within two
SILENT_S = 2.0
RUN = Fingerprint("1", "t", "c", {}, rows=1000, data="d")
BANNER = "document.querySelector('.banner')"
ROWS = "[...document.querySelectorAll(`table[data-table='${arguments[0]}'] tbody tr`)].map((row) => row.textContent)"
EVENTS = "slipstream.page.source.page.events.map((event) => event.text)"

HARM = [
    "<script>window.harmed = 1</script>",
    "<img src=x onerror='window.harmed = 1'><iframe src='javascript:parent.harmed=1'></iframe>",
    "\x1b[31mred\x1b[0m\x07\x00\x9b2J",
    "right\u202eleft \u200b\u2066\ufeff",
]


def serve(config: RunConfig) -> None:
    workers.SILENT_S = SILENT_S
    service.serve(config)


class RealQueue:
    """A queue as a process, with a session of a learner whose one server serves version 0."""

    def __init__(self, folder: Path, **queue: Any) -> None:
        (folder / "run").mkdir()
        self.config = kit.config(
            run={"dir": str(folder), "name": "run"},
            queue={"port": free_port(), **queue},
            vllm={"servers": ["http://127.0.0.1:8100"]},
        )
        self.url = f"{self.config.queue.local_url}/"
        self.process: Copy
        self.start()
        self.ask(self._begin)

    def start(self) -> None:
        self.process = start_function(("slipstream.rollout_queue.service",), serve, self.config)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def ask(self, work: Callable[[QueueClient], Coroutine[Any, Any, T]]) -> T:
        async def asked() -> T:
            async with QueueClient(self.url, patience_s=60.0) as client:
                return await work(client)

        return asyncio.run(asked())

    async def _begin(self, client: QueueClient) -> None:
        await client.begin_session(BeginSession(0, 0, 10, resume=False, fingerprint=RUN))
        await serve_version(client, 0)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RealQueue]]:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    started: list[RealQueue] = []

    def begin(**settings: Any) -> RealQueue:
        started.append(RealQueue(tmp_path, **settings))
        return started[-1]

    yield begin
    for queue in started:
        queue.kill()


async def join(client: QueueClient) -> None:
    await client.heartbeat(WorkerReport("w", [], host="node-1", pid=7, capacity=4, fingerprint=RUN))


async def submit(client: QueueClient, *rollouts: Rollout) -> str:
    """Draw a ticket and submit its group. Returns its id."""
    (ticket,) = (await client.tickets(TicketRequest("w", 1, have=[]))).tickets
    made = group(ticket)
    await client.submit(msgspec.structs.replace(made, rollouts=list(rollouts)) if rollouts else made)
    return ticket.id


def live(browser: Browser, queue: RealQueue, view: str = "") -> None:
    browser.show(queue.url, view)
    browser.wait("slipstream.page.source.connection.state === 'live'")


def test_a_worker_that_is_silent_or_refused(browser: Browser, start: Callable[..., RealQueue]) -> None:
    queue = start()
    live(browser, queue, "view=fleet")
    seen = f"{ROWS}.some((row) => row.startsWith('wwaiting') || row.startsWith('widle'))"
    queue.ask(join)
    while not browser.run(seen, "workers"):  # it is silent after SILENT_S, and a busy page may be slower than that
        queue.ask(join)
    browser.wait(f"{ROWS}.some((row) => row.startsWith('wsilent'))", "workers", within_s=SILENT_S + SEEN_WITHIN_S)
    browser.wait(
        f"{EVENTS}.includes('worker w is not heard from for a minute: it was killed, hangs, or cannot reach the queue')"
    )

    async def join_wrongly(client: QueueClient) -> None:
        other = msgspec.structs.replace(RUN, chat="another template")
        with pytest.raises(QueueRefused):
            await client.heartbeat(WorkerReport("other", [], fingerprint=other))

    queue.ask(join_wrongly)
    found = f"{ROWS}.find((row) => row.startsWith('otherrefused'))"
    assert "another template" in browser.wait(found, "workers", within_s=SEEN_WITHIN_S)
    browser.wait(f"{EVENTS}.some((text) => text.startsWith('worker other was refused: '))")
    assert browser.log() == []


def test_a_server_whose_proof_fails(browser: Browser, start: Callable[..., RealQueue]) -> None:
    queue = start()
    live(browser, queue, "view=fleet")
    why = "version 1 differs by 0.7 nats from the learner's log-probs, more than weight_sync.probe_tolerance = 0.1"

    async def fail_the_proof(client: QueueClient) -> None:
        await move_server(client, ServerState.SYNCING)
        await move_server(client, ServerState.QUARANTINED, 1, reason=why)

    queue.ask(fail_the_proof)
    found = f"{ROWS}.find((row) => row.startsWith('{SERVER}quarantined'))"
    shown = browser.wait(found, "servers", within_s=SEEN_WITHIN_S)
    assert why in shown
    assert "a proof that holds" in shown
    browser.press("1")
    browser.wait(f"document.querySelector('ul.waits').textContent.includes('server {SERVER} waits for a proof that')")
    browser.wait("document.querySelector('svg.loop').textContent.includes('0 of 1 serving')")


def test_a_stall(browser: Browser, start: Callable[..., RealQueue]) -> None:
    queue = start(stall_after_s=2.0)
    live(browser, queue)
    browser.wait("document.querySelector('.pill').textContent === 'stalled'", within_s=2.0 + SEEN_WITHIN_S)
    browser.wait("document.querySelector('.limit').textContent.startsWith('No optimiser step for ')")
    assert "see its log, restart it with --resume" in browser.text(".limit")
    browser.wait("document.querySelector('svg.loop .alarm') !== null")


def test_a_queue_that_is_killed_and_started_again_under_an_open_tab(
    browser: Browser, start: Callable[..., RealQueue]
) -> None:
    queue = start()
    queue.ask(join)
    first = queue.ask(submit)
    live(browser, queue, "view=rollouts")
    rollouts = "[...document.querySelectorAll('ul.rollouts li')].map((node) => node.dataset.key)"
    browser.wait(f"{rollouts}.length === 2")
    browser.wait(f"{EVENTS}.includes('worker w joined from node-1')")
    before = browser.run(EVENTS)
    queue.kill()
    browser.wait(f"!{BANNER}.hidden && {BANNER}.textContent.includes('the queue does not answer')", within_s=10.0)
    queue.start()
    browser.wait(f"{BANNER}.hidden && slipstream.page.source.connection.state === 'live'")
    queue.ask(join)
    second = queue.ask(submit)
    keys = [f"{ticket}/{number}" for ticket in (second, first) for number in (1, 0)]
    browser.wait(f"JSON.stringify({rollouts}) === JSON.stringify(arguments[0])", keys, within_s=SEEN_WITHIN_S)
    browser.wait(f"arguments[0].every((text) => {EVENTS}.includes(text))", before)
    browser.wait(f"{EVENTS}.filter((text) => text === 'the queue started').length === 2")


def test_the_whole_life_of_a_ticket(browser: Browser, start: Callable[..., RealQueue]) -> None:
    queue = start()

    async def lose_then_train(client: QueueClient) -> None:
        await join(client)
        (lost,) = (await client.tickets(TicketRequest("w", 1, have=[]))).tickets
        await client.fail_ticket(lost.id, TicketFailure("w", "timeout"))
        for _ in range(2):
            await submit(client)
        session = (await client.position()).session
        await client.lease(LeaseRequest(session, "lease-1", 2))
        await client.ack("lease-1", LeaseAck(session, ["0.1"], {"1.0": "zero_variance"}, 1, 1))

    queue.ask(lose_then_train)
    live(browser, queue, "view=rollouts&rollout=0.1/0")
    browser.click(".life summary")
    browser.wait("document.querySelectorAll('.life li').length === 6")
    assert browser.texts(".life h4") == ["ticket 0.0", "ticket 0.1"]
    said = [re.sub(r"\d+ B", "N B", text) for text in browser.texts(".life li span")]
    assert said == [
        "issued to w at version 0",
        "given up, and its row is sampled again: failed: timeout",
        "issued to w at version 0",
        f"its group came at version 0: 6 tokens, N B, sampled by {SERVER} with version 0",
        "leased to the learner",
        "trained in step 1, which made version 1",
    ]
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", text) for text in browser.texts(".life time"))
    browser.run("slipstream.state.set({ rollout: '1.0/0' })")
    browser.wait("document.querySelector('.life').textContent.includes('dropped: zero variance')")
    assert browser.log() == []


def test_hostile_rollouts_of_a_worker(browser: Browser, start: Callable[..., RealQueue]) -> None:
    queue = start()
    live(browser, queue, "view=rollouts")

    def hostile(text: str) -> Rollout:
        messages = [
            {"role": "user", "content": text},
            {"role": text, "name": text, "content": [{"type": "text", "text": text}, None]},
            {"role": "assistant", "tool_calls": [{"function": {"name": text, "arguments": text}}], text: text},
        ]
        return Rollout(
            [segment((None, 0, 0))],
            1.0,
            "stop",
            messages=json.dumps(messages).encode(),
            extra={text[:50]: text[:1000]},
            reward_components={text[:50]: 1.0},
        )

    async def send(client: QueueClient) -> None:
        await join(client)
        notices = [Notice("tool", text) for text in HARM]
        await client.heartbeat(WorkerReport("w", [], fingerprint=RUN, failures=dict.fromkeys(HARM, 1), notices=notices))
        for texts in (HARM[:2], HARM[2:], [HARM[0], "x" * 5_000_000]):
            await submit(client, *map(hostile, texts))

    queue.ask(send)
    browser.wait("document.querySelectorAll('ul.rollouts li').length === 6", within_s=SEEN_WITHIN_S)
    browser.run("document.querySelector('ul.rollouts').focus()")
    seen = ""
    for _ in range(6):
        browser.press("j")
        browser.wait("document.querySelector('.episode') !== null")
        seen += browser.run("document.querySelector('.episode').textContent.slice(0, 200000)")
    for text in HARM[:2]:
        assert text in seen, "hostile text is shown as it is written"
    assert "Its conversation was not kept." in seen, "5 MB stay in the queue"
    assert not set(seen) & set("\x1b\x00\x07\x9b\u202e\u2066\u200b\ufeff")
    for key in "1234":
        browser.press(key)
        browser.wait("document.querySelectorAll('.view:not([hidden])').length === 1")
        assert browser.run("document.querySelectorAll('iframe, .view img, .view a, .view script').length") == 0
    assert browser.run("window.harmed") is None
    assert browser.log() == []
