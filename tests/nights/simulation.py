"""A run in simulated time: the queue's decisions, workers, a learner and a fleet, hurt by the faults of `faults`.

Everything that decides is the product's (ledger, leases, admission, registry of servers, who is too far behind);
everything that takes time is an event of a known length. A step is one event. After each, the rules hold, by the
simulation's own bookkeeping: it knows which weights really sampled a token, and which rows the surviving steps trained.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from slipstream.protocol.messages import BeginSession, LearnerProcess, LeaseAck, Server, ServerState
from slipstream.rollout_queue.ledger import leases, servers, tickets
from slipstream.rollout_queue.ledger.admission import Admission, QueueLoad, StepFacts
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import Decision, GroupFacts, Refusal, SampledBy, TicketRecord, TicketState
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry
from slipstream.rollout_queue.store.changes import Changes, Payload
from slipstream.rollout_queue.store.memory import MemoryStore
from slipstream.weight_sync.fleet import decisions
from tests.kit.config import config
from tests.nights.faults import possible
from tests.nights.schedule import Strike, draw

K, B = 4, 4
CONFIG = config(
    queue={
        "max_staleness": K,
        "depth": float(K + 1),
        "ticket_timeout_s": 10.0,
        "lease_timeout_s": 20.0,
        "ticket_max_age_s": 60.0,  # a ticket that is renewed and never ends
        "ticket_attempts": 1000,
    },
    learner={"groups_per_step": B, "keep_checkpoints": 3},
    worker={"episode_timeout_s": 50.0},
)
SERVERS, WORKERS, SLOTS = 3, 3, 8
# Of one publication.
TIMEOUT_S = 40.0
# Seconds that things take.
PROOF_S, LATE_PROOF_S = (0.1, 1.0), 8.0
TURN_S, TRAIN_S, PUBLISH_S, RESTART_S, LOOK_S, DOWN_AFTER_S = (0.2, 0.8), 1.0, (0.1, 0.4), 10.0, 1.0, 10.0
CHECKPOINT_EVERY = 5
# Hurt every half minute for a time, then left alone for a time: quiet has its own rules.
EVERY_S, HURT_S, CYCLE_S = 30.0, 600.0, 1000.0
# A slow link lasts longer than the run may stand still: the other servers carry it.
SLOWER = 20.0
# Without a fault for so long, a step is made in as long, and nothing is over-age.
QUIET_S = 150.0
INDICES_KEPT = 500


class Broken(AssertionError):
    """A rule does not hold; the text says which, and when."""


class QueueDown(Exception):
    """The queue does not answer."""


@dataclass
class SimServer:
    """`label`: the version that it says it has; `weights`: the one that it has."""

    name: str
    label: int = 0
    weights: int = 0
    boot: int = 0
    alive_from: float = 0.0
    held_until: float = 0.0
    paused: bool = False
    next_swap_is_wrong: bool = False
    slow_until: float = 0.0
    silent_since: float | None = None
    publishes: bool = False
    behind_since: float | None = None
    known_boot: int = -1
    took_s: float = 0.2
    failures: int = 0
    next_try: float = 0.0

    def generates(self, now: float) -> bool:
        return now >= self.alive_from and now >= self.held_until and not self.paused


@dataclass
class SimWorker:
    name: str
    life: int = 0
    held_until: float = 0.0
    cut_until: float = 0.0
    tickets: set[str] = field(default_factory=set)


@dataclass
class SimLearner:
    """`published`: the newest version that was handed over; `checkpoints`: versions by step."""

    session: int = 0
    life: int = 0
    alive: bool = False
    held_until: float = 0.0
    step: int = 0
    version: int = 0
    published: int = -1
    lease: int = 0
    checkpoints: dict[int, int] = field(default_factory=dict)
    begun: str = ""


class Simulation:
    """Runs events until `steps` of them have happened, or a rule is broken.

    Attributes:
        happened: How often each kind of event happened.
        trained: By step of the surviving time line, the rows that it trained.
    """

    def __init__(self, seed: int, steps: int, schedule: Sequence[Strike] | None = None) -> None:
        self.rng = random.Random(seed)
        self.steps = steps
        self.now = 0.0
        self.happened: Counter[str] = Counter()
        self.events: list[tuple[float, int, str, Callable[[], None]]] = []
        self.order = 0
        self.store = MemoryStore()
        self.queue_from = 0.0
        self.crash_after_commit = False
        self.admission = Admission(CONFIG)
        self.servers = {f"vllm-{i}": SimServer(f"vllm-{i}") for i in range(SERVERS)}
        self.workers = {f"worker-{i}": SimWorker(f"worker-{i}") for i in range(WORKERS)}
        self.learner = SimLearner()
        self.bad: set[str] = set()  # tickets whose groups hold tokens of other weights than their labels say
        self.facts: dict[str, GroupFacts] = {}
        self.taken_at: dict[str, float] = {}
        self.trained: dict[int, list[int]] = {}
        self.versions = [-1]
        self.stepped_at = self.hurt_until = 0.0
        self._restart_queue()
        for name in self.servers:
            self._put(name, ServerState.JOINING)
            self._soon(f"look at {name}", LOOK_S, lambda name=name: self._look(name))  # type: ignore[misc]
        for name in self.workers:
            self._soon("worker", 0.5, lambda name=name, life=0: self._worker(name, life))  # type: ignore[misc]
        self._soon("queue", 1.0, self._tick)
        self._soon("learner", 1.0, lambda: self._begin(0))
        self._schedule = iter(endless(seed) if schedule is None else schedule)
        self._next_strike()

    def run(self) -> Simulation:
        while self.happened.total() < self.steps and self.events:
            at, _, what, event = heapq.heappop(self.events)
            self.now = at
            self.happened[what] += 1
            try:
                event()
            except QueueDown:
                pass
            except Refusal as refusal:
                self.happened[f"refused: {refusal.reason}"] += 1
            self._check()
        return self

    def _soon(self, what: str, seconds: float, event: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + seconds, self.order, what, event))

    def _between(self, ends: tuple[float, float]) -> float:
        return self.rng.uniform(*ends)

    # The queue.

    def _restart_queue(self) -> None:
        contents = self.store.load()
        self.restarted_at = self.now  # each ticket gets its full time again
        self.ledger = Ledger(CONFIG, contents, self.now)
        self.fleet = ServerRegistry(contents.servers)
        self.admission = Admission(CONFIG)

    def _ask(self) -> None:
        if self.now < self.queue_from:
            raise QueueDown

    def _commit(self, decision: Decision, payloads: Mapping[str, bytes] | None = None) -> None:
        bodies = {name: Payload.of(body) for name, body in (payloads or {}).items()}
        self.store.commit(Changes.of([decision], bodies, self.ledger.run.pruned_below))
        if self.crash_after_commit:  # the answer is lost with it
            self.crash_after_commit = False
            self.queue_from = self.now + 1.0
            self._restart_queue()
            raise QueueDown
        self.ledger.apply(decision, self.now)
        for server in decision.servers:
            self.fleet.apply(server)

    def _put(self, name: str, state: ServerState, version: int | None = None) -> None:
        self._ask()
        self._commit(servers.put(self.fleet, self.ledger, Server(name, f"http://{name}", state, version), self.now))

    def _state(self, name: str) -> ServerState:
        server = self.fleet.get(name)
        assert server is not None
        return server.state

    def _tick(self) -> None:
        self._soon("queue", 1.0, self._tick)
        self._ask()
        self._commit(tickets.expire(self.ledger, self.now))

    # Workers.

    def _worker(self, name: str, life: int) -> None:
        """Renew tickets, hear of lost ones, and ask for more."""
        worker = self.workers.get(name)
        if worker is None or life != worker.life:
            return
        wait_s = max(0.0, max(worker.held_until, worker.cut_until) - self.now)
        self._soon("worker", max(0.5, wait_s), lambda: self._worker(name, life))
        if wait_s:
            return
        self._ask()
        held = {record.id for record in self.ledger.held_by(name)}
        worker.tickets &= held
        for ticket_id in sorted(worker.tickets):
            self.ledger.renew_ticket(ticket_id, self.now)
        for record in tickets.undelivered(self.ledger, name, sorted(worker.tickets)):
            self._take(worker, record)
        room = SLOTS - len(worker.tickets)
        run, served = self.ledger.run, self.fleet.served_version
        load = QueueLoad(self.ledger.outstanding, self.ledger.bytes, run.version, served, run.session)
        grant = self.admission.grant(load)
        if room <= 0 or run.finished or grant.count <= 0:
            return
        decision = tickets.issue(self.ledger, name, min(room, grant.count))
        self._commit(decision)
        for record in decision.tickets:
            self._take(worker, record)

    def _take(self, worker: SimWorker, record: TicketRecord) -> None:
        worker.tickets.add(record.id)
        self.taken_at.setdefault(record.id, self.now)
        self._soon("turn", 0.0, lambda: self._turn(worker, worker.life, record, None, [], 0))

    def _turn(
        self,
        worker: SimWorker,
        life: int,
        record: TicketRecord,
        on: tuple[str, int] | None,
        spans: list[tuple[str, int, int]],
        turns: int,
    ) -> None:
        """One turn of a group ends, and the next begins on a server that serves; the last one is handed in."""

        def again(seconds: float, on: tuple[str, int] | None) -> None:
            self._soon("turn", seconds, lambda: self._turn(worker, life, record, on, spans, turns))

        if life != worker.life or record.id not in worker.tickets:
            return
        if worker.held_until > self.now:
            again(worker.held_until - self.now, on)
            return
        if on is not None:
            server = self.servers[on[0]]
            if server.boot != on[1] or not server.generates(self.now):
                again(5.0, None)  # its request fails or hangs; it continues elsewhere
                return
            spans = [*spans, (server.name, server.label, server.weights)]
            turns += 1
        if turns == 2:
            self._hand_in(worker, life, record, spans)
            return
        serving = [of.name for of in self.fleet.servers if of.state is ServerState.SERVING]
        if not serving:
            again(1.0, None)
            return
        name = self.rng.choice(serving)
        again(self._between(TURN_S), (name, self.servers[name].boot))

    def _hand_in(self, worker: SimWorker, life: int, record: TicketRecord, spans: list[tuple[str, int, int]]) -> None:
        def later(seconds: float) -> None:
            self._soon("hand in", seconds, lambda: self._hand_in(worker, life, record, spans))

        if life != worker.life:
            return
        if (wait_s := max(worker.held_until, worker.cut_until) - self.now) > 0:
            later(wait_s)
            return
        if self.now < self.queue_from:
            later(1.0)
            return
        issued = self.ledger.get(record.id, TicketState.ISSUED)
        if issued is None:  # superseded while it was away, or accepted before an answer was lost
            worker.tickets.discard(record.id)
            self.happened["ticket had ended"] += 1
            return
        facts = GroupFacts(
            100,
            10,
            min(label for _, label, _ in spans),
            tuple(SampledBy(name, label, label) for name, label, _ in spans),
        )
        if any(label != weights for _, label, weights in spans):
            self.bad.add(record.id)
        worker.tickets.discard(record.id)
        try:
            self.fleet.check_group(facts, issued.serial)
            decision = tickets.submit(self.ledger, issued, facts)
        except Refusal as refusal:
            self._commit(tickets.fail(self.ledger, issued, f"rejected:{refusal.reason}", retryable=True))
            return
        self.facts[record.id] = facts
        ready = decision.tickets[0].state is TicketState.READY
        self._commit(decision, {record.id: record.id.encode()} if ready else {})

    # The learner, and the fleet that it keeps up to date.

    def _begin(self, life: int) -> None:
        learner = self.learner
        if life != learner.life:
            return
        if self.now < self.queue_from:
            self._soon("learner", 1.0, lambda: self._begin(life))
            return
        resume = bool(learner.session)
        step = max(learner.checkpoints, default=0)
        if resume and step not in learner.checkpoints:
            step = 0
        before = self.ledger.run
        forgotten = self.store.forgotten_after(step) if resume else []
        process = LearnerProcess("here", 1000 + life, float(life))
        begin = BeginSession(step, learner.checkpoints.get(step, 0), 10**9, resume, process=process)
        decision = leases.begin(self.ledger, begin, forgotten)
        version = (decision.run or before).version
        unproven = servers.distrust_unproven(self.fleet, self.ledger, version)
        self._again("learner", lambda: self._begin(life), decision, unproven)
        run = self.ledger.run
        if run.version <= self.versions[-1] and resume:
            raise Broken(f"version {run.version} is used again, after {self.versions[-1]}")
        self.versions.append(run.version)
        undone = [index for of, rows in self.trained.items() if of > step for index in rows]
        self.trained = {of: rows for of, rows in self.trained.items() if of <= step}
        live = {record.index for state in _WAITING for record in self.ledger.tickets(state)}
        if lost := [index for index in undone if index not in live and index not in self.ledger.to_reissue]:
            raise Broken(
                f"I1: rows {lost[:5]} were trained after step {step}, from which the run continues, and are lost"
            )
        learner.session, learner.step, learner.version = run.session, run.step, run.version
        learner.alive, learner.published, learner.lease = True, run.version, learner.lease + 1
        for server in self.servers.values():
            server.failures, server.next_try = 0, 0.0
        self.admission.observe_session()
        self.stepped_at = self.now
        self._soon("learner", 0.5, lambda: self._learn(life))

    def _again(self, what: str, event: Callable[[], None], *parts: Decision) -> None:
        """Commit decisions together; where the answer is lost, ask again as a client does."""
        joined = Decision(
            tuple(record for part in parts for record in part.tickets),
            next((part.run for part in parts if part.run is not None), None),
            tuple(record for part in parts for record in part.servers),
        )
        try:
            self._commit(joined)
        except QueueDown:
            self._soon(what, 1.0, event)
            raise

    def _learn(self, life: int) -> None:
        """Lease groups; with a step's groups, train."""
        learner = self.learner
        if life != learner.life or not learner.alive:
            return
        if learner.held_until > self.now or self.now < self.queue_from:
            wait_s = max(learner.held_until - self.now, 0.5)
            self._soon("learner", wait_s, lambda: self._learn(life))
            return
        lease_id = f"lease-{learner.lease}"
        have = [record.id for record in self.ledger.leased(lease_id)]
        want = B - len(have)
        self._soon("learner", 0.3, lambda: self._learn(life)) if want > 0 else None
        if want > 0:
            if have:
                self.ledger.renew_lease(lease_id, self.now)
            self._commit(leases.lease(self.ledger, self.fleet, lease_id, want, have))
            return
        gone = leases.revoked(self.ledger, self.fleet, lease_id, have)
        version = learner.version
        old = {i for i in have if i not in gone and version - self.facts[i].oldest_version > K}
        dropped = {**gone, **dict.fromkeys(old, "overage")}
        if dropped:
            slow_until = max(server.slow_until for server in self.servers.values())
            if old and self.now - max(self.hurt_until, slow_until) > QUIET_S:
                raise Broken(f"I2: {len(old)} groups are over-age although nothing was hurt for {QUIET_S:g} s")
            self.happened["over-age"] += len(old)
            self._soon("learner", 0.1, lambda: self._learn(life))
            ack = LeaseAck(learner.session, [], dropped=dropped)
            self._commit(leases.ack(self.ledger, self.fleet, ack, self._ended([*dropped])))
            self.admission.observe_ack(lease_id, len(dropped), is_step=False)
            return
        self.ledger.renew_lease(lease_id, self.now)
        self._soon("learner", TRAIN_S, lambda: self._trained(life, lease_id, have))

    def _trained(self, life: int, lease_id: str, batch: list[str]) -> None:
        """A step's weights are made: the queue is told until it has heard."""
        learner = self.learner
        if life != learner.life or not learner.alive:
            return
        if learner.held_until > self.now or self.now < self.queue_from:
            wait_s = max(learner.held_until - self.now, 1.0)
            self._soon("learner", wait_s, lambda: self._trained(life, lease_id, batch))
            return
        for ticket_id in batch:
            if ticket_id in self.bad:
                raise Broken(f"I5: the group of ticket {ticket_id} has tokens of other weights than it says")
            age = learner.version - self.facts[ticket_id].oldest_version
            if not 0 <= age <= K:
                raise Broken(f"I2: a group {age} versions old is trained")
        ack = LeaseAck(learner.session, batch, step=learner.step + 1, version=learner.version + 1)
        decision = leases.ack(self.ledger, self.fleet, ack, self._ended(batch))
        self._again("learner", lambda: self._trained(life, lease_id, batch), decision)
        learner.step, learner.version = learner.step + 1, learner.version + 1
        learner.lease += 1
        if learner.version != self.ledger.run.version:
            raise Broken(f"the queue is at version {self.ledger.run.version}, the learner at {learner.version}")
        if learner.version <= self.versions[-1]:
            raise Broken(f"version {learner.version} is used again, after {self.versions[-1]}")
        self.versions.append(learner.version)
        del self.versions[:-2]
        rows = [int(ticket_id.partition(".")[0]) for ticket_id in batch]
        known = {index for of in self.trained.values() for index in of}
        if twice := known & set(rows):
            raise Broken(f"I1: rows {sorted(twice)} are trained twice")
        self.trained[learner.step] = rows
        self.stepped_at = self.now
        self.happened["optimiser step"] += 1
        self.admission.observe_ack(lease_id, 0, is_step=True)
        self.admission.observe_step(StepFacts(len(batch), 0, 0.0))
        learner.published = learner.version
        self._soon("learner", 0.0, lambda: self._learn(life))
        if learner.step % CHECKPOINT_EVERY == 0:
            self._checkpoint()

    def _checkpoint(self) -> None:
        learner = self.learner
        learner.checkpoints[learner.step] = learner.version
        for old in sorted(learner.checkpoints)[:-3]:
            del learner.checkpoints[old]
        oldest = leases.kept_checkpoints(self.ledger, learner.step)[0]
        first = self.store.first_forgotten_after(oldest)
        for step in [step for step in self.trained if step <= self.ledger.run.pruned_step]:
            del self.trained[step]
        self._commit(leases.checkpointed(self.ledger, learner.step, first, INDICES_KEPT))

    def _ended(self, names: Sequence[str]) -> dict[str, TicketRecord]:
        return dict(self.store.records([name for name in names if self.ledger.get(name) is None]))

    def _look(self, name: str) -> None:
        """The learner looks at a server: as `weight_sync.fleet` does, with its decisions on who is behind."""
        server, learner = self.servers[name], self.learner
        self._soon(f"look at {name}", LOOK_S, lambda: self._look(name))
        if not learner.alive or learner.held_until > self.now:
            return
        self._ask()
        self._mark_stale(server)
        if server.publishes:
            return
        state = self._state(name)
        if self.now < server.alive_from or self.now < server.held_until:
            server.silent_since = self.now if server.silent_since is None else server.silent_since
            if self.now - server.silent_since >= DOWN_AFTER_S and state is not ServerState.DOWN:
                self._put(name, ServerState.DOWN)
            return
        server.silent_since = None
        if server.known_boot != server.boot:
            self._put(name, ServerState.JOINING)
            server.known_boot = server.boot
            return
        if server.paused:
            if state in (ServerState.JOINING, ServerState.DOWN):
                self._put(name, ServerState.SYNCING)
            if self._state(name) is not ServerState.STALE:
                self._put(name, ServerState.STALE)
            return
        fresh = server.label == learner.published == server.weights and state is ServerState.SERVING
        if not fresh and self.now >= server.next_try:
            if state is ServerState.JOINING:
                self._put(name, ServerState.SYNCING)
            version, boot = learner.published, server.boot
            took_s = 300.0 if self.now < server.slow_until else self._between(PUBLISH_S)
            server.took_s, server.publishes, life = took_s, True, learner.life
            if took_s <= TIMEOUT_S:
                self._soon("swap", took_s, lambda: self._swap(name, boot, version, life))
            else:
                self._soon("late", TIMEOUT_S, lambda: self._failed(server))

    def _swap(self, name: str, boot: int, version: int, life: int) -> None:
        """Weights have arrived: they are exchanged under a new label, and then proven."""
        server, learner = self.servers[name], self.learner
        if server.boot != boot or server.paused or life != learner.life or not learner.alive:
            server.publishes = False
            return
        server.label = version
        # What is wrong has much time to be sampled and to come to the queue.
        proof_s = LATE_PROOF_S if server.next_swap_is_wrong else self._between(PROOF_S)
        if not server.next_swap_is_wrong:
            server.weights = version
        server.next_swap_is_wrong = False
        self._soon("proof", proof_s, lambda: self._prove(name, boot, version, life))

    def _prove(self, name: str, boot: int, version: int, life: int) -> None:
        server, learner = self.servers[name], self.learner
        if server.boot != boot or life != learner.life or not learner.alive:
            server.publishes = False
            return
        if self.now < self.queue_from or learner.held_until > self.now or self.now < server.held_until:
            self._soon("proof", 1.0, lambda: self._prove(name, boot, version, life))
            return
        try:
            state = self._state(name)
            if state is not ServerState.SERVING and state is not ServerState.SYNCING:
                self._put(name, ServerState.SYNCING)
            proven = server.weights == version
            self._put(name, ServerState.SERVING if proven else ServerState.QUARANTINED, version)
        except QueueDown:
            self._soon("proof", 1.0, lambda: self._prove(name, boot, version, life))
            raise
        if proven:
            server.failures, server.behind_since, server.publishes = 0, None, False
        else:
            self._failed(server)

    def _failed(self, server: SimServer) -> None:
        server.failures += 1
        server.publishes = False
        server.next_try = self.now + decisions.retry_pause_s(server.failures)

    def _mark_stale(self, server: SimServer) -> None:
        known = {of.name: of for of in self.fleet.servers}
        standings = [
            decisions.Standing(name, known[name].state, known[name].version, of.took_s)
            for name, of in self.servers.items()
        ]
        own = next(of for of in standings if of.name == server.name)
        found = decisions.find_lag(own, standings, self.learner.published, K)
        if found is None:
            server.behind_since = None
            return
        server.behind_since = self.now if server.behind_since is None else server.behind_since
        if found.too_far and self.now - server.behind_since >= found.grace_s:
            self._put(server.name, ServerState.STALE)

    # Faults.

    def _next_strike(self) -> None:
        strike = next(self._schedule, None)
        if strike is not None:
            self._soon("fault", max(0.0, strike.at_s - self.now), lambda: self._strike(strike))

    def _strike(self, strike: Strike) -> None:
        self._next_strike()
        until = self.now + strike.lasts_s
        self.hurt_until = max(self.hurt_until, until + RESTART_S)
        self.happened[strike.fault] += 1
        server = self.servers[f"vllm-{strike.which % SERVERS}"]
        worker = [*self.workers.values()][strike.which % WORKERS]
        match strike.fault:
            case "kill queue" if strike.which % 2:
                self.crash_after_commit = True
            case "kill queue":
                self.queue_from = self.now + 3.0
                self._restart_queue()
            case "stop queue":
                self.queue_from = until
            case "kill worker":
                worker.life += 1
                worker.tickets = set()
                if strike.which % 2:  # it comes back under another name
                    del self.workers[worker.name]
                    worker = SimWorker(f"{worker.name}'")
                    self.workers[worker.name] = worker
                name, life = worker.name, worker.life
                self._soon("worker", RESTART_S, lambda: self._worker(name, life))
            case "stop worker":
                worker.held_until = until
            case "cut link of far worker":
                worker.cut_until = until
            case "kill server":
                server.boot += 1
                server.alive_from, server.label, server.weights, server.paused = self.now + RESTART_S, 0, 0, False
            case "stop server":
                server.held_until = until
            case "pause":
                server.paused = True
                self._soon("resume", strike.lasts_s, lambda: setattr(server, "paused", False))
            case "wrong swap":
                server.next_swap_is_wrong = True
            case "slow link of joined server":
                server.slow_until = self.now + SLOWER * strike.lasts_s
            case "stop learner":
                self.learner.held_until = until
            case "kill learner" | "truncated checkpoint":
                if strike.fault == "truncated checkpoint" and len(self.learner.checkpoints) > 1:
                    del self.learner.checkpoints[max(self.learner.checkpoints)]
                self.learner.life += 1
                self.learner.alive = False
                life = self.learner.life
                self._soon("learner", RESTART_S, lambda: self._begin(life))
            case "two learners":
                self._second_learner()
            case _:
                raise AssertionError(f"{strike.fault} cannot be done in simulated time")

    def _second_learner(self) -> None:
        """One that looked before the run's own began is refused, and changes nothing."""
        run = self.ledger.run
        if run.session == 0:
            return
        process = LearnerProcess("there", 7, 7.0)
        begin = BeginSession(run.step, run.version, 10**9, resume=True, process=process, after=run.session - 1)
        try:
            leases.begin(self.ledger, begin, [])
        except Refusal:
            return
        raise Broken("a second learner took the run from one that lives")

    # What must always hold.

    def _check(self) -> None:
        counts = self.ledger.summary()
        if counts.issued != counts.trained + counts.dropped + counts.reissued + counts.outstanding:
            raise Broken(f"I1: the sums do not agree: {counts}")
        queue = CONFIG.queue
        if self.ledger.outstanding > queue.capacity_groups or self.ledger.bytes > queue.capacity_bytes:
            raise Broken("I3: more is held than there is room for")
        if (held := next(iter(self.ledger.tickets(TicketState.ISSUED)), None)) is not None:
            age = self.now - max(self.taken_at.get(held.id, self.now), self.restarted_at, self.queue_from)
            if age > CONFIG.ticket_max_age_s + 5:
                raise Broken(f"ticket {held.id} of {held.worker_id} is held for ever: for {age:.0f} s")
        idle = self.now - max(self.stepped_at, self.hurt_until)
        if idle > QUIET_S:
            states = {of.name: of.state for of in self.fleet.servers}
            raise Broken(f"no step for {idle:.0f} s, and nothing was hurt meanwhile: {counts}, {states}")


def endless(seed: int) -> Iterator[Strike]:
    """Yield strikes without end, one schedule after another."""
    for cycle in count():
        for strike in draw(seed + 10_007 * cycle, HURT_S, EVERY_S, possible("simulated")):
            yield replace(strike, at_s=strike.at_s + CYCLE_S * cycle)


_WAITING = (TicketState.ISSUED, TicketState.READY, TicketState.LEASED)
