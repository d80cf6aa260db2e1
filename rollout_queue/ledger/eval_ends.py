"""The end of an evaluation: when it has come, and what it came to. Pure: memory in, decision out.

`eval_tickets` has the rules in words. No evaluation is complete while weights that sampled for it wait for their proof.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol import reasons
from protocol.status import Ended
from rollout_queue.ledger.eval_proof import unproven_rows, without_unproven
from rollout_queue.ledger.evaluations import Evaluations, OpenEvaluation
from rollout_queue.ledger.fleet import Fleet
from rollout_queue.ledger.group_facts import GroupFacts
from rollout_queue.ledger.records import EvalChange, EvalRecord, EvalRow, EvalRowState

# What ended stays for the status, and for a learner that was away; its own file has all.
MOST_ENDED = 256


def finish(evaluations: Evaluations, fleet: Fleet, wall_time: float) -> EvalChange:
    """End with the run what is still open."""
    ended = [ended_record(without_unproven(of, fleet), "run_over", wall_time) for of in evaluations.open]
    return without_oldest(evaluations, EvalChange(records=tuple(ended)))


def judge(evaluations: Evaluations, fleet: Fleet, wall_time: float) -> EvalChange:
    """After a change of the `fleet`: rows of open evaluations are issued again that were sampled by weights that failed
    their proof, or that left service before it (I5); and those evaluations end whose last proof this was."""
    tainted = [
        msgspec.structs.replace(row, state=EvalRowState.AGAIN, result=None, reason=reasons.UNVERIFIED_SERVER)
        for of in evaluations.open
        for row in of.rows.values()
        if row.result is not None and fleet.tainted(GroupFacts(servers=row.result.servers), row.serial)
    ]
    spoilt = {row.evaluation for row in tainted}
    ended = [
        ended_record(of, "complete", wall_time)
        for of in evaluations.open
        if of.record.number not in spoilt
        and of.record.rows is not None
        and of.tally.ended == of.record.rows
        and not unproven_rows(of.rows.values(), fleet)
    ]
    return without_oldest(evaluations, EvalChange(records=tuple(ended), rows=tuple(tainted)))


def with_ends(evaluations: Evaluations, fleet: Fleet, rows: Iterable[EvalRow], wall_time: float) -> EvalChange:
    """The rows' change, and the end of evaluations of which they are the last, where nothing waits for a proof."""
    by_evaluation: dict[int, list[EvalRow]] = {}
    for row in rows:
        by_evaluation.setdefault(row.evaluation, []).append(row)
    ended: list[EvalRecord] = []
    for number, changed in by_evaluation.items():
        of = evaluations.of(number)
        after = {**of.rows, **{row.index: row for row in changed}}
        if of.tally.and_also(changed).ended == of.record.rows and not unproven_rows(after.values(), fleet):
            ended.append(ended_record(of, "complete", wall_time, changed))
    rows_changed = tuple(row for changed in by_evaluation.values() for row in changed)
    return without_oldest(evaluations, EvalChange(records=tuple(ended), rows=rows_changed))


def ended_record(of: OpenEvaluation, how: Ended, wall_time: float, last: Iterable[EvalRow] = ()) -> EvalRecord:
    seconds = max(0.0, wall_time - of.record.asked_at)
    return msgspec.structs.replace(of.record, result=of.tally.and_also(last).evaluation(of.record, seconds, how))


def without_oldest(evaluations: Evaluations, change: EvalChange) -> EvalChange:
    """Forget the oldest of those that have ended, where they become too many."""
    over = len(evaluations.ended) + len(change.records) - MOST_ENDED
    oldest = [record.number for record in evaluations.ended[: max(0, over)]]
    return msgspec.structs.replace(change, removed=(*change.removed, *oldest))
