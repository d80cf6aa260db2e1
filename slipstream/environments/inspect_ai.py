"""Tasks of Inspect (UK AISI): its solver plays an episode, its scorer judges it.

Inspect runs one evaluation at a time in a process, and its needs may clash with a worker's, so helper processes play
the episodes, each one after the other: `inspect_player.py`, in this or in another environment.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.environments.base import metrics_of
from slipstream.processes import HelperPool, Limits, own_variables, start_program
from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.task.agent import Endpoint
from slipstream.rollout_worker.task.task import Task

# Column with the id of a row's sample.
SAMPLE = "inspect_sample"
_PLAYER = Path(__file__).with_name("inspect_player.py")
_LINE_BYTES = 16 << 20
# Seconds for a process to start and to load the task.
_START_S = 300.0


def inspect_task(
    task: str,
    *,
    score: str | None = None,
    processes: int = 4,
    timeout_s: float = 600.0,
    memory_mb: int | None = None,
    python: str = sys.executable,
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Task:
    """Make a task of one of Inspect's.

    Args:
        task: Where it is: "package.module:function" or "path/to/file.py:function".
        score: Name of the score that is the reward, "scorer" or "scorer/key"; a single one needs no name.
        processes: How many episodes are played at a time, each by a process.
        timeout_s: Seconds for an episode.
        memory_mb: Memory of a process; None for no limit.
        python: Python of the environment that has inspect-ai.
        options: Options of `inspect_ai.eval`, such as {"sandbox": "docker", "message_limit": 20}.
        **arguments: Arguments of the task.

    Raises:
        ConfigError: The library or the task is missing, or it has no samples.
    """
    where, colon, function = task.rpartition(":")
    if not colon or not function.isidentifier():
        raise ConfigError(
            f"inspect_task({task!r}): say where it is: 'package.module:function' or 'path/to/file.py:function'"
        )
    if where.endswith(".py"):
        where = str(Path(where).expanduser().resolve())
    limits = Limits(timeout_s, memory_mb)
    helpers = _Helpers(python, {"task": where, "function": function, "arguments": arguments}, processes, limits)
    try:
        samples = helpers.asked({"list": True}, _START_S)["samples"]
    except RuntimeError as error:
        raise ConfigError(f"inspect_task({task!r}): {error}") from None
    if not samples:
        raise ConfigError(f"inspect_task({task!r}): its data set has no samples")
    rows = [{"prompt": each["prompt"], SAMPLE: each["id"]} for each in samples]
    return Task(dataset=rows, agent=_Player(helpers, score, dict(options or {})).play)


class _Player:
    def __init__(self, helpers: _Helpers, score: str | None, options: dict[str, Any]) -> None:
        self._helpers = helpers
        self._score = score
        self._options = options

    def play(self, endpoint: Endpoint, inspect_sample: str) -> dict[str, Any]:
        """Play one episode.

        Args:
            endpoint: Answers with the policy.
            inspect_sample: Id of the sample.

        Raises:
            RuntimeError: The episode failed, or gave no score.
        """
        asked = {"sample": inspect_sample, "base_url": endpoint.base_url, "api_key": endpoint.api_key}
        answer = self._helpers.asked({**asked, "model": endpoint.model, "options": self._options})
        scores: dict[str, float] = answer["scores"]
        if self._score is None and len(scores) == 1:
            (reward,) = scores.values()
        elif self._score in scores:
            reward = scores[self._score]
        else:
            raise RuntimeError(
                f"inspect: there is no score {self._score!r}; there are: {', '.join(scores) or 'none'}; name one: "
                f"inspect_task(..., score=...)"
            )
        return {**metrics_of(scores), "reward": reward}


class _Helpers:
    """Processes that play episodes, started when they are first needed. They end with this process."""

    def __init__(self, python: str, task: Mapping[str, Any], count: int, limits: Limits) -> None:
        # -P: next to the player are files with the names of libraries.
        self._command = [python, "-P", str(_PLAYER), json.dumps(task), str(os.getpid())]
        self._limits = limits
        self._pool = HelperPool(self._started, count)

    def asked(self, request: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Return what a process answers.

        Args:
            request: As `inspect_player.py` takes it.
            seconds: How long it may take; None for the limit of an episode.

        Raises:
            RuntimeError: It failed, ended, or took too long. Such a process is replaced.
        """
        seconds = self._limits.seconds if seconds is None else seconds
        with self._pool.one() as helper:
            answer = self._answer(helper, request, seconds)
        if "error" in answer:
            raise RuntimeError(f"inspect: {answer['error']}")
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        # What it prints is the worker's to log.
        variables = own_variables() | {"INSPECT_DISPLAY": "none"}
        return start_program(self._command, self._limits, variables, stderr=subprocess.DEVNULL)

    def _answer(self, helper: subprocess.Popen[bytes], request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert helper.stdin is not None
        assert helper.stdout is not None
        ends, line = time.monotonic() + seconds, bytearray()
        try:
            helper.stdin.write(json.dumps(request).encode() + b"\n")
            helper.stdin.flush()
            while not line.endswith(b"\n"):
                left = ends - time.monotonic()
                if left <= 0 or not select.select([helper.stdout], [], [], left)[0]:
                    raise RuntimeError(f"inspect: no answer in timeout_s = {seconds:g}")
                part = os.read(helper.stdout.fileno(), 1 << 16)
                if not part:
                    raise RuntimeError(f"inspect: its process ended with code {helper.wait(5)}")
                line += part
                if len(line) > _LINE_BYTES:
                    raise RuntimeError(f"inspect: an answer has more than {_LINE_BYTES >> 20} MiB")
        except OSError as error:
            raise RuntimeError(f"inspect: its process is gone: {error}") from None
        answer: dict[str, Any] = json.loads(line)
        return answer
