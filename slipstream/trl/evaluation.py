"""Runs that train nothing: evaluations and rollouts that a script asks its trainer for.

Such a run has servers, a queue, workers and a learner as any other. The learner waits for the evaluation before its
first step, and `AtOnce` ends it there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.rollout_worker.task.task import Task

_NOT_ASKED_FOR = -1


class AtOnce:
    """A callback that ends the run before its first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: None


class Written:
    """A reward that scores nothing: it appends each completion to a file, with the number of its prompt.

    Args:
        file: The file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.__name__ = "written"

    def __call__(self, completions: Sequence[Any], row: Sequence[int], **_: Any) -> list[float]:
        asked_for = [pair for pair in zip(row, completions, strict=True) if pair[0] != _NOT_ASKED_FOR]
        text = "".join(json.dumps(pair) + "\n" for pair in asked_for)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        return [0.0] * len(completions)


def rollouts_task(task: Task, prompts: Sequence[Any], file: Path) -> Task:
    """Return a task that plays prompts with a task's tools and writes what the policy answers to a file."""
    rows = [
        {**(prompt if isinstance(prompt, Mapping) else {"prompt": prompt}), "row": number}
        for number, prompt in enumerate(prompts)
    ]
    return Task(
        # Workers begin to play these during the evaluation.
        train_dataset=[{**row, "row": _NOT_ASKED_FOR} for row in rows],
        eval_dataset=rows,
        reward_funcs=[Written(file)],
        tools=task.tools,
        environment_factory=task.environment,
        agent=task.agent,
    )


def read_rollouts(file: Path, prompts: int, group_size: int) -> list[list[Any]]:
    """Return the completions of each prompt; of a group that was scored twice, those of one time."""
    found: list[list[Any]] = [[] for _ in range(prompts)]
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        number, completion = json.loads(line)
        found[number].append(completion)
    return [completions[:group_size] for completions in found]


def only_evaluated(
    sections: dict[str, dict[str, Any]], run_dir: Path, name: str, group_size: int
) -> dict[str, dict[str, Any]]:
    """Return the sections of a run that evaluates its model and ends.

    Args:
        sections: Sections of the run that trained.
        run_dir: Its directory, in which the new run's stands.
        name: Name of the new run.
        group_size: Completions of each prompt.
    """
    made = {section: dict(settings) for section, settings in sections.items() if section not in ("hub", "tracking")}
    made["run"] |= {"dir": str(run_dir / "evaluations"), "name": name}
    callbacks = {"callbacks": [f"{Path(__file__).absolute()}:AT_ONCE"]}
    left = ("epochs", "warmup_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "keep_best", "callbacks")
    learner = {key: value for key, value in made["learner"].items() if key not in left}
    made["learner"] = {**learner, "steps": 1, "checkpoint_every": 0, "checkpoint_minutes": 0, **callbacks}
    made["eval"] = {"at_start": True, "group_size": group_size, "share": 1.0}
    return made


def __getattr__(name: str) -> Any:
    """Make `AT_ONCE`, which needs transformers, when the learner asks for it."""
    if name != "AT_ONCE":
        raise AttributeError(name)
    from transformers import TrainerCallback

    return type("AtOnce", (AtOnce, TrainerCallback), {})()
