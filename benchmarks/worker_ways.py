"""Implements the ways that `benchmarks.worker` compares. Each is measured in the process that calls it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import uvloop

from benchmarks.worker_figures import LagProbe, figures
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.messages import Rollout
from slipstream.rollout_worker.chat.build import build_chat_format
from slipstream.rollout_worker.chat.format_check import check_tool_format
from slipstream.rollout_worker.episodes.conversation import ConversationSource
from slipstream.rollout_worker.episodes.episode import Episode, EpisodeSetup
from slipstream.rollout_worker.episodes.source import GroupPlan, SourceContext, prompt_ids, side_by_side
from slipstream.rollout_worker.inference.client import InferenceClient
from slipstream.rollout_worker.inference.failures import EpisodeFailed, FailureNotices
from slipstream.rollout_worker.inference.router import Affinity
from slipstream.rollout_worker.sources import source_of
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.ticket_loop import Worker
from slipstream.rollout_worker.tools.toolbox import ToolBox
from slipstream.rollout_worker.user_code import UserCode
from tests.kit import WORKER, config, renderer_cases, template_cases
from tests.kit.stand_in_queue import StandInQueue, serving_at, tickets_for
from tests.kit.worker import multiply, row, task

WARM_UP_GROUPS = 8
GROUP_SIZE = 8
IN_FLIGHT = 256
WAITING_SLOTS = 128
WAITS_S = 2.0  # Seconds of a reset, and of a judge.
ROWS = [row(a, a + 7) for a in range(100, 1000)]

TURNS = 200
QUESTION = {"role": "user", "content": "Multiply 100 by 107."}
CALL = {"name": "multiply", "arguments": {"a": 100, "b": 107}}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "abcdefghi", "function": CALL}],
}


def ours(url: str, model: str, groups: int, turns: int, episodes: int = IN_FLIGHT) -> dict[str, float]:
    """Measure our worker with `episodes` at once.

    Args:
        url: Address of the fake vLLM.
        model: Folder of the model.
        groups: Number of groups to measure.
        turns: Turns of an episode.
        episodes: Slots of the worker.

    Returns:
        The figures by name.

    Raises:
        RuntimeError: If an episode did not run as scripted.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_ours(url, model, groups, turns, episodes))


def ours_1000(url: str, model: str, groups: int, turns: int) -> dict[str, float]:
    """Measure our worker with 1,000 episodes at once."""
    return ours(url, model, max(groups, 250), turns, episodes=1000)


def worker_config(model: str, turns: int, episodes: int) -> RunConfig:
    return config(
        WORKER,
        model={"path": model},
        chat={"format": "template"},
        rollout={"group_size": GROUP_SIZE, "max_turns": turns + 1, "max_episode_tokens": 10_000},
        worker={"request_timeout_s": 60.0, "episodes": episodes},
        vllm={"max_num_seqs": 1024, "max_model_len": 4096},
    )


async def _ours(url: str, model: str, groups: int, turns: int, episodes: int) -> dict[str, float]:
    found, rollouts = await measured(
        url, worker_config(model, turns, episodes), task(dataset=ROWS, rewards=[accuracy]), groups
    )
    if any(rollout.reward != 1.0 or rollout.turns != turns for rollout in rollouts):
        raise RuntimeError(f"episodes did not run as scripted: {rollouts[0]}")
    return found


async def measured(
    url: str, run_config: RunConfig, the_task: Task, groups: int
) -> tuple[dict[str, float], list[Rollout]]:
    """Run a worker until it has made `groups` groups, after a few to warm up.

    Returns:
        The figures by name, and the rollouts.

    Raises:
        RuntimeError: If a group failed.
    """
    async with UserCode(run_config.worker.user_threads) as code, InferenceClient(60.0) as client:
        tokenizer = build_chat_format(run_config, []).tokenizer
        context = SourceContext(run_config, the_task, code, tokenizer, lambda key, text: None)
        probe = LagProbe()
        async with source_of(the_task).open(context) as source:
            for count in (WARM_UP_GROUPS, groups):
                stand_in = StandInQueue(tickets_for(count, GROUP_SIZE), serving_at(url, version=1))
                worker = Worker(run_config, the_task, stand_in, "bench", source, client, code, FailureNotices())
                async with asyncio.TaskGroup() as tasks:
                    probing = tasks.create_task(probe.run())
                    wall, cpu, loop = time.perf_counter(), time.process_time(), time.thread_time()
                    await worker.run(asyncio.Event())
                    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
                    loop_s = time.thread_time() - loop
                    probing.cancel()
    if stand_in.failures:
        raise RuntimeError(f"groups failed: {stand_in.failures}")
    rollouts = [rollout for group in stand_in.groups for rollout in group.rollouts]
    tokens = sum(rollout.sampled_tokens for rollout in rollouts)
    return {**figures(len(rollouts), tokens, cpu_s, wall_s, loop_s), **probe.figures()}, rollouts


def waiting(url: str, model: str, groups: int, turns: int) -> dict[str, float]:
    """Measure our worker with 128 slots, and resets and judges of 2 s.

    Returns:
        The share of its time above the time without these waits plus 4 s. It is measured for as many episodes as slots,
        and for so many that they have to take turns.

    Raises:
        RuntimeError: If a group failed.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_waiting(url, model, max(groups, 5 * WAITING_SLOTS // GROUP_SIZE), turns))


async def _waiting(url: str, model: str, groups: int, turns: int) -> dict[str, float]:
    run_config = worker_config(model, turns, WAITING_SLOTS)
    seconds: dict[tuple[str, float], float] = {}
    async with UserCode(run_config.worker.user_threads) as code, InferenceClient(60.0) as client:
        tools = ToolBox([multiply], run_config.worker.tool_timeout_s, code)
        chat = build_chat_format(run_config, tools.schemas)
        for name, count in (("warm", 1), ("slots", WAITING_SLOTS // GROUP_SIZE), ("more", groups)):
            for waits_s in (0.0, WAITS_S):
                stand_in = StandInQueue(tickets_for(count, GROUP_SIZE), serving_at(url, version=1))
                the_task = task(dataset=ROWS, rewards=[_judge_of(waits_s)])
                source = _Reset(chat, tools, run_config.max_open, reset_s=waits_s)
                worker = Worker(run_config, the_task, stand_in, "bench", source, client, code, FailureNotices())
                began = time.perf_counter()
                await worker.run(asyncio.Event())
                seconds[name, waits_s] = time.perf_counter() - began
                if len(stand_in.groups) != count:
                    raise RuntimeError(f"groups failed: {stand_in.failures}")
    return {
        "judge_overhead": _above(seconds["slots", WAITS_S], seconds["slots", 0.0] + 2 * WAITS_S),
        "judge_overhead_more": _above(seconds["more", WAITS_S], seconds["more", 0.0] + 2 * WAITS_S),
        "more_episodes": groups * GROUP_SIZE,
        **{f"{name}_s": seconds[name, WAITS_S] for name in ("slots", "more")},
    }


def _above(took_s: float, possible_s: float) -> float:
    return (took_s - possible_s) / took_s


def _judge_of(seconds: float) -> Callable[..., Any]:
    async def judge(completions: list[Any], answer: list[int], **columns: Any) -> list[float]:
        if seconds:
            await asyncio.sleep(seconds)
        return accuracy(completions, answer, **columns)

    return judge


@dataclass(frozen=True, slots=True)
class _Reset(ConversationSource):
    """Runs conversations that wait before their first turn, as for an environment's reset."""

    reset_s: float = 0.0

    async def run(self, plan: GroupPlan) -> list[Episode | EpisodeFailed]:
        prompt, episodes = plan.row.columns["prompt"], plan.episodes
        ids = await prompt_ids(self.chat, prompt, plan.row, episodes.limits.max_model_len, episodes.notices)
        setup = EpisodeSetup(prompt, ids, self.chat, self.tools)

        async def episode(affinity: Affinity) -> Episode:
            if self.reset_s:
                await asyncio.sleep(self.reset_s)
            return await episodes.run(setup, affinity)

        return await side_by_side(plan, episode)


def trl(url: str, model: str, groups: int, turns: int) -> dict[str, float]:
    """Measure TRL 1.16's own rollout loop.

    Samples are counted where TRL would pickle them for the trainer's process. The pickling is left out, to TRL's
    advantage.

    Raises:
        RuntimeError: If an episode did not run as scripted.
    """
    from accelerate.state import PartialState
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import async_rollout_worker

    PartialState()
    tokenizer = AutoTokenizer.from_pretrained(model)
    made = _Made(warm=IN_FLIGHT, all=IN_FLIGHT + groups * GROUP_SIZE)
    loop = async_rollout_worker._AsyncRolloutLoop(
        model_name="policy",
        dataset=Dataset.from_list(ROWS),
        reward_funcs=[accuracy],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        rollout_buffer=made,
        model_version_value=SimpleNamespace(value=1),
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(),
        tools=[multiply],
        num_generations=GROUP_SIZE,
        max_inflight_tasks=IN_FLIGHT,
        vllm_server_url=url,
        max_tokens=64,
    )
    made.full = loop._stop_event.set
    loop.run()
    # A rollout is several samples if its conversation is forked.
    measured = made.samples[made.warm : made.all]
    if any(sample.metrics["reward"] != 1.0 for sample in made.samples):
        raise RuntimeError(f"TRL's episodes did not run as scripted: {made.samples[0]}")
    tokens = sum(int(sample.completion_mask.sum()) for sample in measured)
    return figures(len(measured), tokens, made.cpu_s, made.wall_s)


class _Made:
    """Replaces TRL's queue: takes samples, and stops the loop when there are enough."""

    def __init__(self, warm: int, all: int) -> None:
        self.samples: list[Any] = []
        self.warm, self.all = warm, all
        self.cpu_s = self.wall_s = 0.0
        self.full: Callable[[], None] = lambda: None

    def put_nowait(self, sample: Any) -> None:
        self.samples.append(sample)
        if len(self.samples) == self.warm:
            self.cpu_s, self.wall_s = -time.process_time(), -time.perf_counter()
        if len(self.samples) == self.all:
            self.cpu_s += time.process_time()
            self.wall_s += time.perf_counter()
            self.full()

    def qsize(self) -> int:
        return 0


WAYS: dict[str, Callable[[str, str, int, int], dict[str, float]]] = {
    "ours": ours,
    "ours_1000": ours_1000,
    "waiting": waiting,
    "trl": trl,
}


def accuracy(completions: list[Any], answer: list[int], **columns: Any) -> list[float]:
    said = [turns[-1]["content"].rpartition("</think>")[2].strip() for turns in completions]
    return [float(text == str(right)) for text, right in zip(said, answer, strict=True)]


async def chat_us_per_turn() -> dict[str, float]:
    """Measure the suffix and the parse of one short turn with a call.

    Returns:
        CPU microseconds of this thread, by chat format.
    """
    schemas = ToolBox([multiply]).schemas
    found = {}
    for case in [*renderer_cases.CASES, *template_cases.CASES]:
        try:
            chat = case.build(schemas)
        except ConfigError:
            continue  # The template takes no tools.
        if not (await check_tool_format(chat, schemas)).fit_for_tools:
            continue
        prompt_ids = await chat.prompt_ids([QUESTION])
        turn_ids = (await chat.render_ids([QUESTION, CALLING], generation_prompt=False))[len(prompt_ids) :]
        answers = [{"role": "tool", "name": "multiply", "content": "10700", "tool_call_id": "abcdefghi"}]
        cpu = time.thread_time()
        for _ in range(TURNS):
            chat.parse(prompt_ids, turn_ids)
            await chat.suffix_ids(prompt_ids, turn_ids, answers)
        found[f"{case.family}, {case.how}"] = round(1e6 * (time.thread_time() - cpu) / TURNS, 1)
    return found
