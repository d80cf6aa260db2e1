"""Rows of an evaluation whose weights were swapped in and are not proven yet: it ends with their proof (I5)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol import reasons
from rollout_queue.ledger.evaluations import OpenEvaluation
from rollout_queue.ledger.fleet import Fleet
from rollout_queue.ledger.group_facts import GroupFacts
from rollout_queue.ledger.records import EvalRow, EvalRowState


def unproven_rows(rows: Iterable[EvalRow], fleet: Fleet) -> list[EvalRow]:
    """Those that are done and whose weights wait for their proof."""
    return [row for row in rows if _unproven(row, fleet) is not None]


def awaited_proof(of: OpenEvaluation, fleet: Fleet) -> str | None:
    """What an evaluation waits for of which every row has ended: the proof; None while there is more to sample."""
    if of.record.rows is None or of.tally.ended < of.record.rows:
        return None
    names = sorted({name for row in of.rows.values() if (name := _unproven(row, fleet)) is not None})
    return f"the proof of the weights that {', '.join(names)} sampled its rows with" if names else None


def without_unproven(of: OpenEvaluation, fleet: Fleet) -> OpenEvaluation:
    """As if the rows whose proof has not come had failed."""
    unproven = unproven_rows(of.rows.values(), fleet)
    if not unproven:
        return of
    counted = OpenEvaluation(of.record)
    for row in of.rows.values():
        counted.put(row)
    for row in unproven:
        reason = reasons.UNVERIFIED_SERVER
        counted.put(msgspec.structs.replace(row, state=EvalRowState.FAILED, result=None, reason=reason))
    return counted


def _unproven(row: EvalRow, fleet: Fleet) -> str | None:
    """The server whose proof a row that is done waits for."""
    return None if row.result is None else fleet.unproven(GroupFacts(servers=row.result.servers))
