"""The page over HTTP: its files, its data, its live stream, and who may look."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from slipstream.protocol import access, reasons
from slipstream.protocol.client import JSON, QueueClient
from slipstream.protocol.history import PageData
from slipstream.protocol.messages import BeginSession, LeaseAck, LeaseRequest, TicketFailure, TicketRequest
from slipstream.protocol.rollouts import TicketLife
from slipstream.rollout_queue import page, store
from slipstream.rollout_queue.broker import lifecycle, viewers
from slipstream.rollout_queue.observe.history import History
from tests.kit import config
from tests.kit.messages import SERVER, group
from tests.kit.queue import Served, serve_version, serving, until

SECRET = "0123456789abcdef"


async def get(queue: Served, path: str, **arguments: Any) -> tuple[int, Any, bytes]:
    async with aiohttp.ClientSession() as session, session.get(queue.url + path, **arguments) as response:
        return response.status, response.headers, await response.read()


async def test_the_page_and_its_files_are_open_and_run_no_script_from_elsewhere() -> None:
    async with serving(config(queue={"token": SECRET})) as queue:
        for path, kind in (("/", "text/html"), ("/page/page.css", "text/css"), ("/page/plotly.js", "text/javascript")):
            status, headers, body = await get(queue, path)
            assert (status, headers["Content-Type"].split(";")[0]) == (200, kind)
            assert len(body) > 500
            policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
            assert (policy["default-src"], policy["script-src"], policy["connect-src"]) == (
                "'none'",
                "'self'",
                "'self'",
            )
            assert headers["X-Content-Type-Options"] == "nosniff"
        for missing in ("__init__.py", "nothing.js", "..%2faccess.py", "page_routes.py"):
            assert (await get(queue, f"/page/{missing}"))[0] in (401, 404)
        html = page.files()["index.html"].decode()
        assert not re.search(r"""(src|href)=["']https?:""", html)
        for name in page.files():
            if name.endswith(".js"):
                assert f"page/{name}" in html, "every file is used"


async def test_the_page_s_data_are_what_the_queue_knows() -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        await serve_version(client, 0)
        await until(lambda: len(queue.broker.history.events) >= 3)
        status, _, body = await get(queue, access.PAGE_DATA)
        assert status == 200
        found = msgspec.json.decode(body, type=PageData)
        assert (found.run, found.live, found.status and found.status.servers[0].name) == ("run", True, "vllm-0")
        assert found.time["servers_serving"][-1] in (0, 1)
        assert len(found.time["at"]) == len(found.time["depth"])
        assert "the queue started" in [event.text for event in found.events]


async def test_the_life_of_a_ticket_is_told_to_its_end_and_after_a_restart_without_its_times(tmp_path: Path) -> None:
    run = config(run={"dir": str(tmp_path), "name": "run"})
    (tmp_path / "run").mkdir()

    async def lives(queue: Served, ticket_id: str) -> list[TicketLife]:
        status, _, body = await get(queue, access.TICKET_OF.format(id=ticket_id))
        assert status == 200, body
        return msgspec.json.decode(body, type=list[TicketLife])

    async with serving(run, store.build(run)) as queue, QueueClient(queue.url) as client:
        session = (await client.begin_session(BeginSession(0, 0, 100, resume=False))).session
        await serve_version(client, 0)
        (first, second) = (await client.tickets(TicketRequest("w", 2))).tickets
        (life,) = await lives(queue, first.id)
        assert (life.state, life.worker_id, life.issued_at, life.arrived_at) == ("issued", "w", 1000.0, None)
        queue.time.now += 1
        await client.submit(group(first))
        queue.time.now += 1
        await client.lease(LeaseRequest(session, "a lease", 1))
        (life,) = await lives(queue, first.id)
        assert (life.state, life.arrived_at, life.leased_at, life.ended_at) == ("leased", 1001.0, 1002.0, None)
        queue.time.now += 1
        await client.ack("a lease", LeaseAck(session, [first.id], step=1, version=1))
        await client.fail_ticket(second.id, TicketFailure("w", "tool"))
        (third,) = (await client.tickets(TicketRequest("w", 1))).tickets
        (life,) = await lives(queue, first.id)
        assert (life.state, life.step, life.trained_version, life.ended_at) == ("trained", 1, 1, 1003.0)
        assert (life.tokens, life.arrival_version, life.sampled_by) == (6, 0, [(SERVER, 0, 0)])
        row = [(life.id, life.state, life.reason, life.failures) for life in await lives(queue, third.id)]
        assert row == [("1.0", "reissued", "failed:tool", 1), ("1.1", "issued", None, 1)]
        assert await lives(queue, second.id) == await lives(queue, third.id)
        for unknown in ("9.0", "1.2", "1", "e1.0.0", "x.y", f"1.{'9' * 99}", "1.%00", "%00.1", "%D9%A1.0"):
            status, _, body = await get(queue, access.TICKET_OF.format(id=unknown))
            assert (status, msgspec.json.decode(body)["reason"]) == (410, reasons.TICKET_UNKNOWN)
    async with serving(run, store.build(run)) as queue:
        (again,) = await lives(queue, first.id)
        assert again == msgspec.structs.replace(again, state="trained", step=1, tokens=6, issued_at=None, ended_at=None)


async def test_a_stream_brings_what_is_new_to_every_page_and_ends_with_the_service() -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client, aiohttp.ClientSession() as session:
        streams = [await session.get(queue.url + access.LIVE) for _ in range(3)]
        assert streams[0].headers["Content-Type"].startswith("text/event-stream")
        await until(lambda: len(queue.broker.viewers) == 3)
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        for stream in streams:
            seen: dict[str, Any] = {}
            async with asyncio.timeout(20):
                while not ("event" in seen and "session 1" in seen["event"]["text"]):
                    block = await stream.content.readuntil(b"\n\n")
                    if block.startswith(b"event: "):
                        name, data = block.decode().split("\n")[:2]
                        seen[name.removeprefix("event: ")] = msgspec.json.decode(data.removeprefix("data: "))
            assert seen["status"]["run"] == "run"
            assert seen["time"]["depth"] == 0.0
        await client.finish(1)
        lifecycle.tell_end(queue.broker)
        queue.broker.close_waits()
        async with asyncio.timeout(20):
            for stream in streams:
                *_, last = (await stream.content.read()).split(b"\n\n")[:-1]
                event, _, data = last.decode().partition("\ndata: ")
                assert (event, msgspec.json.decode(data)["finished"]) == ("event: status", True)
        await until(lambda: not len(queue.broker.viewers))


async def test_a_page_that_reads_too_slowly_is_left_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = viewers.Viewers()
    slow, quick = found.listen(), found.listen()
    assert [await anext(slow), await anext(quick)] == [b": slipstream\n\n"] * 2
    for number in range(1000):
        found.tell("n", number)
        assert await anext(quick) == b"event: n\ndata: %d\n\n" % number
    with pytest.raises(StopAsyncIteration):
        await anext(slow)
    assert len(found) == 1
    monkeypatch.setattr(viewers, "MAX_VIEWERS", 1)
    async with serving(config()) as queue, aiohttp.ClientSession() as session:
        async with session.get(queue.url + access.LIVE):
            await until(lambda: len(queue.broker.viewers) == 1)
            status, headers, body = await get(queue, access.LIVE)
            assert (status, headers["Retry-After"]) == (503, "30")
            assert b"1 pages are open: close one" in body
        await until(lambda: not len(queue.broker.viewers))


async def test_i8_who_has_signed_in_can_look_and_nothing_else() -> None:
    async with serving(config(queue={"token": SECRET})) as queue:
        assert (await get(queue, access.PAGE_DATA))[0] == 401
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:

            async def sign_in(token: str, **headers: str) -> int:
                body = msgspec.json.encode({"token": token})
                sent = {"Content-Type": JSON, **headers}
                async with browser.post(queue.url + access.SIGN_IN, data=body, headers=sent) as response:
                    cookie = response.headers.get("Set-Cookie", "")
                    assert (response.status == 204) == bool(cookie)
                    assert SECRET not in cookie
                    assert not cookie or ("HttpOnly" in cookie and "SameSite=strict" in cookie)
                    return response.status

            assert await sign_in("wrong") == 401
            assert await sign_in(SECRET, Origin="http://elsewhere.example") == 403
            # Who has a token may come by any name of the queue's machine.
            assert await sign_in(SECRET, Host="queue.cluster:8200", Origin="http://queue.cluster:8200") == 204
            for token in (access.derive_token(SECRET, "viewer"), access.derive_token(SECRET, "worker"), SECRET):
                browser.cookie_jar.clear()
                assert await sign_in(token) == 204
                async with browser.get(queue.url + access.PAGE_DATA) as response:
                    assert response.status == 200
                    text = await response.text()
                assert SECRET not in text
                assert "slv-" not in text
                async with browser.get(queue.url + access.EVALUATIONS) as response:
                    assert response.status == 403
                for path in (access.POLICY, access.FINISH, access.TICKETS):
                    async with browser.post(queue.url + path, json={}) as response:
                        assert response.status == 401, "a cookie is sent by any page's form"


async def test_a_fault_of_the_history_does_not_end_the_queue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(lifecycle, "_LOOK_S", 0.01)
    monkeypatch.setattr(History, "load", broken)
    monkeypatch.setattr(History, "add", broken)
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        await until(lambda: "miss something from now on" in caplog.text)
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        assert (await get(queue, access.PAGE_DATA))[0] == 200
    assert caplog.text.count("miss something from now on") == 1
