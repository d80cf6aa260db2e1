"""Runs single functions and statements of the installed TRL unchanged, as reference values for tests.

They are read from its files, because importing its trainers takes a quarter of a minute of CPU.
"""

from __future__ import annotations

import ast
import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

_HELPERS = ("nanstd", "nanmin", "nanmax")


def trl_function(path: str, name: str) -> Callable[..., Any]:
    """Return a function or method of TRL. A method needs a stand-in for `self`.

    Args:
        path: Path of the file in TRL, such as "trainer/grpo_trainer.py".
        name: Name of the function or method.
    """
    names = _names()
    exec(_code(path, name), names)
    found: Callable[..., Any] = names[name]
    return found


def trl_advantages(
    trainer: str, rewards: torch.Tensor, size: int, batch: Mapping[str, torch.Tensor] | None = None, **settings: Any
) -> torch.Tensor:
    """Compute advantages as TRL's trainer does.

    Args:
        trainer: "grpo" for GRPOTrainer or "rloo" for RLOOTrainer.
        rewards: [S, C], NaN for None.
        size: Number of samples in a group.
        batch: Further values of the tokens, by TRL's names.
        **settings: Attributes of the trainer.
    """
    code = _code(f"trainer/{trainer}_trainer.py", "_generate_and_score_completions", "unscorable_mask", "advantages")
    given = {
        "reward_weights": torch.ones(rewards.shape[1], dtype=rewards.dtype),
        "reward_funcs": range(rewards.shape[1]),
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "beta": 0.0,
        "reward_clip_range": None,
        "normalize_advantages": False,
        **settings,
    }
    names = {
        **_names(),
        "self": SimpleNamespace(**given),
        "rewards_per_func": rewards,
        "num_generations": size,
        "device": rewards.device,
        "gather": lambda value: value,
        **(batch or {}),
    }
    exec(code, names)
    found: torch.Tensor = names["advantages"]
    return found


def trl_loss(trainer: str, inputs: Mapping[str, torch.Tensor], logprobs: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Compute the loss of TRL's trainer on one batch in one step.

    Args:
        trainer: "grpo" for GRPOTrainer or "rloo" for RLOOTrainer.
        inputs: Inputs of `_compute_loss`, without prompts.
        logprobs: Log-probs of the policy, [S, T].
        **settings: Attributes of the trainer. Others have TRL's defaults, except those of vLLM.
    """
    size, length = logprobs.shape
    empty = torch.zeros(size, 0, dtype=torch.int64)
    mask = inputs["completion_mask"] * inputs.get("tool_mask", torch.ones(size, length))
    batch = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros(size, length, dtype=torch.int64),
        "num_items_in_batch": mask.sum(),
        **inputs,
    }
    own = SimpleNamespace(
        **{
            "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.ones_like(logprobs), None),
            "model": SimpleNamespace(training=True),
            "accelerator": SimpleNamespace(
                num_processes=1, gather=lambda value: value, reduce=lambda value, **_: value, sync_gradients=True
            ),
            "args": SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
            "_metrics": {"train": defaultdict(list)},
            "aux_loss_enabled": False,
            "_entropy_bonus_enabled": False,
            "use_vllm": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "loss_type": "dapo",
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "max_completion_length": length,
            "current_gradient_accumulation_steps": 1,
            **settings,
        }
    )
    loss: torch.Tensor = trl_function(f"trainer/{trainer}_trainer.py", "_compute_loss")(own, None, batch)
    return loss


def _names() -> dict[str, Any]:
    """Return the names that the functions use from their modules."""
    names = {
        "torch": torch,
        "np": np,
        "math": math,
        "asyncio": asyncio,
        "logger": logging.getLogger("trl"),
        "RolloutSample": SimpleNamespace,
        "is_async_callable": asyncio.iscoroutinefunction,
    }
    for helper in _HELPERS:
        exec(_code("trainer/utils.py", helper), names)
    return names


@cache
def _code(path: str, function: str, first: str | None = None, last: str | None = None) -> CodeType:
    """Compile a function of TRL, or a part of its statements.

    Args:
        path: Path of the file in TRL.
        function: Name of the function.
        first: The part begins at the first statement that assigns this name; None for the whole function.
        last: The part ends at the last statement that assigns this name with `nan_to_num`.
    """
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL is not installed, and its own arithmetic is the oracle: pip install trl==1.16.0")
    tree = ast.parse((Path(spec.origin).parent / path).read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    (found,) = (node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == function)
    body: list[ast.stmt] = [found]
    found.decorator_list = []
    if first is not None:
        texts = [ast.unparse(statement) for statement in found.body]
        start = next(i for i, text in enumerate(texts) if text.startswith(f"{first} = "))
        end = max(i for i, text in enumerate(texts) if text.startswith(f"{last} = torch.nan_to_num"))
        body = found.body[start : end + 1]
    annotations = ast.parse("from __future__ import annotations").body
    return compile(ast.Module(body=[*annotations, *body], type_ignores=[]), path, "exec")
