"""Classifiers as rewards, scored by a pooling server of vLLM."""

import asyncio
import importlib.util
import json

import pytest

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.task.reward_base import RewardBatch, RewardError
from slipstream.rollout_worker.task.reward_classifier import TEXTS
from slipstream.rollout_worker.task.rewards import RewardFunctions, build_rewards
from slipstream.rollout_worker.task.task import Task
from tests.kit import config
from tests.kit.fake_pooling import FakePooling
from tests.kit.worker import accuracy

MODEL = "org/reward-model"
PROMPT = [{"role": "user", "content": "2 by 3"}]
CALLING = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}],
    },
    {"role": "tool", "name": "multiply", "content": "6"},
    {"role": "assistant", "content": "six"},
]
CHAT = RewardBatch(PROMPT, [CALLING, [{"role": "assistant", "content": "seven"}]], [[6], [7]], {"prompt": PROMPT})


def texts(count):
    return RewardBatch("2 by 3 is ", [f"{n}" for n in range(count)], [[n] for n in range(count)], {"prompt": "2 by 3"})


def last_length(messages):
    return [float(len(messages[-1]["content"]))]


async def at_once(seconds):
    pass


def rewards_at(url, **options):
    return RewardFunctions([MODEL], servers={MODEL: url}, sleep=at_once, **options)


async def test_a_conversation_is_scored_by_its_logit_with_its_calls_as_the_api_writes_them():
    server = FakePooling(last_length)
    async with server.serving() as url:
        scores = await rewards_at(url).score(CHAT)
    assert [score.components for score in scores] == [{"reward-model": 3.0}, {"reward-model": 5.0}]
    assert [body["use_activation"] for body in server.requests] == [False, False]
    body = next(body for body in server.requests if len(body["messages"]) == 4)
    assert body["messages"][0] == PROMPT[0]
    (call,) = body["messages"][1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
    assert call["id"]
    assert CALLING[0]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 3}


async def test_texts_go_in_batches_and_come_back_in_order():
    server = FakePooling(lambda text: [float(text.split()[-1])])
    async with server.serving() as url:
        scores = await rewards_at(url).score(texts(2 * TEXTS + 1))
    assert [score.reward for score in scores] == [float(n) for n in range(2 * TEXTS + 1)]
    assert len(server.requests) == 3
    assert server.requests[0]["add_special_tokens"] is False


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
async def test_vllm_0_32_accepts_the_requests():
    """Its own request models, without an engine."""
    from pydantic import TypeAdapter
    from vllm.entrypoints.pooling.classify.protocol import (
        ClassificationChatRequest,
        ClassificationCompletionRequest,
        ClassificationRequest,
        ClassificationResponse,
    )

    server = FakePooling(lambda asked: [1.0])
    async with server.serving() as url:
        await rewards_at(url).score(CHAT)
        await rewards_at(url).score(texts(2))
    *chats, text = [TypeAdapter(ClassificationRequest).validate_python(body) for body in server.requests]
    assert [type(request) for request in chats] == [ClassificationChatRequest] * 2
    assert type(text) is ClassificationCompletionRequest
    assert not any(request.use_activation or request.add_special_tokens for request in [*chats, text])
    calls = [list(message["tool_calls"]) for chat in chats for message in chat.messages if message.get("tool_calls")]
    assert json.loads(calls[0][0]["function"]["arguments"]) == {"a": 2, "b": 3}
    assert set(ClassificationResponse.model_fields) >= {"data"}
    answer = {"index": 0, "label": None, "probs": [1.0], "num_classes": 1}
    assert set(ClassificationResponse.model_fields["data"].annotation.__args__[0].model_fields) == set(answer)


@pytest.mark.parametrize("status", [500, 503])
async def test_a_5xx_is_tried_again(status):
    server = FakePooling(last_length)
    server.answers = [status]
    told = []
    async with server.serving() as url:
        scores = await rewards_at(url, attempts=2).score(CHAT, told.append)
    assert scores[0].reward == 3.0
    assert f"answers {status}" in str(told[0])


async def test_a_server_that_is_gone_is_tried_again_and_then_fails_the_reward():
    told = []
    with pytest.raises(RewardError, match="ClientConnectorError"):
        await rewards_at("http://127.0.0.1:9", attempts=3).score(CHAT, told.append)
    assert len(told) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answers": [400, 400]}, "answers 400"),
        ({"model": "org/another"}, "answers 404.*The model `org/reward-model` does not exist"),
        ({"score": lambda messages: [0.1, 0.9]}, r"gives 2 scores for a completion.*one label \(num_labels = 1\)"),
        ({"raw": "[]"}, "does not look like vLLM's"),
        ({"raw": '{"data": []}'}, "gave 0 scores for 2 completions"),
    ],
)
async def test_what_another_try_would_not_mend_is_not_tried_again(change, says):
    server = FakePooling(last_length)
    for name, value in change.items():
        setattr(server, name, value)
    async with server.serving() as url:
        with pytest.raises(RewardError, match=says):
            await rewards_at(url, attempts=5).score(CHAT)
    assert len(server.requests) <= 2


async def test_a_server_that_hangs_is_given_up():
    asked = asyncio.Event()

    async def hang(reader, writer):
        asked.set()
        await reader.read()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(RewardError, match=r"no answer from .* within 0\.2 s"):
        await rewards_at(url, timeout_s=0.2).score(CHAT)
    assert asked.is_set()
    server.close()


async def test_i9_a_sampled_surrogate_or_a_message_of_another_kind_does_not_end_the_worker():
    server = FakePooling(last_length)
    odd = [[{"role": "assistant", "content": "\ud800"}], [{"role": "assistant", "content": "", "tool_calls": [3]}]]
    async with server.serving() as url:
        scores = await rewards_at(url).score(RewardBatch(PROMPT, odd[:1], [[1]], {}))
        assert scores[0].reward == 1.0
        with pytest.raises(RewardError, match="the conversation cannot be sent"):
            await rewards_at(url).score(RewardBatch(PROMPT, odd, [[1], [2]], {}))


def test_a_classifier_without_a_server_is_refused_with_the_setting():
    task = Task(dataset=[{"prompt": PROMPT, "answer": 6}], rewards=[MODEL, accuracy])
    says = r"no server is named for it; serve it with: slipstream serve org/reward-model.*\[task\] reward_servers = "
    with pytest.raises(ConfigError, match=says):
        build_rewards(config(), task.rewards, task.reward_weights)
    with_server = config(task={"reward_servers": {MODEL: "http://judge:8300/"}})
    assert build_rewards(with_server, task.rewards, None).names == ["reward-model", "accuracy"]


def test_a_model_as_an_object_is_refused_with_the_remedy():
    torch = pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=r"Linear is a model.*slipstream serve NAME --runner pooling.*reward_servers"):
        Task(dataset=[{"prompt": "2 by 3"}], rewards=[torch.nn.Linear(1, 1)])
