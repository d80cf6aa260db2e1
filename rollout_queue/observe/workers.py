"""The newest report of each worker: its counts, what it does now, and the draining servers that it may still use.

A report costs the same with one worker and with thousands.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from slipstream.protocol.messages import WorkerReport
from slipstream.protocol.status import EPISODE_PLACES, WorkerActivity, WorkerStatus
from slipstream.rollout_queue.ledger.registration import SILENT_S
from slipstream.rollout_queue.observe.limits import SlotTimes
from slipstream.rollout_queue.observe.waits import SESSION

# Seconds without a word, in which a worker has missed two heartbeats: what it does is no longer known.
QUIET_S = 25.0

_KEPT_S = 3600.0

_MAX_FAILURES = 64
_MAX_FAILURE_CHARACTERS = 80
_REPORTED = [name for name in WorkerStatus.__struct_fields__ if name in WorkerReport.__struct_fields__]
_OPEN = ("episodes_in_flight", *(f"episodes_{place}" for place in EPISODE_PLACES), "waiting_for_servers")


class _Heard(msgspec.Struct):
    """A worker's newest report. `left`: it has signed off since; its counts stay in the status, as those of a worker
    that is `refused`, for that reason."""

    status: WorkerStatus
    elapsed_s: float
    waited_s: float
    full_s: float
    cpu_s: float
    at: float
    left: bool = False
    refused: str | None = None

    @property
    def slot_s(self) -> float:
        return self.elapsed_s * self.status.capacity

    @property
    def idle_slot_s(self) -> float:
        return self.waited_s * self.status.capacity

    def since(self, known: _Heard | None) -> SlotTimes:
        """Return what passed for its slots and episodes since an earlier report, or since its start."""
        if known is None or known.elapsed_s > self.elapsed_s:
            passed_s, waited_s, full_s = self.elapsed_s, self.waited_s, self.full_s
        else:
            passed_s, waited_s = self.elapsed_s - known.elapsed_s, max(0.0, self.waited_s - known.waited_s)
            full_s = max(0.0, self.full_s - known.full_s)
        slots, status = self.status.capacity, self.status
        return SlotTimes(
            slot_s=slots * passed_s,
            ticket_wait_s=slots * waited_s,
            open_wait_s=slots * full_s,
            episode_s=passed_s * sum(getattr(status, f"episodes_{place}") for place in EPISODE_PLACES),
            tools_s=passed_s * status.episodes_in_tools,
            judgement_s=passed_s * status.episodes_in_judgement,
        )

    def lives(self, now: float) -> bool:
        return not self.left and self.refused is None and now - self.at <= SILENT_S


class WorkerReports:
    """Keeps the newest report of each worker. Those silent for an hour are forgotten, and the oldest of too many.

    Args:
        max_workers: How many are kept.
        passed: Called with what passed for a worker's slots since its last report, and the time of this one.
    """

    def __init__(self, max_workers: int, passed: Callable[[SlotTimes, float], None] = lambda *_: None) -> None:
        self._max_workers = max_workers
        self._passed = passed
        self._heard: OrderedDict[str, _Heard] = OrderedDict()  # the longest silent first
        # Of those that live: the draining servers on which each has no request, and how many have none on each.
        self._done_with: OrderedDict[str, frozenset[str]] = OrderedDict()
        self._done: Counter[str] = Counter()

    def report(self, report: WorkerReport, now: float) -> None:
        done_with = frozenset(name for name, requests in report.draining.items() if requests == 0)
        heard = _heard(report, now)
        self._passed(heard.since(self._heard.get(report.worker_id)), now)
        self._keep(report.worker_id, heard, done_with)

    def seen(self, worker_id: str, now: float) -> None:
        """Note a sign of life without a report. A worker that has left stays so: a long-poll may end after it."""
        known = self._heard.get(worker_id)
        if known is None:
            self.report(WorkerReport(worker_id, []), now)
        elif not known.left and known.refused is None:
            known.at = now
            self._keep(worker_id, known, self._done_with.get(worker_id, frozenset()))

    def refuse(self, report: WorkerReport, why: str, now: float) -> None:
        """Note that a worker was refused. It stays so until it is admitted."""
        heard = _heard(report, now)
        heard.refused = why
        self._keep(report.worker_id, heard, frozenset())
        self._forget_life(report.worker_id)

    def leave(self, worker_id: str) -> None:
        """Note that a worker signed off."""
        if (known := self._heard.get(worker_id)) is not None:
            known.left = True
        self._forget_life(worker_id)

    def capacity_of(self, worker_id: str) -> int:
        """Return how many episodes a worker runs at once; 0 before its first heartbeat."""
        heard = self._heard.get(worker_id)
        return 0 if heard is None else heard.status.capacity

    def seen_s_ago(self, now: float) -> float | None:
        """Return the seconds since any worker was last heard from; None for never."""
        return now - next(reversed(self._heard.values())).at if self._heard else None

    def count_on_server(self, name: str, now: float) -> int:
        """Count the workers that may have a request on a draining server: they are still heard from and have not
        reported that they have none."""
        while self._done_with and not self._heard[oldest := next(iter(self._done_with))].lives(now):
            self._forget_life(oldest)
        return len(self._done_with) - self._done[name]

    def on_server(self, name: str, now: float, limit: int) -> list[str]:
        """Name some of the workers that may have a request on a draining server."""
        if not self.count_on_server(name, now):
            return []
        return sorted(islice((worker for worker, done in self._done_with.items() if name not in done), limit))

    def statuses(self, now: float, waits_for: Callable[[str], str | None]) -> list[WorkerStatus]:
        """Return each worker with its newest counts. A silent one has no open episodes: its tickets went to others.

        Args:
            waits_for: Returns what a worker waits for in place of episodes; None for nothing.
        """
        return list(self._statuses(now, waits_for))

    def _statuses(self, now: float, waits_for: Callable[[str], str | None]) -> Iterator[WorkerStatus]:
        for worker_id, heard in self._heard.items():
            status = copy.copy(heard.status)
            status.seen_s_ago = now - heard.at
            if heard.lives(now):
                quiet = status.seen_s_ago >= QUIET_S
                status.does = "quiet" if quiet else _activity(status, waits_for(worker_id))
            else:
                status.does = "left" if heard.left else "refused" if heard.refused is not None else "silent"
                status.reason = heard.refused
                for name in _OPEN:
                    setattr(status, name, 0)
            yield status

    def wait_share(self) -> float | None:
        """Return the share of the time of all workers' slots that was idle because there were no tickets."""
        slot_s = sum(heard.slot_s for heard in self._heard.values())
        return min(1.0, sum(heard.idle_slot_s for heard in self._heard.values()) / slot_s) if slot_s else None

    def cpu_ms_per_episode(self) -> float | None:
        episodes = sum(heard.status.episodes_done + heard.status.eval_episodes for heard in self._heard.values())
        return 1000 * sum(heard.cpu_s for heard in self._heard.values()) / episodes if episodes else None

    def _keep(self, worker_id: str, heard: _Heard, done_with: frozenset[str]) -> None:
        self._heard[worker_id] = heard
        self._heard.move_to_end(worker_id)
        self._forget_life(worker_id)
        self._done_with[worker_id] = done_with
        self._done.update(done_with)
        while True:
            oldest = next(iter(self._heard))
            if heard.at - self._heard[oldest].at < _KEPT_S and len(self._heard) <= self._max_workers:
                return
            self._forget_life(oldest)
            del self._heard[oldest]

    def _forget_life(self, worker_id: str) -> None:
        for name in self._done_with.pop(worker_id, ()):
            self._done[name] -= 1
            if not self._done[name]:
                del self._done[name]


def _heard(report: WorkerReport, now: float) -> _Heard:
    """Reduce a report to what the status shows: the most frequent failures, no tickets and no texts."""
    most = sorted(report.failures.items(), key=lambda item: -item[1])[:_MAX_FAILURES]
    episodes = report.episodes_done + report.eval_episodes
    fields = {name: getattr(report, name) for name in _REPORTED}
    fields["failures"] = {name[:_MAX_FAILURE_CHARACTERS]: count for name, count in most}
    status = WorkerStatus(
        **fields,
        wait_share=min(1.0, report.waited_s / report.elapsed_s) if report.elapsed_s else 0.0,
        full_share=min(1.0, report.full_s / report.elapsed_s) if report.elapsed_s else 0.0,
        cpu_ms_per_episode=1000 * report.cpu_s / episodes if episodes else None,
        seen_s_ago=0.0,
    )
    return _Heard(status, report.elapsed_s, report.waited_s, report.full_s, report.cpu_s, now)


def _activity(status: WorkerStatus, waits_for: str | None) -> WorkerActivity:
    """Say what most of a worker's open episodes do; without any, what it waits for."""
    at = {place: getattr(status, f"episodes_{place}") for place in EPISODE_PLACES}
    busiest = max(EPISODE_PLACES, key=at.__getitem__)
    if status.waiting_for_servers and status.waiting_for_servers >= at[busiest]:
        return "waiting_for_servers"
    if at[busiest] or status.episodes_in_flight:
        return busiest
    if waits_for is None:
        return "idle"
    return "waiting_for_session" if waits_for == SESSION else "waiting_for_tickets"
