"""Fingerprints all that shapes a worker's rollouts: tokenizer, chat format, settings, data set and task file.

The queue compares it with the learner's and the first worker's, so it is the same on every machine for the same files.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.protocol.config import RunConfig, fingerprint
from slipstream.protocol.messages import Fingerprint
from slipstream.rollout_worker import user_code
from slipstream.rollout_worker.data.dataset import count_eval_rows
from slipstream.rollout_worker.data.order import order_of
from slipstream.rollout_worker.data.rows import Rows
from slipstream.rollout_worker.task.task import Task

logger = logging.getLogger(__name__)

# Number of rows that are compared: the first, the last and others between them; of a stream the first ones.
_ROWS = 33
_TIMEOUT_S = 60.0
# A new version of one may render a prompt differently.
_LIBRARIES = ("transformers", "renderers", "jinja2")
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")


async def fingerprint_of(
    config: RunConfig,
    task: Task,
    tokenizer: Any,
    code: user_code.UserCode,
    tools: Sequence[Mapping[str, Any]] = (),
    timeout_s: float = _TIMEOUT_S,
) -> Fingerprint:
    """Return this worker's fingerprint.

    Args:
        tools: Schemas of tools and environments.
        timeout_s: Seconds for each reading of the data sets. Rows that cannot be read in time are not compared: `data`
            is None then.
    """
    shared = await asyncio.to_thread(fingerprint.of, config=config, tokenizer=tokenizer)
    rows, data, eval_rows, eval_data = None, None, None, None
    parts: dict[str, int] = {}
    try:
        data = await code.call(lambda: _digest_of_rows(task.rows), str, timeout_s, user_code.Kind.DATA)
        rows = await code.call(
            lambda: task.rows.size, _as_is, timeout_s, user_code.Kind.DATA
        )  # the size of a short stream is known by now
        if config.task.mix:
            parts = await code.call(
                lambda: order_of(task.rows, config.task).parts, dict, timeout_s, user_code.Kind.DATA
            )
    except user_code.UserCodeError as error:
        logger.warning("the data set is not compared with other workers': a sample of it cannot be read: %s", error)
    if config.eval.is_on:
        try:
            eval_data = await code.call(lambda: _digest_of_rows(task.eval_rows), str, timeout_s, user_code.Kind.DATA)
            eval_rows = await code.call(
                lambda: count_eval_rows(task.eval_rows, config.eval.rows), _as_is, timeout_s, user_code.Kind.DATA
            )
        except user_code.UserCodeError as error:
            logger.warning("evaluations have to wait for another worker: the eval_dataset cannot be read: %s", error)
    return msgspec.structs.replace(
        shared,
        rows=rows,
        data=data,
        eval_rows=eval_rows,
        eval_data=eval_data,
        task=_digest_of_task(config.task.file, tools),
        libraries=_versions(),
        parts=parts,
    )


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _LIBRARIES}


def _as_is(value: int | None) -> int | None:
    return value


def _digest_of_rows(rows: Rows) -> str:
    sample = [row for _, row in rows.sample(_ROWS)]
    if failed := next((row for row in sample if isinstance(row, BaseException)), None):
        raise failed
    return fingerprint.digest([_plain(row) for row in sample])


def _digest_of_task(file: Path, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a digest of the task's file and of the schemas of its tools, as an MCP server's are not in the file."""
    try:
        return fingerprint.digest([file.read_text(encoding="utf-8", errors="replace"), list(tools)])
    except OSError:
        return None


def _plain(value: Any) -> Any:
    """Return a value for JSON. An object that JSON cannot write becomes its type and its repr without addresses."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, set | frozenset):  # their order differs between processes
        return sorted(fingerprint.digest(_plain(entry)) for entry in value)
    return [type(value).__name__, _ADDRESS.sub("", repr(value))]
