"""Compares `task.order = "learnable"` with `"shuffled"` on a model of learning, through the queue's own ledger.

    python -m benchmarks.row_order [--rows 600] [--seeds 3] [--goal 0.75]

The policy has a skill for each of ten topics. A row of topic t and difficulty d succeeds with probability
sigmoid(skill of t - d). Difficulties are normal with standard deviation 6, so that at the start two thirds of the rows
almost always or almost never succeed. A step trains 8 groups of 8 rollouts by the policy gradient with the group's mean
as baseline, over the group's standard deviation; groups whose rewards are all equal are dropped and replaced. Tickets,
estimates, drops and steps are the ledger's, and groups are sampled by the policy of the step before.

Prints for each seed the steps and the sampled tokens (100 a rollout) until the mean success over held-out rows has
grown to `--goal`, and their ratios.
"""

from __future__ import annotations

import argparse
import json
from statistics import fmean

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.protocol import reasons
from slipstream.protocol.messages import BeginSession, Fingerprint, LeaseAck, Server, ServerState
from slipstream.rollout_queue.ledger import leases, servers, tickets
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import (
    Decision,
    GroupFacts,
    RowOutcome,
    SampledBy,
    StoreContents,
    TicketRecord,
)
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry
from slipstream.rollout_worker.data.rows import permutation
from tests.kit import config
from tests.kit.messages import SERVER

TOPICS, GROUPS_PER_STEP, GROUP_SIZE, TOKENS = 10, 8, 8, 100
RATE, MAX_STEPS = 0.04, 3000

_Floats = npt.NDArray[np.float64]


class Policy:
    """The model of learning."""

    def __init__(self, rows: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.skill = np.zeros(TOPICS)
        self.topic = self.random.integers(0, TOPICS, 2 * rows)
        self.difficulty = self.random.normal(0, 6, 2 * rows)
        self.rows = rows

    def success(self) -> _Floats:
        """Return the success of each row, the second half of which is held out."""
        return np.asarray(1 / (1 + np.exp(self.difficulty - self.skill[self.topic])))

    def sample(self, row: int) -> _Floats:
        return (self.random.random(GROUP_SIZE) < self.success()[row]).astype(np.float64)

    def learn(self, groups: list[tuple[int, _Floats]]) -> None:
        """Make one step of the policy gradient: the gradient of the log-probability of a reward r is r - p."""
        success, change = self.success(), np.zeros(TOPICS)
        for row, rewards in groups:
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            change[self.topic[row]] += float((advantages * (rewards - success[row])).mean())
        self.skill += RATE * change / GROUPS_PER_STEP * TOPICS


class Run:
    """A run of the ledger over the model."""

    def __init__(self, order: str, rows: int, seed: int) -> None:
        self.policy = Policy(rows, seed)
        settings = config(
            run={"seed": seed},
            task={"order": order},
            rollout={"group_size": GROUP_SIZE},
            learner={"groups_per_step": GROUPS_PER_STEP},
        )
        self.ledger, self.fleet = Ledger(settings, StoreContents(), 0.0), ServerRegistry()
        self.apply(leases.begin(self.ledger, BeginSession(0, 0, MAX_STEPS, resume=False), []))
        data = Fingerprint("1", "t", "c", {}, rows=rows)
        self.apply(Decision(run=msgspec.structs.replace(self.ledger.run, data=data)))
        for state in (ServerState.JOINING, ServerState.SYNCING, ServerState.SERVING):
            self.apply(servers.put(self.fleet, self.ledger, Server(SERVER, "http://s", state, 0), 0.0))
        self.groups: dict[str, tuple[int, _Floats]] = {}

    def apply(self, decision: Decision) -> tuple[TicketRecord, ...]:
        self.ledger.apply(decision, 0.0)
        for server in decision.servers:
            self.fleet.apply(server)
        return decision.tickets

    def row_of(self, record: TicketRecord) -> int:
        if record.row is not None:
            return record.row
        epoch, place = divmod(record.index, self.policy.rows)
        return int(permutation(self.policy.rows, self.ledger.config.run.seed, epoch)[place])

    def produce(self) -> None:
        """Let a step's groups come in."""
        for record in self.apply(tickets.issue(self.ledger, "w", GROUPS_PER_STEP)):
            row = self.row_of(record)
            rewards = self.policy.sample(row)
            self.groups[record.id] = row, rewards
            facts = GroupFacts(100, GROUP_SIZE * TOKENS, 0, (SampledBy(SERVER, 0, 0),))
            outcome = RowOutcome(float(rewards.mean()), float(rewards.var(ddof=1)))
            self.apply(tickets.submit(self.ledger, record, facts, outcome))

    def step(self) -> None:
        """Lease groups until a step is full, and train it."""
        trained: list[str] = []
        dropped: dict[str, str] = {}
        while len(trained) < GROUPS_PER_STEP:
            taken = self.apply(leases.lease(self.ledger, self.fleet, "l", GROUPS_PER_STEP - len(trained)))
            for record in taken:
                if np.ptp(self.groups[record.id][1]):
                    trained.append(record.id)
                else:
                    dropped[record.id] = reasons.ZERO_VARIANCE
            if not taken:
                self.produce()
        run = self.ledger.run
        message = LeaseAck(run.session, trained, dropped, run.step + 1, run.version + 1)
        self.apply(leases.ack(self.ledger, self.fleet, message, {}))
        self.produce()  # by the policy before the step
        self.policy.learn([self.groups[name] for name in trained])
        for name in (*trained, *dropped):
            del self.groups[name]

    def until(self, goal: float) -> dict[str, float]:
        held_out = slice(self.policy.rows, None)
        began = float(self.policy.success()[held_out].mean())
        success = self.policy.success()[: self.policy.rows]
        while (now := float(self.policy.success()[held_out].mean())) < goal and self.ledger.run.step < MAX_STEPS:
            self.step()
        return {
            "steps": self.ledger.run.step,
            "tokens": self.ledger.tokens_sampled,
            "taught_nothing": round(sum(self.ledger.tokens_dropped.values()) / self.ledger.tokens_sampled, 3),
            "success_at_start": round(began, 3),
            "success": round(now, 3),
            "too_hard_or_easy_at_start": round(float(np.mean((success < 0.05) | (success > 0.95))), 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--goal", type=float, default=0.75)
    options = parser.parse_args()
    ratios = []
    for seed in range(options.seeds):
        found = {order: Run(order, options.rows, seed).until(options.goal) for order in ("shuffled", "learnable")}
        ratios.append(found["learnable"]["tokens"] / found["shuffled"]["tokens"])
        print(json.dumps({"seed": seed, **found, "tokens_ratio": round(ratios[-1], 3)}))
    print(json.dumps({"tokens_ratio_mean": round(fmean(ratios), 3), "tokens_ratio_worst": round(max(ratios), 3)}))


if __name__ == "__main__":
    main()
