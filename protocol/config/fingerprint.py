"""Computes the fingerprint that shows whether a worker's rollouts fit the learner: tokenizer, chat format and rollout
settings.

Both ends compute it here, each from its own files, so that even a tokenizer with two digits swapped is noticed.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.messages import Fingerprint

DISTRIBUTION = "slipstream-rl"

_SHAPE_NO_EPISODE = {"give_up_after", "mask_truncated", "accept_sampler_mismatch"}

_NAMES = {"tokenizer": "the tokenizer", "chat": "the chat format, its template or its parser"}


def release() -> str:
    """Return this installation's version of Slipstream."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"  # a checkout that is not installed


def digest(value: Any) -> str:
    """Return a digest of a value's JSON, or of its `repr` where there is none; the same on every machine."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of(config: RunConfig, tokenizer: Any) -> Fingerprint:
    """Return the part of the fingerprint that learner and workers share.

    Args:
        tokenizer: A transformers tokenizer, fast or slow. Its own template counts unless `chat.template` names another.

    Raises:
        ConfigError: A file of the chat format cannot be read.
    """
    rollout = config.rollout.model_dump(exclude=_SHAPE_NO_EPISODE)
    return Fingerprint(
        release=release(),
        tokenizer=_tokenizer(tokenizer),
        chat=digest([_chat(config), None if config.chat.template is not None else tokenizer.chat_template]),
        rollout={
            **{f"rollout.{name}": str(value) for name, value in rollout.items()},
            "vllm.max_model_len": str(config.vllm.max_model_len),
            **{f"images.{name}": str(value) for name, value in config.images.model_dump().items()},
            "task.order": config.task.order,
            "task.mix": str(dict(sorted(config.task.mix.items()))),
            "task.mix_column": config.task.mix_column,
            "teacher": str((config.teacher.is_on, config.teacher.prompt)),
            "eval.rows": str(config.eval.rows) if config.eval.is_on else "none",
        },
    )


def difference(expected: Fingerprint, given: Fingerprint) -> str | None:
    """Describe a difference that would make wrong data; None if there is none. Data sets count if both name one."""
    for field, name in _NAMES.items():
        here, there = getattr(expected, field), getattr(given, field)
        if here != there:
            return f"{name} differs: {there}, the run has {here}"
    for name in sorted({*expected.rollout, *given.rollout}):
        here, there = expected.rollout.get(name), given.rollout.get(name)
        if here != there:
            return f"{name} = {there}, the run has {here}"
    if None not in (expected.rows, given.rows) and expected.rows != given.rows:
        return f"the data set has {given.rows} rows, the run's has {expected.rows}"
    if expected.parts and given.parts and expected.parts != given.parts:
        return f"the rows of each part of the data set are {given.parts}, the run's are {expected.parts}"
    if None not in (expected.data, given.data) and expected.data != given.data:
        return f"rows of the data set differ: {given.data}, the run has {expected.data}"
    return eval_difference(expected, given)


def eval_difference(expected: Fingerprint, given: Fingerprint) -> str | None:
    """Describe how the eval_datasets differ; None if they do not, or one of the two names none."""
    if None not in (expected.eval_rows, given.eval_rows) and expected.eval_rows != given.eval_rows:
        return f"the eval_dataset has {given.eval_rows} rows, the run's has {expected.eval_rows}"
    if None not in (expected.eval_data, given.eval_data) and expected.eval_data != given.eval_data:
        return f"rows of the eval_dataset differ: {given.eval_data}, the run has {expected.eval_data}"
    return None


def _chat(config: RunConfig) -> dict[str, Any]:
    """Return the chat settings, with the contents of files instead of their paths, which may differ by machine."""
    chat = config.chat.model_dump()
    for setting, file in config.chat.files.items():
        *tables, key = setting.split(".")[1:]
        table = chat[tables[0]] if tables else chat
        table[key] = [_content(setting, file), None if key == "template" else table[key].rpartition(":")[2]]
    return chat


def _content(setting: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} = {file}: the file cannot be read ({error}); give a text file") from None


def _tokenizer(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    if isinstance(rules, dict):
        # Truncation and padding are the caller's choice.
        rules = {name: value for name, value in rules.items() if name not in ("truncation", "padding")}
    return digest([rules, getattr(tokenizer, "eos_token", None)])
