"""Simulates a run event by event: tickets, episodes, servers, the queue, the learner's steps and publications.

Tickets are given out by the queue's own admission. Pure and seeded: a thousand steps of 16 groups of 8 take seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from slipstream.deploy.planning.rates import PublicationTimes, Rates, server_count
from slipstream.deploy.planning.serving import SimulatedServer
from slipstream.deploy.planning.slots import SimulatedEpisode, SimulatedGroup, SimulatedWorker
from slipstream.protocol import reasons
from slipstream.protocol.config import RunConfig
from slipstream.rollout_queue.ledger.admission import Admission, QueueLoad, StepFacts

# How much longer a publication into a server takes at most, where it has more requests than the rates'.
_MOST_BUSY = 2.0

# Turns, swaps and the like, of which a simulation takes about a hundred thousand a second.
_MAX_EVENTS = 2_000_000

# Share of the steps that are not measured: the run begins empty.
_WARM_UP = 0.1


class Prediction(msgspec.Struct, frozen=True):
    """Results of a simulated run, after its first tenth; counts of tickets are of the whole run.

    Attributes:
        steps_per_s, tokens_per_s, trained_tokens_per_s: Rates; tokens are sampled ones of groups that arrived.
        staleness_mean, staleness_max: Of the tokens that train, in versions.
        drops: Dropped groups by reason.
        learner_wait, worker_wait, server_idle: Share of time that the learner waited for groups, that workers' slots
            were idle for want of tickets, and that servers had no request.
        worker_full: Share of slots' time idle because no more episodes may be open.
        running: Mean number of requests on a server.
        depth: Groups that admission aims at, in optimiser steps, at the end.
    """

    steps_per_s: float
    tokens_per_s: float
    trained_tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    drops: dict[str, int]
    learner_wait: float
    worker_wait: float
    worker_full: float
    server_idle: float
    running: float
    depth: float
    issued: int
    trained: int
    dropped: int
    outstanding: int


@dataclass
class _Draft:
    """A batch that is leased: the groups that train, and how many were looked at."""

    standing: list[SimulatedGroup] = field(default_factory=list)
    judged: int = 0


class Simulation:
    """A run of `config` with `config.vllm.count` servers and `config.worker.count` workers, on measured rates."""

    def __init__(self, config: RunConfig, rates: Rates, seed: int = 0) -> None:
        self._config = config
        self._rates = rates
        self._random = random.Random(seed)
        self._size = config.rollout.group_size
        self._batch = config.learner.groups_per_step
        self._bound = config.queue.max_staleness
        self.admission = Admission(config)
        servers = server_count(config)
        self._servers = [
            SimulatedServer[SimulatedEpisode](rates.curve, config.vllm.max_num_seqs, 0) for _ in range(servers)
        ]
        self._workers = [SimulatedWorker(config.worker.episodes, config.max_open) for _ in range(config.worker.count)]
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._version = 0
        self._published: int | None = None
        # Groups that arrived, those leased for the next steps, and those of the step that is made.
        self._ready: deque[SimulatedGroup] = deque()
        self._drafts: deque[_Draft] = deque()
        self._training: _Draft | None = None
        self._waiting_since = self._step_waited = self._last_step = 0.0
        self._late = 0
        self._sums = _Sums()
        self._steps = 1
        self._happened = 0
        self.issued = self.trained = self.dropped = 0

    def run(self, steps: int) -> Prediction:
        """Simulate optimiser steps.

        Raises:
            RuntimeError: Nothing can happen any more, as when no worker may begin a group, or too much would.
        """
        self._steps = steps
        skipped = max(1, int(steps * _WARM_UP)) if steps > 1 else 0
        before: _Sums | None = None if skipped else self._measured()
        self._give_tickets()
        while self._version < steps:
            if before is None and self._version >= skipped:
                before = self._measured()
            self._advance()
        return self._predict(before or _Sums(), self._measured(), steps - skipped)

    @property
    def outstanding(self) -> int:
        """Groups ticketed, ready or leased."""
        return self.issued - self.trained - self.dropped

    def _advance(self) -> None:
        """Let the next thing happen."""
        self._happened += 1
        if self._happened > _MAX_EVENTS:
            raise RuntimeError(f"more than {_MAX_EVENTS:,} turns and swaps in {self._version} of its steps")
        ends = [server.next_end() for server in self._servers]
        first = min(ends)
        if self._events and self._events[0][0] <= first:
            self._now, _, happens = heapq.heappop(self._events)
            happens()
        elif first < math.inf:
            self._now = first
            self._end_turn(*self._servers[ends.index(first)].end(first))
        else:
            raise RuntimeError("nothing can happen any more")

    def _later(self, seconds: float, happens: Callable[[], None]) -> None:
        if not seconds:
            happens()
            return
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), happens))

    # Workers.

    def _give_tickets(self) -> None:
        """Issue tickets in turn to the workers with room, while admission allows."""
        asking = [worker for worker in self._workers if worker.has_room(self._size)]
        while asking:
            grant = self.admission.grant(QueueLoad(self.outstanding, 0, self._version, self._served(), 1))
            if not grant.count:
                self.admission.observe_refusal(grant)
                break
            for worker in sorted(asking, key=lambda worker: -worker.free)[: grant.count]:
                self._begin(worker)
            asking = [worker for worker in asking if worker.has_room(self._size)]
        for worker in self._workers:
            worker.note(self._now, worker in asking, self._is_crowded(worker))

    def _served(self) -> int:
        return min(server.proven for server in self._servers)

    def _is_crowded(self, worker: SimulatedWorker) -> bool:
        """Tell whether only the number of open episodes keeps the next group out."""
        return worker.has_slots_for(self._size) and not worker.has_room(self._size)

    def _begin(self, worker: SimulatedWorker) -> None:
        self._note(worker)
        self.issued += 1
        flat = self._rates.zero_variance
        share = flat[min(len(flat) - 1, len(flat) * self._version // self._steps)]
        group = SimulatedGroup(worker, self._size, self._random.random() < share)
        worker.open += self._size
        for _ in range(self._size):
            times = self._random.choice(self._rates.episodes)
            worker.new.append(SimulatedEpisode(group, times, times.turns))
        self._fill(worker)

    def _note(self, worker: SimulatedWorker) -> None:
        worker.note(self._now, full=self._is_crowded(worker))

    def _fill(self, worker: SimulatedWorker) -> None:
        """Begin turns on the free slots: those of episodes that have begun come first."""
        while worker.free and (line := worker.begun or worker.new):
            worker.free -= 1
            self._sample(line.popleft())

    def _sample(self, episode: SimulatedEpisode) -> None:
        if episode.server is None:
            least = min(range(len(self._servers)), key=lambda number: self._servers[number].assigned)
            episode.server = least
            self._servers[least].assigned += 1
        prompt = self._prompt(episode, episode.server)
        self._servers[episode.server].add(self._now, episode.times.tokens / episode.times.turns, episode, prompt)

    def _prompt(self, episode: SimulatedEpisode, server: int) -> float:
        """Return how many tokens of a turn's prompt a server has not kept: it keeps those of its version.

        A group's episodes have their prompt in common. What a tool said since the last turn is left out.
        """
        version = self._servers[server].version
        known, episode.kept = episode.kept, version
        if known == version:
            return 0.0
        if known is None:
            place = (server, version)
            if place in episode.group.kept:
                return 0.0
            episode.group.kept.add(place)
            return self._rates.prompt_tokens
        done = 1 - episode.turns_left / episode.times.turns
        return self._rates.prompt_tokens + done * episode.times.tokens

    def _end_turn(self, episode: SimulatedEpisode, spans: list[tuple[int, float]]) -> None:
        group, worker, server = episode.group, episode.group.worker, episode.server
        assert server is not None
        group.spans += spans
        group.unproven[server] = self._servers[server].version
        self._note(worker)
        worker.free += 1
        episode.turns_left -= 1
        times = episode.times
        if episode.turns_left:
            self._later(times.tools_s / max(1, times.turns - 1), partial(self._next_turn, episode))
        else:
            self._servers[server].assigned -= 1
            self._later(times.judge_s, partial(self._end_episode, group))
        self._fill(worker)
        if self._is_crowded(worker):
            worker.enough_open = min(worker.max_open, worker.open + self._size)
        if worker.has_room(self._size):
            self._give_tickets()

    def _next_turn(self, episode: SimulatedEpisode) -> None:
        worker = episode.group.worker
        self._note(worker)
        worker.begun.append(episode)
        if not worker.free:
            worker.enough_open = max(worker.slots, worker.enough_open - 1)
        self._fill(worker)

    def _end_episode(self, group: SimulatedGroup) -> None:
        group.left -= 1
        if group.left:
            return
        self._note(group.worker)
        group.worker.open -= self._size
        self._sums.sampled += group.tokens
        self._ready.append(group)
        self._lease()
        self._give_tickets()

    # The learner.

    def _lease(self) -> None:
        """Lease groups for the next steps, drop those that teach nothing, and begin a step whose groups are there."""
        for _ in range(len(self._ready)):
            group = self._ready.popleft()
            if not self._is_proven(group) or not self._take(group):
                self._ready.append(group)
        if self._training is None and self._drafts and self._is_full(self._drafts[0]):
            self._begin_step(self._drafts.popleft())
            self._lease()

    def _is_proven(self, group: SimulatedGroup) -> bool:
        return all(self._servers[server].proven >= version for server, version in group.unproven.items())

    def _is_full(self, draft: _Draft) -> bool:
        """Tell as the feeder does: with `zero_variance = "drop"`, dropped groups count too while others train."""
        if self._config.learner.zero_variance != "drop":
            return len(draft.standing) == self._batch
        return draft.judged >= self._batch and bool(draft.standing) and draft.judged % self._batch == 0

    def _take(self, group: SimulatedGroup) -> bool:
        """Lease a group for the first step that wants one. Returns False if none does."""
        draft = self._drafts[-1] if self._drafts else None
        if draft is None or self._is_full(draft):
            ahead = min(self._config.learner.prefetch_steps, self._bound)
            if len(self._drafts) >= ahead + (self._training is None):
                return False
            draft = _Draft()
            self._drafts.append(draft)
        draft.judged += 1
        trains_at = self._version + len(self._drafts) - (self._training is None)
        versions = [version for version, _ in group.spans]
        oldest = min(versions) if self._config.queue.overage == "drop" else max(versions)
        if trains_at - oldest > self._bound:
            self._late += 1
            self._drop(trains_at, reasons.OVERAGE)
        elif group.flat and self._config.learner.zero_variance != "keep":
            self._drop(trains_at, reasons.ZERO_VARIANCE)
        else:
            draft.standing.append(group)
        return True

    def _drop(self, trains_at: int, reason: str) -> None:
        self.admission.observe_ack(str(trains_at), dropped=1, is_step=False)
        self.dropped += 1
        self._sums.drops[reason] = self._sums.drops.get(reason, 0) + 1

    def _begin_step(self, draft: _Draft) -> None:
        self._training = draft
        self._step_waited = self._now - self._waiting_since
        self._sums.waited += self._step_waited
        tokens = 0.0
        for group in draft.standing:
            for version, count in group.spans:
                age = self._version - version
                if age <= self._bound:
                    tokens += count
                    self._sums.staleness += age * count
                    self._sums.oldest[self._version] = max(self._sums.oldest.get(self._version, 0), age)
        self._sums.trained += tokens
        self._later(self._rates.step_s + tokens * self._rates.trained_token_s, self._end_step)

    def _end_step(self) -> None:
        assert self._training is not None
        trained, self._training = len(self._training.standing), None
        self.trained += trained
        self.admission.observe_ack(str(self._version), dropped=0, is_step=True)
        self._version += 1
        took_s, self._waiting_since, self._last_step = self._now - self._last_step, self._now, self._now
        late, self._late = self._late, 0
        self.admission.observe_step(StepFacts(trained, late, self._step_waited / took_s if took_s else 0.0))
        if self._version % self._config.weight_sync.every == 0:
            self._published = self._version
            for server in self._servers:
                self._publish(server)
        self._lease()
        self._give_tickets()

    # Publications.

    def _publish(self, server: SimulatedServer[SimulatedEpisode]) -> None:
        """Bring the newest version to a server, unless another is on its way: then it follows, and skips those
        between."""
        version = self._published
        if version is None or server.updating or server.version >= version:
            return
        server.updating = True
        times = self._random.choice(self._rates.publications).scaled(self._publication_share(server.running))
        self._later(times.transfer_s, partial(self._swap, server, version, times))

    def _publication_share(self, running: int) -> float:
        """Return how long a publication into a server with some requests takes, as a share of that of the rates.

        Its messages wait for the server's steps, which last as long as a token does.
        """
        rates = self._rates
        idle, measured = rates.curve.token_s(0), rates.curve.token_s(rates.running)
        busy = (rates.curve.token_s(running) - idle) / (measured - idle) if measured > idle else 1.0
        return rates.idle_publication + (1 - rates.idle_publication) * min(_MOST_BUSY, max(0.0, busy))

    def _swap(self, server: SimulatedServer[SimulatedEpisode], version: int, times: PublicationTimes) -> None:
        server.swap(self._now, version, times.pause_s)
        rest_s = max(times.pause_s, times.total_s - times.transfer_s)
        self._later(rest_s, partial(self._prove, server, version))

    def _prove(self, server: SimulatedServer[SimulatedEpisode], version: int) -> None:
        server.proven = version
        server.updating = False
        self._publish(server)
        self._lease()
        self._give_tickets()

    # Sums.

    def _measured(self) -> _Sums:
        for server in self._servers:
            server.to(self._now)
        for worker in self._workers:
            self._note(worker)
        count, workers = len(self._servers), len(self._workers)
        waiting = self._now - self._waiting_since if self._training is None else 0.0
        return msgspec.structs.replace(
            self._sums,
            at=self._now,
            waited=self._sums.waited + waiting,
            idle=sum(server.idle_s for server in self._servers) / count,
            running=sum(server.running_s for server in self._servers) / count,
            slots_idle=sum(worker.idle_s for worker in self._workers) / workers,
            slots_full=sum(worker.full_s for worker in self._workers) / workers,
            version=self._version,
            drops=dict(self._sums.drops),
        )

    def _predict(self, before: _Sums, after: _Sums, steps: int) -> Prediction:
        seconds = max(1e-9, after.at - before.at)
        trained = after.trained - before.trained
        return Prediction(
            steps_per_s=steps / seconds,
            tokens_per_s=(after.sampled - before.sampled) / seconds,
            trained_tokens_per_s=trained / seconds,
            staleness_mean=(after.staleness - before.staleness) / trained if trained else 0.0,
            staleness_max=max((age for step, age in after.oldest.items() if step >= before.version), default=0),
            drops={name: count - before.drops.get(name, 0) for name, count in after.drops.items()},
            learner_wait=(after.waited - before.waited) / seconds,
            worker_wait=(after.slots_idle - before.slots_idle) / seconds,
            worker_full=(after.slots_full - before.slots_full) / seconds,
            server_idle=(after.idle - before.idle) / seconds,
            running=(after.running - before.running) / seconds,
            depth=self.admission.depth,
            issued=self.issued,
            trained=self.trained,
            dropped=self.dropped,
            outstanding=self.outstanding,
        )


class _Sums(msgspec.Struct):
    """Sums since the start. `oldest`: the greatest staleness of each step by the version that trained it."""

    at: float = 0.0
    version: int = 0
    waited: float = 0.0
    sampled: float = 0.0
    trained: float = 0.0
    staleness: float = 0.0
    idle: float = 0.0
    running: float = 0.0
    slots_idle: float = 0.0
    slots_full: float = 0.0
    oldest: dict[int, int] = {}
    drops: dict[str, int] = {}
