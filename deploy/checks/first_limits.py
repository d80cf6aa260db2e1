"""Chooses a new run file's limits, and how it shows tools, from its model's template and the task's prompts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.rollout_worker.chat.base import ChatFormat
from slipstream.rollout_worker.chat.build import build_chat_format
from slipstream.rollout_worker.chat.format_check import check_tool_format
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.tools.toolbox import ToolBox

# Tokens of a turn: a call or a short answer, and room for a thought if the model writes thoughts.
_TURN_TOKENS, _THINKING_TURN_TOKENS = 128, 512

# Tokens of a tool's short result, with the template's words around it.
_RESULT_TOKENS = 64

# The context is a multiple of this.
_STEP_TOKENS = 128

_MAX_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class FirstLimits:
    """Settings of a new run file.

    Attributes:
        tools: `chat.tools`.
        max_turn_tokens: `rollout.max_turn_tokens`.
        max_model_len: `vllm.max_model_len`, for the longest prompt and all turns, or the model's if that is less.
        longest_prompt: Tokens of the longest prompt, tools included.
        needed: Tokens of the longest prompt and all turns.
    """

    tools: str
    max_turn_tokens: int
    max_model_len: int
    longest_prompt: int
    needed: int


def choose(config: RunConfig, task: Task) -> FirstLimits | None:
    """Choose limits for the run.

    Args:
        config: The run file. Its `vllm.max_model_len` and `rollout.max_turn_tokens` are the highest that are chosen.
        task: Its task.

    Returns:
        The limits; None if the model's template can show the tools in no way.
    """
    schemas = ToolBox(task.tools).schemas
    for tools in ("template", "prompt"):
        try:
            shown = config.chat.model_copy(update={"tools": tools})
            chat = build_chat_format(config.model_copy(update={"chat": shown}), schemas)
        except ConfigError:
            continue
        return asyncio.run(_limits(config, task, chat, tools))
    return None


async def _limits(config: RunConfig, task: Task, chat: ChatFormat, tools: str) -> FirstLimits:
    proof = await check_tool_format(chat, ToolBox(task.tools).schemas)
    wanted = _TURN_TOKENS if proof.reasoning is None else _THINKING_TURN_TOKENS
    turn = min(wanted, config.rollout.max_turn_tokens)
    prompts = [row["prompt"] for _, row in task.rows.sample(_MAX_PROMPTS)]
    longest = max([len(await chat.prompt_ids(prompt)) for prompt in prompts])
    needed = longest + config.rollout.max_turns * (turn + _RESULT_TOKENS)
    context = -(-needed // _STEP_TOKENS) * _STEP_TOKENS
    return FirstLimits(tools, turn, min(context, config.vllm.max_model_len), longest, needed)
