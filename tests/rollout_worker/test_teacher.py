"""Whole workers that ask a teacher."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from slipstream.protocol import reasons
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.rollout_worker import teacher as teachers
from slipstream.rollout_worker.chat.base import PromptError
from slipstream.rollout_worker.task.rewards import build_rewards
from slipstream.rollout_worker.teacher import MAX_SEQUENCES, Teacher, filled, heads
from tests.kit import WORKER, config
from tests.kit.fake_teacher import FakeTeacher, teacher_logprob
from tests.kit.stand_in_tokenizer import stand_in_tokenizer
from tests.kit.worker import TOKENIZER, Run, chat_format, fake, roll, task


def taught(url: str, **teacher: Any) -> RunConfig:
    return config(WORKER, teacher={"url": url, **teacher})


def check_labels(run: Run, head: tuple[list[int], list[int]] = ([], [])) -> None:
    """Each sampled token's label is the teacher's for exactly these ids, with `head` exchanged."""
    shown, own = head
    for rollout in run.rollouts:
        for segment in rollout.segments:
            ids = segment.token_ids.tolist()
            assert ids[: len(shown)] == shown
            seen, moved = own + ids[len(shown) :], len(own) - len(shown)
            expected = [teacher_logprob(seen, place + moved) for place in np.flatnonzero(segment.loss_mask)]
            assert segment.teacher is not None
            assert segment.teacher.tolist() == pytest.approx(expected, abs=1e-6)


async def test_each_sampled_token_brings_the_teacher_s_log_prob() -> None:
    teacher = FakeTeacher(TOKENIZER)
    async with teacher.serving() as url:
        run = await roll(task(), fake(), tickets=3, config=taught(url))
    assert len(run.queue.groups) == 3
    check_labels(run)
    assert [rollout.reward for rollout in run.rollouts] == [1.0] * len(run.rollouts)


async def test_without_rewards_the_teacher_alone_teaches() -> None:
    teacher = FakeTeacher(TOKENIZER)
    async with teacher.serving() as url:
        run = await roll(task(rewards=[]), fake(), config=taught(url))
    check_labels(run)
    assert {rollout.reward for rollout in run.rollouts} == {0.0}
    with pytest.raises(ConfigError, match=r"teacher\.url"):
        build_rewards(config(WORKER), [], None)


@pytest.mark.parametrize("system", [None, "Be short."])
async def test_the_teacher_alone_sees_its_prompt(system: str | None) -> None:
    teacher = FakeTeacher(TOKENIZER)
    chat = chat_format()
    prompt = [{"role": "user", "content": "Multiply 12 by 34."}]
    if system:
        prompt = [{"role": "system", "content": system}, *prompt]
    head = await heads(chat, prompt, "It is 408.")
    assert "It is 408" in TOKENIZER.decode(head[1])
    the_task = task(dataset=[{"prompt": prompt, "answer": 408}], tools=[])
    async with teacher.serving() as url:
        run = await roll(the_task, fake(), config=taught(url, prompt="It is {answer}."))
    check_labels(run, head)
    assert all("It is 408." not in TOKENIZER.decode(rollout.segments[0].token_ids) for rollout in run.rollouts)


async def test_a_prompt_that_cannot_be_shown_is_refused() -> None:
    chat = chat_format()
    with pytest.raises(PromptError):
        await heads(chat, "Multiply.", "It is 408.")
    for wrong in ("{missing}", "{", "{answer.missing}", "{0}"):
        with pytest.raises(PromptError):
            filled(wrong, {"answer": 408, "other": 1})
    with pytest.raises(PromptError):  # a table fills missing values up with None
        filled("{answer}", {"answer": None})
    assert filled("{{{answer}}}", {"answer": 408}) == "{408}"


async def test_groups_wait_for_a_teacher_that_does_not_answer_and_none_is_lost() -> None:
    teacher = FakeTeacher(TOKENIZER)
    teacher.answers = [500, 503, 429, 0]

    async def at_once(seconds: float) -> None:
        await asyncio.sleep(0)

    async with teacher.serving() as url:
        run = await roll(task(), fake(), tickets=2, config=taught(url, timeout_s=0.5), sleep=at_once)
    assert len(run.queue.groups) == 2
    assert run.queue.failures == {}
    check_labels(run)
    notices = [notice.text for notice in run.worker.report().notices if notice.kind == "teacher"]
    assert len(notices) == 4, "each cause is told"
    assert all(url in text for text in notices)
    assert run.worker.capacity.free == run.worker.capacity.total


@pytest.mark.parametrize("another", ["vocabulary", "name", "status"])
async def test_a_teacher_that_comes_back_as_another_is_used_only_with_the_policy_s_vocabulary(another: str) -> None:
    """Meanwhile groups wait: what it is after that may be right again."""
    teacher = FakeTeacher(TOKENIZER)
    pauses = 0

    async def restarted(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if another == "vocabulary":
            teacher.tokenizer = stand_in_tokenizer(["<s>"], "<s>") if pauses < 3 else TOKENIZER
        elif another == "name":
            teacher.name = "the/same under another name"

    teacher.answers = {"vocabulary": [500], "name": [404], "status": [401, 403, 404, 502]}[another]
    async with teacher.serving() as url:
        run = await roll(task(), fake(), tickets=2, config=taught(url), sleep=restarted)
    assert len(run.queue.groups) == 2
    assert run.queue.failures == {}
    assert pauses >= {"vocabulary": 3, "name": 1, "status": 4}[another]
    check_labels(run)
    if another == "vocabulary":
        assert any("another vocabulary" in notice.text for notice in run.worker.report().notices)


async def test_a_teacher_s_key_is_the_environment_s(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = FakeTeacher(TOKENIZER)
    teacher.key = "secret"
    with pytest.raises(ConfigError, match="TEACHER_API_KEY"):
        await checked(teacher)
    monkeypatch.setenv("TEACHER_API_KEY", "secret")
    assert await checked(teacher) is None


async def test_a_worker_that_waits_for_its_teacher_holds_no_slot_and_can_be_stopped() -> None:
    teacher = FakeTeacher(TOKENIZER)
    teacher.answers = [0] * 100
    async with teacher.serving() as url:
        run = await roll(
            task(),
            fake(),
            config=taught(url),
            stop_when=lambda worker: teacher.asked > 0 and not worker.capacity.generating,
        )
    assert not run.queue.groups


@pytest.mark.parametrize("wrong", [{"fewer": 1}, {"value": 0.5}, {"value": float("nan")}, {"answers": [400] * 9}])
async def test_an_answer_that_is_none_fails_the_ticket_and_nothing_is_recorded(wrong: dict[str, Any]) -> None:
    teacher = FakeTeacher(TOKENIZER)
    for name, value in wrong.items():
        setattr(teacher, name, value)
    async with teacher.serving() as url:
        run = await roll(task(), fake(), config=taught(url))
    assert not run.queue.groups
    assert [failure.reason for failure in run.queue.failures.values()] == [reasons.TEACHER]


async def test_an_id_that_is_none_fails_the_ticket() -> None:
    teacher = FakeTeacher(TOKENIZER)
    teacher.first_id = "99999999999"
    async with teacher.serving() as url:
        run = await roll(task(), fake(), config=taught(url, top_k=1))
    assert [failure.reason for failure in run.queue.failures.values()] == [reasons.TEACHER]


async def test_a_large_group_is_asked_in_parts() -> None:
    teacher = FakeTeacher(TOKENIZER)
    size = MAX_SEQUENCES * 2 + 1
    async with teacher.serving() as url:
        given = config(WORKER, teacher={"url": url}, rollout={"group_size": size}, worker={"episodes": size})
        run = await roll(task(), fake(), config=given)
    assert (len(teacher.sequences), teacher.asked) == (size, 3)
    check_labels(run)


async def checked(teacher: FakeTeacher, context: int = 100) -> str | None:
    async with teacher.serving() as url:
        section = taught(url, timeout_s=1.0).teacher
        return await Teacher(url, section, lambda text: None, lambda attempt: 0.0).check(TOKENIZER, context)


async def test_the_start_check_finds_another_vocabulary_a_short_context_and_a_dead_server() -> None:
    assert await checked(FakeTeacher(TOKENIZER)) is None
    assert "--max-model-len 101" in (await checked(FakeTeacher(TOKENIZER, max_model_len=100)) or "")
    with pytest.raises(ConfigError, match="another vocabulary"):
        await checked(FakeTeacher(stand_in_tokenizer(["<s>"], "<s>")))
    silent = FakeTeacher(TOKENIZER)
    silent.answers = [0]
    with pytest.raises(ConfigError, match="no answer"):
        await checked(silent)
    nobody = "http://127.0.0.1:9"
    with pytest.raises(ConfigError, match="slipstream serve"):
        await Teacher(nobody, taught(nobody).teacher, lambda text: None, lambda attempt: 0.0).check(TOKENIZER, 100)


async def test_with_top_k_each_sampled_token_brings_the_teacher_s_likeliest_ids() -> None:
    teacher = FakeTeacher(TOKENIZER)
    async with teacher.serving() as url:
        run = await roll(task(), fake(), config=taught(url, top_k=3))
    check_labels(run)
    for rollout in run.rollouts:
        for segment in rollout.segments:
            top, sampled = segment.teacher_top, segment.token_ids[segment.loss_mask]
            assert top is not None
            assert top.k == 3
            assert top.ids.reshape(-1, 3).tolist() == [
                [(token + rank) % 100 for rank in (1, 2, 3)] for token in sampled
            ]
            assert top.logprobs.reshape(-1, 3).tolist() == [[-0.5, -1.0, -1.5]] * len(sampled)


async def test_a_teacher_that_is_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "_SLOW_AFTER_S", 0.02)
    teacher = FakeTeacher(TOKENIZER)
    teacher.answers = [0]
    async with teacher.serving() as url:
        run = await roll(task(), fake(), config=taught(url, timeout_s=0.2))
    check_labels(run)
    assert any("0.02 s" in notice.text for notice in run.worker.report().notices)


def test_settings_of_a_teacher_that_is_not_there_are_refused() -> None:
    with pytest.raises(Exception, match=r"teacher\.prompt without a teacher"):
        config(WORKER, teacher={"prompt": "It is {answer}."})
    with pytest.raises(Exception, match=r"images\.enabled = true with teacher\.url"):
        config(WORKER, teacher={"url": "http://127.0.0.1:9"}, images={"enabled": True})
