"""Admits workers by their fingerprints: only those whose groups are data for the learner's session.

The session declares tokenizer, chat format and rollout settings. The first admitted worker gives the number of rows of
the session's data set, and the first that could read a sample of them their digest. A worker that differs is refused
with the difference named; while no learner is heard from it waits for the next session, which may have its settings. If
the session declared nothing, every worker is admitted unchecked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.config import fingerprint
from slipstream.protocol.messages import Fingerprint
from slipstream.rollout_queue.ledger.records import Decision, Refusal, RunState
from slipstream.rollout_queue.ledger.row_estimates import RowEstimates

# A few heartbeats. After that a worker is taken to have gone.
SILENT_S = 60.0

_RETRY_AFTER_S = 10.0

# Its host and its pid there.
_Process = tuple[str, int]


class Admitted(msgspec.Struct, frozen=True):
    """The admission of a worker.

    Attributes:
        decision: Change of the run's record.
        warnings: Harmless differences.
        changed: How data set, task file or tools differ from the session before; None if they do not.
    """

    decision: Decision = Decision()
    warnings: tuple[str, ...] = ()
    changed: str | None = None


def admit(
    run: RunState, worker_id: str, given: Fingerprint | None, live: bool = True, rows: RowEstimates | None = None
) -> Admitted:
    """Admit a worker, or refuse one whose groups would be wrong data.

    Args:
        given: The worker's fingerprint.
        live: Whether the learner of the newest session is heard from.
        rows: With `task.order = "learnable"`: what has to know the rows of its data set.

    Raises:
        Refusal: FINGERPRINT; SESSION_AWAITED if the learner is not `live`.
    """
    if run.declared is None or run.finished:  # a finished run accepts no groups: the worker hears of it, and ends
        return Admitted()
    if given is None:
        raise _refusal(
            worker_id,
            "it sent no fingerprint, so nothing says that its groups are right",
            f"install Slipstream {run.declared.release} there, the learner's release",
        )
    if difference := fingerprint.difference(run.declared, given):
        if not live:
            raise _awaits(worker_id, difference)
        release = "" if given.release == run.declared.release else f", and its release is {given.release}"
        raise _refusal(
            worker_id, difference + release, "start it with the learner's run file, tokenizer, chat template and parser"
        )
    if rows is not None:
        rows.check(worker_id, given)
    if given.rows is None and given.data is None:
        raise _refusal(
            worker_id,
            "its fingerprint names no data set, so nothing says that its rows are the others'",
            f"install Slipstream {run.declared.release} there, the learner's release",
        )
    before = run.data
    if before is None or run.data_session != run.session:
        changed = None
        if before is not None:  # the learner itself names changes of settings
            changed = _change(before, given)
        taken = msgspec.structs.replace(run, data=given, data_session=run.session)
        return Admitted(
            Decision(run=taken),
            changed=changed,
        )
    if difference := fingerprint.difference(before, given):
        if not live:
            raise _awaits(worker_id, difference)
        raise _refusal(
            worker_id,
            difference,
            "give all workers one data set; if this is the right one, stop the others and resume the learner",
        )
    named = msgspec.structs.replace(
        before,
        rows=given.rows,
        data=before.data if before.data is not None else given.data,
        eval_rows=before.eval_rows if before.eval_rows is not None else given.eval_rows,
        eval_data=before.eval_data if before.eval_data is not None else given.eval_data,
        task=before.task if before.task is not None else given.task,
        parts=before.parts or given.parts,
    )
    decision = Decision(run=msgspec.structs.replace(run, data=named)) if named != before else Decision()
    return Admitted(decision, tuple(_warnings(worker_id, named, given)))


def _change(before: Fingerprint, given: Fingerprint) -> str | None:
    """Describe how data sets, task file or tools differ from the session before, and what follows; None if they do
    not."""
    trained = msgspec.structs.replace(given, rows=before.rows, data=before.data)
    if difference := fingerprint.difference(trained, given):
        return (
            f"the data set is not the one of the session before: {difference}. Rows that were trained may come again, "
            f"others never; undo the change if it was not meant"
        )
    if difference := fingerprint.eval_difference(before, given):
        return (
            f"the eval_dataset is not the one of the session before: {difference}. Evaluations from here on cannot be "
            f"compared with those before; undo the change if it was not meant"
        )
    if None not in (before.task, given.task) and before.task != given.task:
        return "the task's file, or its tools, are not those of the session before: rewards and tools may differ"
    return None


def _warnings(worker_id: str, first: Fingerprint, given: Fingerprint) -> Iterator[str]:
    """Yield the differences from the session's first worker that need not make wrong data."""
    if given.task != first.task:
        text = f"worker {worker_id} has another task file, or other tools, than the session's first worker: tools and "
        yield f"{text}rewards may differ; restart the workers that have the old one"
    for name in sorted(first.libraries.keys() & given.libraries.keys()):
        here, there = first.libraries[name], given.libraries[name]
        if here != there:
            yield (
                f"worker {worker_id} has {name} {there}, the session's first worker {here}: prompts may be written "
                f"otherwise; install one version everywhere"
            )


class WorkerRegistry:
    """Remembers admitted workers, and of each its session and when it was last heard from.

    Kept in memory only: after a restart of the queue and in every new session, a worker sends a heartbeat first.

    Args:
        max_workers: `queue.max_workers`.
    """

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._workers: OrderedDict[str, tuple[int, float]] = OrderedDict()
        # Of each worker the process that was heard last, the one before it, and when the last took its place.
        self._processes: dict[str, tuple[_Process, _Process | None, float]] = {}

    def check_room(self, worker_id: str, now: float) -> None:
        """Refuse one worker more than there may be (BUSY). One that has been silent for `SILENT_S` makes room."""
        if worker_id in self._workers or len(self._workers) < self._max_workers:
            return
        oldest, (_, heard_at) = next(iter(self._workers.items()))
        if now - heard_at < SILENT_S:
            raise Refusal(
                reasons.BUSY,
                f"the queue has {len(self._workers)} workers, as many as queue.max_workers allows: worker {worker_id} "
                f"waits until one ends; to have more, raise queue.max_workers and start the queue again",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.remove(oldest)

    def add(self, worker_id: str, session: int, now: float) -> None:
        """Note that a worker was admitted to a session. Call `check_room` first."""
        self._workers[worker_id] = session, now
        self._workers.move_to_end(worker_id)

    def remove(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)
        self._processes.pop(worker_id, None)

    def twins(self, worker_id: str, process: _Process, now: float) -> str | None:
        """Note which process sent a heartbeat, its host and pid, and describe two that have one name; None for one, and
        for one that was started again: of two the first is heard once more after the second."""
        last, before, since = self._processes.get(worker_id, (process, None, now))
        if process == last:
            self._processes[worker_id] = last, before, since
            return None
        self._processes[worker_id] = process, last, now
        if process != before or now - since >= SILENT_S:
            return None
        (host, pid), (other_host, other_pid) = sorted((process, last))
        return (
            f"two workers are called {worker_id}, process {pid} on {host} and process {other_pid} on {other_host}: "
            f"they are given the same tickets, and the end of one is taken for the other's; end one of them, or give "
            f"it another --name"
        )

    def check_registered(self, run: RunState, worker_id: str) -> None:
        """Refuse a worker that was not admitted for the newest session (UNREGISTERED)."""
        if run.declared is not None and self._workers.get(worker_id, (None,))[0] != run.session:
            raise Refusal(
                reasons.UNREGISTERED,
                f"worker {worker_id} is not registered for learner session {run.session}: send a heartbeat with its "
                f"fingerprint, then come again",
            )


def _refusal(worker_id: str, why: str, remedy: str) -> Refusal:
    return Refusal(reasons.FINGERPRINT, f"worker {worker_id} would make wrong data: {why}; {remedy}")


def _awaits(worker_id: str, difference: str) -> Refusal:
    return Refusal(
        reasons.SESSION_AWAITED,
        f"worker {worker_id} waits for the learner's session, since it differs from the one before: {difference}; "
        f"start the learner with this worker's run file and --resume, or the worker with the learner's run file",
    )
