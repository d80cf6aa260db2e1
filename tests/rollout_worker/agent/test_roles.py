"""Several roles in one episode: the policy plays some, each trained by its own reward; other models play the rest."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from slipstream import Endpoint, Task, UntrainedModel
from slipstream.learner.algorithm import advantages
from slipstream.learner.algorithm.step_data import StepRollouts
from slipstream.learner.feed.judged_groups import step_rollouts
from slipstream.protocol import codec, reasons
from slipstream.protocol.config import ConfigError, LearnerSection
from slipstream.protocol.messages import MAX_ROLES, Group, Rollout
from slipstream.rollout_queue.ledger import validation
from slipstream.rollout_queue.ledger.records import Refusal, TicketRecord
from tests import kit
from tests.kit import segment
from tests.kit.agent import client_of
from tests.kit.fake_openai import FakeOpenAI
from tests.kit.fake_vllm.policies import scripted
from tests.kit.worker import TOKENIZER, fake, roll

CONFIG = kit.config(kit.WORKER, rollout={"group_size": 4}, worker={"episode_timeout_s": 60.0})
SOLVER, CRITIC = "You solve.", "You find mistakes."


def playing(text: str, index: int) -> str:
    """Answers as its system prompt says."""
    return "408" if SOLVER in text else "right" if CRITIC in text else "who am I?"


async def said(endpoint: Endpoint, text: str) -> str:
    async with client_of(endpoint) as client:
        reply = await client.ask([{"role": "user", "content": text}])
    assert reply.status == 200, reply.body
    return str(reply.message["content"])


async def debate(endpoints: dict[str, Endpoint], question: str) -> dict[str, Any]:
    answer = await said(endpoints["solver"], question)
    verdict = await said(endpoints["critic"], f"{question} {answer}?")
    judged = await said(endpoints["judge"], f"{question} {answer} {verdict}")
    return {"solver": float(judged), "critic": -float(judged), "letters": len(answer), "verdict": verdict}


def rows(**columns: Any) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": "?"}], "question": "12 times 34?", **columns}]


async def test_i4_each_trained_role_has_rollouts_of_its_own_and_a_judge_has_none() -> None:
    judge = FakeOpenAI(lambda messages: str(len(judge.requests) % 2))
    async with judge.serving() as base_url:
        task = Task(
            dataset=rows(),
            agent=debate,
            agents={"solver": SOLVER, "critic": CRITIC, "judge": UntrainedModel(base_url, "judge")},
        )
        run = await roll(task, fake(scripted(TOKENIZER, playing)), config=CONFIG)
    assert run.queue.failures == {}
    assert run.worker.report().episodes_done == 4, "an episode of several roles is one"
    assert len(judge.requests) == 4
    assert {request.body["model"] for request in judge.requests} == {"judge"}
    assert Counter(rollout.role for rollout in run.rollouts) == {"solver": 4, "critic": 4}
    for rollout in run.rollouts:
        role = str(rollout.role)
        (one,) = rollout.segments
        asked, answered = ({"solver": (SOLVER, "408"), "critic": (CRITIC, "right")})[role]
        # What the role sampled trains; its system prompt, and what others said, is context.
        assert TOKENIZER.decode(one.token_ids[one.loss_mask], skip_special_tokens=True) == answered
        assert asked in TOKENIZER.decode(one.token_ids[~one.loss_mask])
        assert rollout.turns == 1
        assert rollout.metrics["letters"] == 3.0
        assert rollout.extra["verdict"] == "right"
        other = "critic" if role == "solver" else "solver"
        assert rollout.reward_components == {role: rollout.reward, other: None}
    by_role = {role: sorted(each.reward for each in run.rollouts if each.role == role) for role in ("solver", "critic")}
    assert by_role == {"solver": [0.0, 0.0, 1.0, 1.0], "critic": [-1.0, -1.0, 0.0, 0.0]}


async def test_an_own_system_message_stays() -> None:
    async def agent(endpoints: dict[str, Endpoint]) -> dict[str, float]:
        async with client_of(endpoints["solver"]) as client:
            await client.ask([{"role": "system", "content": CRITIC}, {"role": "user", "content": "?"}])
        return {"solver": 1.0}

    run = await roll(
        Task(dataset=rows(), agent=agent, agents={"solver": SOLVER}), fake(scripted(TOKENIZER, playing)), config=CONFIG
    )
    texts = [TOKENIZER.decode(rollout.segments[0].token_ids) for rollout in run.rollouts]
    assert len(texts) == 4
    assert all(CRITIC in text and SOLVER not in text for text in texts)


async def test_a_role_that_spoke_in_one_episode_alone_leaves_the_group() -> None:
    spoke = []

    async def agent(endpoints: dict[str, Endpoint], question: str) -> dict[str, float]:
        await said(endpoints["solver"], question)
        if not spoke:
            spoke.append(True)
            await said(endpoints["critic"], question)
        return {"solver": 1.0, "critic": 1.0}

    task = Task(dataset=rows(), agent=agent, agents={"solver": SOLVER, "critic": CRITIC})
    run = await roll(task, fake(scripted(TOKENIZER, playing)), config=CONFIG)
    assert [rollout.role for rollout in run.rollouts] == ["solver"] * 4
    assert run.worker.report().failures[reasons.ROLE_ALONE] == 1


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (1.0, "returned a float; return a dict with the reward of each role: {'solver': 0.0}"),
        ({"critic": 1.0}, "return a dict with the reward of each role"),
        ({"solver": float("nan")}, "the reward of 'solver' as nan"),
        ({"solver": "good"}, "'solver': a str; give that role's reward"),
        ({"solver": 1.0, "reward": 1.0}, "name the role that gets it"),
        ({"solver": None}, "no reward of it"),
    ],
)
async def test_what_names_no_reward_of_a_role_is_said(returned: Any, says: str, caplog: Any) -> None:
    async def agent(endpoints: dict[str, Endpoint], question: str) -> Any:
        await said(endpoints["solver"], question)
        return returned

    run = await roll(
        Task(dataset=rows(), agent=agent, agents={"solver": SOLVER}), fake(scripted(TOKENIZER, playing)), config=CONFIG
    )
    (failure,) = run.queue.failures.values()
    assert says in f"{failure.detail} {' '.join(caplog.messages)}"


async def nobody(endpoint: Endpoint) -> None:
    """Takes one endpoint alone."""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"agents": {}}, "give a dict of roles by name"),
        ({"agents": ["solver"]}, "give a dict of roles by name"),
        ({"agents": {"": SOLVER}}, "name each role by a word"),
        ({"agents": {"a b/c\n": SOLVER}}, "name each role by a word"),
        ({"agents": {"a": None, "judge": UntrainedModel("http://x/v1", "")}}, "model = ''; give the name that"),
        ({"agents": {"solver": 3}}, "a int is no role"),
        ({"agents": {"judge": UntrainedModel("http://x/v1", "m")}}, "no role is trained"),
        ({"agents": {"a": None, "judge": UntrainedModel("x", "m")}}, "base_url = 'x' is no address"),
        ({"agents": {str(number): None for number in range(MAX_ROLES + 1)}}, "at most 16"),
        ({"agent": nobody}, "takes no 'endpoints'"),
        ({"agent": None}, "without an agent"),
        ({"rewards": [lambda completions, **_: [0.0]]}, "leave out rewards"),
        ({"dataset": rows(endpoints=1)}, "'endpoints' is a name that agents already get"),
    ],
)
def test_what_cannot_be_played_is_said_at_load(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Task(**{"dataset": rows(), "agent": debate, "agents": {"solver": SOLVER}, **changes})


async def test_a_key_that_is_not_set_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = UntrainedModel("http://127.0.0.1:9/v1", "judge", "JUDGE_KEY")
    task = Task(dataset=rows(), agent=debate, agents={"solver": SOLVER, "judge": judge})
    with pytest.raises(ConfigError, match=r"JUDGE_KEY.*the variable is not set"):
        await roll(task, fake(), config=CONFIG)


def group(*roles: tuple[str, float]) -> Group:
    """Return a group with a rollout for each role and reward."""
    pattern = (None, None, 4, 4, 4)
    rollouts = [
        Rollout([segment(pattern, seed)], reward, "stop", {role: reward}, role=role)
        for seed, (role, reward) in enumerate(roles)
    ]
    return Group("3.1", 3, 0, rollouts, "w", [kit.messages.SERVER], 1.0, 2.0)


RULES = validation.Rules(2, 5)
RECORD = TicketRecord(index=3, attempt=1, serial=9, worker_id="w", version=4)


def test_the_queue_takes_a_group_of_each_role() -> None:
    two = group(("solver", 1.0), ("critic", 0.0), ("solver", 0.0), ("critic", 5.0))
    read = validation.read(codec.encode(two), RECORD, RULES).group
    assert read.by_role() == {"solver": [0, 2], "critic": [1, 3]}


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        (["solver", "solver", "critic"], "1 rollouts of the role critic, allowed are 2 to 2"),
        (["solver", "solver", "solver", "critic", "critic"], "3 rollouts of the role solver, allowed are 2 to 2"),
        ([str(number) for number in range(MAX_ROLES + 1)] * 2, "17 roles"),
        (["x" * 300] * 2, "a role"),
    ],
)
def test_the_queue_refuses_a_role_of_another_size(roles: list[str], says: str) -> None:
    with pytest.raises(Refusal, match=says):
        validation.read(codec.encode(group(*((role, 0.0) for role in roles))), RECORD, RULES)


def test_a_group_without_roles_is_written_as_before() -> None:
    assert b"role" not in codec.encode(kit.group())


def step(*groups: Group) -> StepRollouts:
    return step_rollouts(groups, [np.full(len(each.rollouts), 3) for each in groups])


TWO = group(("solver", 1.0), ("critic", 10.0), ("solver", 0.0), ("critic", 30.0))


def test_advantages_compare_a_role_with_itself_alone() -> None:
    """Worked by hand: of two, each is the distance from the other: 1 - 0, 10 - 30."""
    rloo = advantages.build(LearnerSection(advantage="rloo"))
    assert rloo(step(TWO)).tolist() == [1.0, -20.0, -1.0, 20.0]
    # Next to a group without roles, whose rewards are compared with each other.
    plain = kit.group(rewards=(3.0, 7.0))
    assert rloo(step(plain, TWO)).tolist() == [-4.0, 4.0, 1.0, -20.0, -1.0, 20.0]


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_a_role_without_variance_gets_no_gradient_beside_one_with_some(name: str) -> None:
    rollouts = step(group(("solver", 1.0), ("critic", 2.0), ("solver", 1.0), ("critic", 3.0)))
    found = advantages.build(LearnerSection(advantage=name))(rollouts)  # type: ignore[arg-type]
    assert found[[0, 2]].tolist() == [0.0, 0.0]
    assert found[1] < 0 < found[3]


def test_a_group_is_flat_where_each_role_is() -> None:
    flat = group(("solver", 1.0), ("critic", 2.0), ("solver", 1.0), ("critic", 2.0))
    grpo = advantages.build(LearnerSection(advantage="grpo"))
    assert grpo.stays_flat(step(flat))
    assert not grpo.stays_flat(step(TWO))
