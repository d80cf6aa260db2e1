"""Plays episodes of a task of Inspect: `python -P inspect_player.py TASK PID`, where TASK is the JSON object
`{"task": ..., "function": ..., "arguments": {}}` and PID the process id of the worker that starts it.

Runs in the environment that has inspect-ai, which need not have Slipstream. Reads a line of JSON for each request,
`{"list": true}` or `{"sample": id, "base_url": ..., "api_key": ..., "model": ..., "options": {}}`, and writes a line
with the answer or `{"error": text}`.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import tempfile
import threading
import time
from typing import Any

_MAX_ERROR = 2000


def load(described: dict[str, Any]) -> Any:
    """Return the task, with an id for each sample."""
    where, name = described["task"], described["function"]
    if where.endswith(".py"):
        sys.path.insert(0, os.path.dirname(where))
    found = runpy.run_path(where) if where.endswith(".py") else vars(importlib.import_module(where))
    if name not in found:
        raise LookupError(f"{where} has no {name!r}")
    task = found[name](**described["arguments"])
    for number, sample in enumerate(task.dataset, start=1):
        sample.id = number if sample.id is None else sample.id
    return task


def prompt_of(sample: Any) -> list[dict[str, str]]:
    if isinstance(sample.input, str):
        return [{"role": "user", "content": sample.input}]
    return [{"role": message.role, "content": message.text} for message in sample.input]


def play(task: Any, request: dict[str, Any]) -> dict[str, float]:
    """Return the scores of one episode, as numbers."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import get_model

    model = get_model(
        f"openai-api/slipstream/{request['model']}",
        base_url=request["base_url"],
        api_key=request["api_key"],
        memoize=False,
    )
    sample = next(each.id for each in task.dataset if str(each.id) == request["sample"])
    with tempfile.TemporaryDirectory(prefix="slipstream-inspect-") as folder:
        (log,) = evaluate(
            task, model=model, sample_id=sample, log_dir=folder, display="none", log_format="json", **request["options"]
        )
    if log.status != "success" or not log.samples or log.samples[0].error is not None:
        error = log.samples[0].error if log.samples and log.samples[0].error else log.error
        raise RuntimeError(error.message if error is not None else f"the evaluation ended as {log.status}")
    return dict(flattened(log.samples[0].scores or {}))


def flattened(scores: dict[str, Any]) -> Any:
    """Yield each score as a number, and the entries of those that have several."""
    from inspect_ai.scorer import value_to_float

    number = value_to_float()
    for name, score in scores.items():
        if isinstance(score.value, dict):
            for key, value in score.value.items():
                yield f"{name}/{key}", number(value)
        elif isinstance(score.value, list):
            for place, value in enumerate(score.value):
                yield f"{name}/{place}", number(value)
        else:
            yield name, number(score.value)


def end_with_parent(parent: int) -> None:
    """End this process once the worker that started it has ended, whatever the task waits for."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    threading.Thread(target=end_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    # What the library and the task print goes elsewhere: stdout has the answers alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task = None
    for line in sys.stdin:
        try:
            task = load(json.loads(sys.argv[1])) if task is None else task
            request = json.loads(line)
            if "list" in request:
                found: Any = {"samples": [{"id": str(each.id), "prompt": prompt_of(each)} for each in task.dataset]}
            else:
                found = {"scores": play(task, request)}
        except ImportError as error:
            found = {"error": f"{error}; if inspect-ai is missing: pip install inspect-ai openai"}
        except Exception as error:  # of the task, whatever it is
            found = {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR]}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
