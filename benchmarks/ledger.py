"""Times the ledger's decisions at several sizes, in one process without a store, and prints microseconds as JSON.

    python benchmarks/ledger.py [--rounds 41]

Each operation is what the broker does in memory for one request: decide, add the ends of evaluations, apply.

issue: One ticket for a worker: look for undelivered ones, for evaluations, for rows to issue again.
submit, fail: One group, and one ticket that failed.
lease, ack: 64 groups.
heartbeat: Renewals of 64 tickets.
expire: A look for what is late while nothing is, and for the next deadline.
with_ends: The part of a commit that ends evaluations, while none is open.
fleet: What a poll reads of the fleet: served version, whether its servers serve, the encoded list.
publish: One server proves a further version.
quarantine: One server fails its proof. It is the one operation that may grow, with the groups that it taints.

Sizes: tickets ever issued (kept as sums), ready groups, workers (each holds four tickets), servers.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import NamedTuple, TypeVar

from slipstream.protocol.messages import BeginSession, LeaseAck, Server, ServerState
from slipstream.rollout_queue.ledger import evaluations, leases, servers, tickets
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import (
    Decision,
    GroupFacts,
    RunState,
    SampledBy,
    StoreContents,
    TicketRecord,
    TicketState,
)
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry
from tests.kit import config

T = TypeVar("T")

LEASE, TICKETS_PER_WORKER, VERSION = 64, 4, 4


class Sizes(NamedTuple):
    """Size of a queue."""

    issued: int = 0
    ready: int = 0
    workers: int = 1
    servers: int = 1


CASES = (
    Sizes(),
    *(Sizes(issued=count) for count in (100_000, 1_000_000)),
    *(Sizes(ready=count) for count in (1_000, 10_000)),
    Sizes(workers=2_000),
    Sizes(servers=200),
    Sizes(1_000_000, 10_000, 2_000, 200),
)


class Bench:
    """A ledger of one size, and what each round of its operations cost: their times in nanoseconds."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.random, self.now = sizes, random.Random(0), 0.0
        self.costs: defaultdict[str, list[int]] = defaultdict(list)
        contents = StoreContents(
            run=RunState(pruned_below=sizes.issued),
            next_index=sizes.issued,
            counts={TicketState.FORGOTTEN: sizes.issued},
        )
        settings = config(queue={"ticket_attempts": 10**9, "capacity_bytes": 10**12})
        self.ledger, self.fleet = Ledger(settings, contents, self.now), ServerRegistry()
        self.commit(leases.begin(self.ledger, BeginSession(0, 0, 10**9, resume=bool(sizes.issued)), []))
        for number in range(sizes.servers):
            for state in (ServerState.JOINING, ServerState.SYNCING, ServerState.SERVING):
                self.put(number, state, VERSION)
        for number in range(sizes.workers):
            self.issue(f"w{number}", TICKETS_PER_WORKER)
        for record in self.issue("w0", sizes.ready):
            self.submit(record)

    def commit(self, decision: Decision) -> Decision:
        decision = evaluations.with_ends(self.ledger, self.fleet, decision, 0.0)
        self.ledger.apply(decision, self.now)
        for server in decision.servers:
            self.fleet.apply(server)
        return decision

    def measured(self, name: str, operation: Callable[[], T]) -> T:
        start = time.perf_counter_ns()
        result = operation()
        self.costs[name].append(time.perf_counter_ns() - start)
        return result

    def put(self, number: int, state: ServerState, version: int) -> None:
        server = Server(f"vllm-{number}", f"http://10.0.0.{number}:8000", state, version)
        self.commit(servers.put(self.fleet, self.ledger, server, 0.0))

    def issue(self, worker: str, count: int = 1) -> tuple[TicketRecord, ...]:
        ledger = self.ledger
        tickets.undelivered(ledger, worker, [])
        asking = evaluations.asking(ledger.config, ledger.run, worker, count, 64)
        evaluations.issue(ledger, self.fleet.served_version, asking)
        return self.commit(tickets.issue(ledger, worker, count)).tickets

    def submit(self, record: TicketRecord) -> None:
        version = self.random.randrange(VERSION + 1)
        sampled = SampledBy(f"vllm-{record.index % self.sizes.servers}", version, VERSION)
        facts = GroupFacts(1000, 100, version, (sampled,))
        self.fleet.check_group(facts, record.serial)
        self.commit(tickets.submit(self.ledger, record, facts))

    def ack(self, trained: list[str]) -> None:
        run = self.ledger.run
        message = LeaseAck(run.session, trained, step=run.step + 1, version=run.version + 1)
        self.commit(leases.ack(self.ledger, self.fleet, message, {}))

    def renew(self, records: tuple[TicketRecord, ...]) -> None:
        for record in records:
            self.ledger.renew_ticket(record.id, self.now)

    def expire(self) -> None:
        assert not self.commit(tickets.expire(self.ledger, self.now))
        self.ledger.next_deadline(self.now)

    def read_fleet(self) -> None:
        fleet = self.fleet
        assert fleet.served_version is not None
        assert fleet.all_serve(["vllm-0"])

    def round(self, number: int) -> None:
        """Do each operation, and leave the sizes as they were."""
        self.now += 0.001
        (first,) = self.measured("issue", lambda: self.issue("w0"))
        held = (first, *self.issue("w0", LEASE - 1))
        self.measured("heartbeat", lambda: self.renew(held))
        self.measured("expire", self.expire)
        self.measured("fleet", self.read_fleet)
        (lost,) = self.issue("w0")
        failed = self.measured("fail", lambda: self.commit(tickets.fail(self.ledger, lost, "failed:server", True)))
        self.measured("with_ends", lambda: evaluations.with_ends(self.ledger, self.fleet, failed, 0.0))
        self.measured("submit", lambda: self.submit(first))
        for record in held[1:]:
            self.submit(record)
        leased = self.measured(
            "lease", lambda: self.commit(leases.lease(self.ledger, self.fleet, f"l{number}", LEASE))
        ).tickets
        assert len(leased) == LEASE
        self.measured("ack", lambda: self.ack([record.id for record in leased]))
        self.measured("publish", lambda: self.put(0, ServerState.SERVING, VERSION + 1 + number))

    def quarantine(self) -> None:
        self.measured("quarantine", lambda: self.put(0, ServerState.QUARANTINED, VERSION))


def measure(sizes: Sizes, rounds: int) -> dict[str, float]:
    """Return the median time of each operation, microseconds."""
    bench = Bench(sizes)
    gc.collect()
    gc.disable()
    for number in range(rounds):
        bench.round(number)
    bench.quarantine()
    gc.enable()
    return {name: round(median(times) / 1000, 1) for name, times in bench.costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    measure(Sizes(), 3)  # Warms caches up.
    found = {sizes: measure(sizes, rounds) for sizes in CASES}
    report = {
        "us": [{**sizes._asdict(), **of_it} for sizes, of_it in found.items()],
        "growth": {
            name: round(max(of_it[name] for of_it in found.values()) / found[CASES[0]][name], 2)
            for name in found[CASES[0]]
        },
    }
    json.dump(report, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
