"""What the queue is told of a server that drains: the verdict on what was on its way, then that nothing is."""

from __future__ import annotations

from slipstream.protocol.messages import Server, ServerState
from slipstream.weight_sync.fleet.queue_status import QueueReporter

DRAINS = Server("a", "http://a", ServerState.DRAINING, 3, changed_at=7.0)


async def test_of_a_server_that_drains_the_verdict_is_told_as_it_is_and_once_that_nothing_is_on_its_way() -> None:
    """I5: its quarantine was preceded by `syncing`, which a server that drains cannot become."""
    told: list[tuple[ServerState, int | None]] = []

    async def put(server: Server) -> Server:
        told.append((server.state, server.version))
        return DRAINS

    reporter = QueueReporter(DRAINS, put)
    await reporter.tell(ServerState.SERVING, 4)
    await reporter.quarantine(5, "its proof failed")
    await reporter.settled()
    await reporter.settled()
    assert told == [(ServerState.SERVING, 4), (ServerState.QUARANTINED, 5), (ServerState.DRAINING, None)]
