"""The spans of steps: to which groups they link, and what comes of the groups' own."""

from __future__ import annotations

from pathlib import Path

from slipstream.protocol.tracing import TicketTrace
from tests.kit.live_queue import live_queue
from tests.kit.traces import traced
from tests.learner.test_resume import ledger_of, settings, train


def test_a_step_links_to_its_groups_and_its_acknowledgement_is_in_its_trace(model_path: Path, tmp_path: Path) -> None:
    here = settings(model_path, tmp_path, steps=2)
    with traced() as found, live_queue(here) as queue:
        train(here, queue)
        run_id = queue.broker.ledger.run.id
    spans = found()
    steps = {span.attributes["slipstream.step"]: span for span in spans if span.name == "step"}
    trained = {1: set[tuple[int, int]](), 2: set[tuple[int, int]]()}
    for row in ledger_of(here):
        if row.trained and row.step is not None:
            trained[row.step].add(TicketTrace(run_id, row.ticket_id).ids)
    linked = {
        step: {(link.context.trace_id, link.context.span_id) for link in span.links} for step, span in steps.items()
    }
    assert linked == trained
    assert {len(groups) for groups in linked.values()} == {2}
    assert all(span.attributes["slipstream.groups"] == 2 for span in steps.values())
    acknowledged = [span for span in spans if span.name == "POST /v1/leases/{id}/ack" and span.parent]
    assert [span.parent.span_id for span in acknowledged] == [span.context.span_id for span in steps.values()]
    fed = [span for span in spans if span.name == "feed" and span.links]
    assert {(span.context.trace_id, span.parent.span_id) for span in fed} == trained[1] | trained[2]
    assert all(span.links[0].context == steps[span.attributes["slipstream.step"]].context for span in fed)
