"""Evaluations where the learner dies: queue and worker are processes, vLLM is a fake, the learner follows a script."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slipstream.protocol import codec
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import RunConfig, fingerprint, to_toml
from slipstream.protocol.messages import BeginSession, Group, LeaseAck, LeaseRequest, Server, ServerState
from slipstream.protocol.status import Evaluation, EvaluationRequest
from slipstream.protocol.versions import label_of
from tests.kit import WORKER, config
from tests.kit.fake_vllm import FakeVllm
from tests.kit.fake_vllm import serving as serving_vllm
from tests.kit.fake_vllm.policies import scripted
from tests.kit.fake_vllm.tokenizer import save_model_folder
from tests.kit.ports import free_port
from tests.kit.supervised import Processes, processes
from tests.kit.worker import TOKENIZER, fake, until

B, STEPS, ROWS = 2, 4, 3
# Rows of the evaluation have no reward until the file is there, so that evaluations stay open.
TASK = f"""
import asyncio
from pathlib import Path
from slipstream.rollout_worker.task.task import Task

OPEN = Path(__file__).with_name("open")

async def reward(completions, kind, number, **columns):
    while kind[0] == "eval" and not OPEN.exists():
        await asyncio.sleep(0.02)
    return [float(one) for one in number]

def row(kind, number):
    return {{"prompt": [{{"role": "user", "content": f"{{kind}} {{number}}"}}], "kind": kind, "number": number}}

def rows(kind, count):
    return [row(kind, number) for number in range(count)]

task = Task(dataset=rows("train", 50), eval_dataset=rows("eval", {ROWS}), rewards=[reward])
"""


def run_of(folder: Path, vllm: str) -> RunConfig:
    save_model_folder(folder / "model")
    (folder / "task.py").write_text(TASK)
    return config(
        WORKER,
        run={"dir": str(folder), "name": "run"},
        model={"path": str(folder / "model")},
        task={"path": f"{folder / 'task.py'}:task"},
        queue={"port": free_port(), "lease_timeout_s": 5.0},
        worker={"episodes": 8},
        eval={"every": 1, "share": 0.5},
        learner={"groups_per_step": B, "steps": STEPS},
        vllm={"servers": [vllm]},
    )


@dataclass
class Learner:
    """One session; whoever makes another has killed it, with all that it holds."""

    client: QueueClient
    vllm: FakeVllm
    url: str
    session: int = 0
    step: int = 0
    version: int = 0
    trained: dict[int, set[str]] = field(default_factory=dict)
    have: dict[str, Group] = field(default_factory=dict)

    async def begin(self, run: RunConfig, step: int, version: int, resume: bool) -> None:
        declared = fingerprint.of(run, TOKENIZER)
        place = await self.client.begin_session(BeginSession(step, version, STEPS, resume, declared))
        self.session, self.step, self.version = place.session, place.step, place.version
        await self.publish()

    async def publish(self) -> None:
        self.vllm.engine.weight_version = label_of((await self.client.position()).run, self.version)
        for state in (ServerState.JOINING, ServerState.SYNCING, ServerState.SERVING):
            version = self.version if state is ServerState.SERVING else None
            await self.client.put_server(Server("vllm-0", self.url, state, version), self.session)

    async def lease(self) -> None:
        """A whole step's groups."""
        self.have = {}
        while len(self.have) < B:
            request = LeaseRequest(self.session, self._lease, B - len(self.have), list(self.have), wait_s=5.0)
            for data in (await self.client.lease(request)).groups:
                group = codec.decode(bytes(data), Group)
                self.have[group.ticket_id] = group

    async def train(self) -> None:
        await self.lease()
        done = LeaseAck(self.session, list(self.have), step=self.step + 1, version=self.version + 1)
        place = await self.client.ack(self._lease, done)
        self.step, self.version = place.step, place.version
        self.trained[self.step] = set(self.have)
        await self.publish()

    async def evaluate(self) -> dict[int, Evaluation]:
        """Ask for the evaluation of this step; all that there are, by their steps."""
        asked = EvaluationRequest(self.session, self.step, self.version, None, 2, 0.5, 300.0)
        return by_step(await self.client.evaluate(asked))

    @property
    def _lease(self) -> str:
        return f"{self.session}-{self.step}"


def by_step(evaluations: list[Evaluation]) -> dict[int, Evaluation]:
    found = {evaluation.step: evaluation for evaluation in evaluations}
    assert len(found) == len(evaluations), "a step has one evaluation"
    return found


def prompts_of(group: Group) -> str:
    return "".join(TOKENIZER.decode(segment.token_ids) for rollout in group.rollouts for segment in rollout.segments)


def asked_for_evaluations(vllm: FakeVllm) -> bool:
    """A worker is at rows of them."""
    return any("eval" in TOKENIZER.decode(request["token_ids"]) for request in vllm.requests)


def test_a_learner_that_is_killed_within_evaluations_finds_them_and_each_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies with two that last and one of a step that it makes again, and with a lease; the queue and the worker that
    is at the rows do not."""
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    with processes(tmp_path / "logs") as started:
        asyncio.run(story(tmp_path, started))


async def story(folder: Path, started: Processes) -> None:
    def answers(text: str, index: int) -> str:
        return f"I say {index}"

    vllm = fake(scripted(TOKENIZER, answers), version=0)
    async with serving_vllm(vllm) as url:
        run = run_of(folder, url)
        run_file = folder / "run.toml"
        run_file.write_text(to_toml(run))
        started.slipstream("queue", "queue", str(run_file))
        started.slipstream("worker", "worker", str(run_file), "--name", "w1")
        async with QueueClient(run.queue.address, patience_s=60.0) as client, asyncio.timeout(240.0):
            first = Learner(client, vllm, url)
            await first.begin(run, 0, 0, resume=False)
            await first.train()
            await first.evaluate()
            await first.train()
            await first.evaluate()
            await client.checkpointed(first.session, first.step)
            await first.train()
            assert list(await first.evaluate()) == [1, 2, 3]
            await until(lambda: asked_for_evaluations(vllm), timeout_s=60.0)
            await first.lease()

            second = Learner(client, vllm, url)
            await second.begin(run, 2, 2, resume=True)
            found = by_step(await client.evaluations())
            assert list(found) == [1, 2], "what it asked for at step 3 it will ask for again"
            assert [one.ended for one in found.values()] == [None, None]
            assert list(await second.evaluate()) == [1, 2]
            await second.train()
            assert list(await second.evaluate()) == [1, 2, 3]

            (folder / "open").touch()
            await second.train()
            found = await ended(client)
            status = await client.status()
            await client.finish(second.session)
        code = await asyncio.to_thread(started.wait, "worker", started.logged)
        assert code == 0, started.logs()
    for step, evaluation in found.items():
        assert (evaluation.ended, evaluation.rows, evaluation.done, evaluation.failed) == ("complete", ROWS, ROWS, 0)
        assert (evaluation.rollouts, evaluation.reward) == (2 * ROWS, 1.0), step
        assert evaluation.versions is not None
        assert evaluation.versions[0] >= evaluation.version
    assert "eval" not in "".join(prompts_of(group) for group in (*first.have.values(), *second.have.values()))
    kept = {step: tickets for step, tickets in first.trained.items() if step <= 2} | second.trained
    assert list(kept) == [1, 2, 3, 4]
    assert len(set().union(*kept.values())) == STEPS * B, "no group is trained twice (I1)"
    counts = status.ledger
    assert counts.issued == counts.trained + counts.dropped + counts.reissued + counts.outstanding
    temperatures = {
        ("eval" in TOKENIZER.decode(request["token_ids"]), request["sampling_params"]["temperature"])
        for request in vllm.requests
    }
    assert temperatures == {(True, 0.5), (False, run.rollout.temperature)}


async def ended(client: QueueClient) -> dict[int, Evaluation]:
    """All evaluations, once none is open."""
    while any(one.ended is None for one in await client.evaluations(wait_s=1.0)):
        pass
    return by_step(await client.evaluations())
