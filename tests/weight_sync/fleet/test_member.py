"""The task of one server: what of its calls the decisions do not see."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.protocol.client import QueueError
from slipstream.protocol.messages import Server, ServerState
from slipstream.weight_sync.fleet import member, member_state
from slipstream.weight_sync.fleet.eligibility import Wanted
from slipstream.weight_sync.fleet.member import Member
from slipstream.weight_sync.fleet.member_state import CallFailed
from slipstream.weight_sync.fleet.publications import Publications
from slipstream.weight_sync.fleet.snapshots import Snapshots
from slipstream.weight_sync.server.engine import ControlError
from tests.kit import config

DRAINS = Server("a", "http://a", ServerState.DRAINING, 3, changed_at=7.0)


class Control:
    """A server that answers nothing."""

    url, run_id = "http://a", "run"

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def state(self) -> None:
        self.asked.set()
        await asyncio.Event().wait()

    async def explain(self, error: Exception, within_s: float = 0.0) -> str:
        return f"{self.url}: no answer"


def made(server: Server, put: Any) -> Member:
    sync = SimpleNamespace(control=Control(), left_paused=False)
    parts: Any = (server, sync, put, Snapshots(), Publications(1), SimpleNamespace())
    return Member(*parts, config(), Wanted())


async def refuse(server: Server) -> Server:
    raise QueueError("the queue did not answer")


async def test_i7_a_question_that_a_failed_publication_cut_short_counts_as_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(member, "LOOK_TIMEOUT_S", 0.05)
    one = made(Server("a", "http://a"), refuse)
    control: Any = one._sync.control

    async def fail() -> Any:
        await control.asked.wait()
        failed_at.append(time.monotonic())
        raise ControlError("the connection was lost")

    began, failed_at = time.monotonic(), list[float]()
    event = await one._attempt(member_state.Weights(1, "run:1"), fail())
    assert isinstance(event, CallFailed)
    assert event.asked is not None
    assert began < event.asked <= failed_at[0]


async def test_a_queue_that_fails_during_a_publication_leaves_none_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the task would begin again, and publish a second time meanwhile."""
    monkeypatch.setattr(member, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(member, "LOOK_TIMEOUT_S", 0.01)
    monkeypatch.setattr(member_state, "DOWN_AFTER_S", 0.0)
    one, ended = made(Server("a", "http://a", ServerState.SERVING, 1), refuse), asyncio.Event()

    async def publish() -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(QueueError):
        await one._attempt(member_state.Weights(2, "run:2"), publish())
    assert ended.is_set()


async def test_of_a_server_that_drains_the_queue_is_told_once_that_nothing_is_on_its_way() -> None:
    told: list[tuple[ServerState, int | None]] = []

    async def put(server: Server) -> Server:
        told.append((server.state, server.version))
        return DRAINS

    one = made(DRAINS, put)
    for _ in range(2):
        await one.handle(member_state.Due(0.0))
    assert told == [(ServerState.DRAINING, None)]
