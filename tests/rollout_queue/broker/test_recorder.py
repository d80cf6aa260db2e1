"""The queue writes down what is trained, within its bound; what cannot be written costs the record, not the run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from slipstream.protocol import codec, reasons, trained_record
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import BeginSession, Group, LeaseAck, LeaseRequest, TicketRequest
from slipstream.protocol.trained_record import Head
from slipstream.rollout_queue import store
from slipstream.rollout_queue.broker.recorder import Recorder
from tests.kit import config, group
from tests.kit.queue import Served, serve_version, serving


def recording(tmp_path: Path, **queue: Any) -> RunConfig:
    return config(run={"dir": str(tmp_path)}, queue={"record": True, **queue})


async def lease(client: QueueClient, count: int, name: str) -> list[str]:
    """Have so many groups made, and lease them."""
    for ticket in (await client.tickets(TicketRequest("w", count, wait_s=0.0))).tickets:
        await client.submit(group(ticket, versions=(None, None, 0, 0, 0)))
    reply = await client.lease(LeaseRequest(1, name, count, wait_s=0.0))
    return [codec.decode(bytes(data), Group).ticket_id for data in reply.groups]


def tickets(run: RunConfig) -> list[tuple[int, int, list[str], list[list[str]]]]:
    def ids(places: list[trained_record.RecordPosition]) -> list[str]:
        return [place.head.ticket_id for place in places]

    found = trained_record.read_record(run.run_dir / trained_record.RECORD_FOLDER).steps
    return [(of.step, of.version, ids(of.trained), [ids(batch) for batch in of.left_out.values()]) for of in found]


async def begun(queue: Served, client: QueueClient) -> None:
    await client.begin_session(BeginSession(0, 0, 100, resume=False))
    await serve_version(client, 0)


async def test_it_holds_what_was_trained_and_what_was_left_out_and_nothing_else(tmp_path: Path) -> None:
    run = recording(tmp_path)
    async with serving(run) as queue, QueueClient(queue.url, patience_s=5.0) as client:
        await begun(queue, client)
        first = await lease(client, 2, "a")
        ack = LeaseAck(1, first[::-1], step=1, version=1)
        await client.ack("a", ack)
        await client.ack("a", ack)  # the answer was lost
        bad = await lease(client, 2, "b")
        await client.ack("b", LeaseAck(1, dropped=dict.fromkeys(bad, reasons.STEP_NOT_FINITE)))
        flat = await lease(client, 1, "c")
        await client.ack("c", LeaseAck(1, dropped=dict.fromkeys(flat, reasons.ZERO_VARIANCE)))
        second = await lease(client, 1, "d")
        await client.ack("d", LeaseAck(1, second, step=2, version=2))
        assert tickets(run) == [(1, 1, first[::-1], []), (2, 2, second, [bad])], (
            "it can be read while the run continues"
        )
    place = trained_record.read_record(run.run_dir / trained_record.RECORD_FOLDER).steps[0].trained[0]
    assert place.group().ticket_id == first[-1]
    assert place.head.groups == 2


async def test_a_queue_that_starts_again_goes_on_in_a_part_of_its_own(tmp_path: Path) -> None:
    run = recording(tmp_path)
    for step in (1, 2):
        async with serving(run, store.build(run)) as queue, QueueClient(queue.url, patience_s=5.0) as client:
            if step == 1:
                await begun(queue, client)
            ids = await lease(client, 1, f"l{step}")
            await client.ack(f"l{step}", LeaseAck(1, ids, step=step, version=step))
    assert [of[:2] for of in tickets(run)] == [(1, 1), (2, 2)]
    assert len(trained_record.record_parts(run.run_dir / trained_record.RECORD_FOLDER)) == 2


async def test_a_run_that_does_not_ask_for_it_has_none(tmp_path: Path) -> None:
    run = recording(tmp_path, record=False)
    async with serving(run) as queue, QueueClient(queue.url, patience_s=5.0) as client:
        await begun(queue, client)
        await client.ack("a", LeaseAck(1, await lease(client, 1, "a"), step=1, version=1))
    assert not run.run_dir.exists()


async def test_a_record_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    run = recording(tmp_path)
    run.run_dir.mkdir(parents=True)
    (run.run_dir / trained_record.RECORD_FOLDER).write_text("in the way")
    async with serving(run) as queue, QueueClient(queue.url, patience_s=5.0) as client:
        await begun(queue, client)
        for step in (1, 2):
            await client.ack("a", LeaseAck(1, await lease(client, 1, "a"), step=step, version=step))
        (notice,) = (await client.status()).notices
    assert notice.kind == "record"
    assert "the record of what is trained ends before step 1" in notice.text
    assert "queue.record = false" in notice.text


async def test_i2_a_step_of_which_a_group_was_not_written_is_not_taken_for_whole(tmp_path: Path) -> None:
    """The queue is killed in the middle of an acknowledgement: the ledger knows nothing of the step."""
    run = recording(tmp_path)
    async with serving(run) as queue, QueueClient(queue.url, patience_s=5.0) as client:
        await begun(queue, client)
        await client.ack("a", LeaseAck(1, await lease(client, 2, "a"), step=1, version=1))
        await client.ack("b", LeaseAck(1, await lease(client, 2, "b"), step=2, version=2))
    (part,) = trained_record.record_parts(run.run_dir / trained_record.RECORD_FOLDER)
    part.write_bytes(part.read_bytes()[:-1])
    assert [of[:2] for of in tickets(run)] == [(1, 1)]


def head(step: int, size: int) -> Head:
    return Head(step, step, f"{step}.0", "l", 0, size)


async def test_i3_it_keeps_the_newest_steps_within_its_bytes(tmp_path: Path) -> None:
    """Over starts of the queue, too, each of which begins a part."""
    most, payload = 80_000, codec.encode(group()) + b""
    step = 0
    for _ in range(3):
        writer = Recorder(tmp_path, most)
        for _ in range(200):
            step += 1
            assert writer.append([head(step, len(payload))], lambda _: payload) is None
        writer.close()
        sizes = sum(part.stat().st_size for part in trained_record.record_parts(tmp_path))
        assert sizes <= most * 1.02
    kept = [of.step for of in trained_record.read_record(tmp_path).steps]
    assert kept == list(range(kept[0], step + 1))
    assert sizes >= most * 0.7


async def test_one_payload_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Each is let go before the next is asked for."""
    alive = 0

    class Payload(bytes):
        def __new__(cls) -> Payload:
            nonlocal alive
            alive += 1
            assert alive == 1
            return super().__new__(cls, b"x" * 10)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    writer = Recorder(tmp_path, 10_000)
    await asyncio.to_thread(writer.append, [head(1, 10)] * 5, lambda _: Payload())
    writer.close()
