"""Runs tools in a child process: `python -m slipstream.rollout_worker.task.isolated_child path/to/file.py:task`.

Invariant: the process ends when its parent is gone, together with everything that it started.

It reads requests and writes replies as lines of JSON, over the pipes that were its standard input and output. A reply
repeats the `id` of its request. Output that user code prints goes to standard error. Tools run in the main thread, one
at a time, so that signals work in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TextIO

from slipstream.protocol.config import ConfigError, TaskSection
from slipstream.rollout_worker.user_code.errors import contained, defined_at, failure_in

_PR_SET_PDEATHSIG = 1


def main(task_path: str) -> None:
    """Load the task and answer requests until the parent is gone.

    Args:
        task_path: The task, as `path/to/file.py:task`.
    """
    requests, replies = _pipes()
    _die_with_the_parent()
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(requests, lines), daemon=True).start()
    try:
        tools = _tools(task_path)
    except ConfigError as error:
        _write(replies, {"id": 0, "refused": str(error)})
        return
    _write(replies, {"id": 0, "places": {name: defined_at(tool) for name, tool in tools.items()}})
    with asyncio.Runner() as runner:
        while True:
            request = json.loads(lines.get())
            reply = _reply(tools, request["tool"], request["arguments"], runner)
            signal.setitimer(signal.ITIMER_REAL, 0)  # An alarm that this tool left must not reach the next one.
            _write(replies, {"id": request["id"], **reply})


def _reply(
    tools: dict[str, Callable[..., Any]], name: str, arguments: dict[str, Any], runner: asyncio.Runner
) -> dict[str, str | None]:
    from slipstream.rollout_worker.tools.base import as_text

    function = tools.get(name)
    if function is None:
        text = f"the task file, imported again, has no tool {name!r}: {', '.join(tools)}"
        return {"error": text, "kind": "LookupError", "where": None}
    reply: dict[str, str | None] = {}

    def fail(error: BaseException) -> None:
        failure = failure_in(function, error)
        reply.update({"error": str(failure), "kind": failure.kind, "where": failure.where})

    with contained(fail):
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = runner.run(_awaited(result))
        reply["result"] = as_text(result)
    return reply


async def _awaited(result: Any) -> Any:
    return await result


def _tools(task_path: str) -> dict[str, Callable[..., Any]]:
    """Load the task's tools, by the names that the policy uses. Raises `ConfigError`."""
    from slipstream.rollout_worker.task.task import load_task
    from slipstream.rollout_worker.tools.function import callables
    from slipstream.rollout_worker.tools.schema import leave_out_schemas

    leave_out_schemas()
    return callables(load_task(TaskSection(path=task_path)).tools)


def _pipes() -> tuple[TextIO, TextIO]:
    """Move standard input and output to other file descriptors, so that `input()` and `print()` do not reach them.

    Returns:
        The stream of requests and the stream of replies.
    """
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _die_with_the_parent() -> None:
    """Ask Linux to kill this process when its parent dies.

    The thread that reads the input also ends the process, but it cannot run while a tool holds the interpreter lock.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _read(requests: TextIO, lines: SimpleQueue[str]) -> None:
    """Pass requests on, and kill this process and its group when the input ends, as the parent is gone then."""
    for line in requests:
        lines.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _write(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
