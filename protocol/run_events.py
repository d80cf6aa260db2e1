"""What happened between two looks at the status of a run: joins, leaves, state changes, stalls, notices, results."""

from __future__ import annotations

from collections.abc import Iterator

from protocol.history import Event, EventKind
from protocol.status import ServerStatus, Status, WorkerStatus, describe_evaluation

_Said = tuple[EventKind, str, str | None]


def between(before: Status | None, after: Status, at: float) -> list[Event]:
    """Return what happened, in words.

    Args:
        before: The earlier status, perhaps of a queue that has ended since; None if there is none.
        at: Wall clock of the later one, seconds.
    """
    found = (*_run(before, after), *_servers(before, after), *_workers(before, after), *_told(before, after))
    return [Event(at, kind, text, who) for kind, text, who in found]


def _run(before: Status | None, after: Status) -> Iterator[_Said]:
    if before is None or _restarted(before, after):
        yield "run", "the queue started", None
    if after.learner.session and (before is None or after.learner.session != before.learner.session):
        yield "learner", f"the learner began session {after.learner.session} at step {after.step}", "learner"
    if before is None:
        return
    if after.step < before.step:
        yield "run", f"the run went back from step {before.step} to {after.step}", None
    if after.checkpoint_step is not None and after.checkpoint_step != before.checkpoint_step:
        yield "learner", f"a checkpoint of step {after.checkpoint_step} was saved", "learner"
    if after.stall.stalled and not before.stall.stalled:
        yield "run", f"no step for {after.stall.since_s:.0f} s: {after.stall.why or 'the cause is not known'}", None
    elif before.stall.stalled and not after.stall.stalled:
        yield "run", "steps are made again", None
    if after.gave_up and not before.gave_up:
        yield "run", f"the run was given up: {after.gave_up}", None
    if after.finished and not before.finished:
        yield "run", f"the run finished at step {after.step}", None


def _restarted(before: Status, after: Status) -> bool:
    return after.uptime_s < before.uptime_s


def _servers(before: Status | None, after: Status) -> Iterator[_Said]:
    were = {} if before is None else {server.name: server for server in before.servers}
    for server in after.servers:
        was = were.pop(server.name, None)
        if was is None:
            yield "server", f"server {server.name} at {server.url} joined, {_state(server)}", server.name
        elif was.state != server.state:
            yield "server", f"server {server.name} was {was.state} and is {_state(server)}", server.name
    for name in were:
        yield "server", f"server {name} left", name


def _state(server: ServerStatus) -> str:
    return f"{server.state}: {server.reason}" if server.reason else str(server.state)


def _workers(before: Status | None, after: Status) -> Iterator[_Said]:
    were = {} if before is None else {worker.worker_id: worker for worker in before.workers}
    for worker in after.workers:
        name, was = worker.worker_id, were.pop(worker.worker_id, None)
        gone = _is_gone(worker)
        if was is None and not gone:
            yield "worker", f"worker {name} joined from {worker.host or 'somewhere'}", name
        elif was is not None and gone and was.does != worker.does:
            yield "worker", f"worker {name} {_how_gone(worker)}", name
        elif was is not None and _is_gone(was) and not gone:
            yield "worker", f"worker {name} came back", name
        first = sorted(set(worker.failures) - set(was.failures if was is not None else ()))
        if first:
            yield "worker", f"worker {name}: the first failures of {', '.join(first)}", name
    for worker in were.values():
        if not _is_gone(worker):
            yield "worker", f"worker {worker.worker_id} was forgotten", worker.worker_id


def _is_gone(worker: WorkerStatus) -> bool:
    return worker.does in ("silent", "refused", "left")


def _how_gone(worker: WorkerStatus) -> str:
    if worker.does == "refused":
        return f"was refused: {worker.reason}"
    return "left" if worker.does == "left" else "has been silent for a minute"


def _told(before: Status | None, after: Status) -> Iterator[_Said]:
    known = (
        0 if before is None or _restarted(before, after) else max((notice.id for notice in before.notices), default=0)
    )
    for notice in after.notices:
        if notice.id > known:
            yield "notice", notice.text, notice.who
    seen = set() if before is None else {cause.about for cause in before.diagnosis}
    for cause in after.diagnosis:
        if cause.about not in seen:
            yield "notice", cause.text, None
    ended = set() if before is None else {result.step for result in before.evaluations if result.ended}
    for result in after.evaluations:
        if result.ended and result.step not in ended:
            yield "evaluation", describe_evaluation(result), None
