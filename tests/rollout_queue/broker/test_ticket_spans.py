from __future__ import annotations

from pathlib import Path

from slipstream.protocol.messages import LeaseAck, LeaseRequest
from slipstream.protocol.tracing import TicketTrace
from slipstream.rollout_queue.broker import learner
from slipstream.rollout_queue.store.sqlite import SqliteStore
from tests.kit.broker import draw, running, stays, submit
from tests.kit.traces import traced


async def test_a_ticket_keeps_its_trace_when_the_queue_starts_again(tmp_path: Path) -> None:
    with traced() as first:
        async with running(SqliteStore(tmp_path / "queue.db")) as broker:
            run_id = broker.ledger.run.id
            (ticket,) = await draw(broker)
            await submit(broker, ticket)
    with traced() as second:
        async with running(SqliteStore(tmp_path / "queue.db")) as broker:
            await learner.lease(broker, LeaseRequest(2, "lease", 1), stays)
            await learner.acknowledge(broker, "lease", LeaseAck(2, [ticket.id], step=1, version=1))
    before, after = first(), second()
    assert [span.name for span in before] == ["ticket", "issued"]
    assert [span.name for span in after] == ["ready", "leased"]
    trace_id, root_id = TicketTrace(run_id, ticket.id).ids
    assert {span.context.trace_id for span in (*before, *after)} == {trace_id}
    assert before[0].context.span_id == root_id
    assert {span.parent.span_id for span in (*before[1:], *after)} == {root_id}
