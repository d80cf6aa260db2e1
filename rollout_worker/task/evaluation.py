"""The rows that evaluations take: a task's `eval_dataset`, in its own order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from protocol.config import ConfigError, RunConfig
from rollout_worker.data.dataset import open_rows
from rollout_worker.data.rows import Rows

# What rewards, an agent, tools or environments find in rows, or do not.
_OF_ROWS = r"^Task\((?!eval_)\w+=.*?\): (?=.*not a column of the data set|the prompts are|(the first )?row )"
_OFF = "eval.every, eval.at_start and eval.at_end are off"


def open_eval_rows(source: Any, split: str | None, config: str | None, trained: Any, folder: Path | None) -> Rows:
    """The rows of the eval_dataset `source`. config: of `trained`, the data set that is trained on, which may be the
    same one's other split. Raises `ConfigError`."""
    by_name = isinstance(source, str | Path)
    same = by_name and isinstance(trained, str | Path) and str(source) == str(trained)
    if same and split is None:
        raise ConfigError(
            f"Task(eval_dataset={str(source)!r}) is the training data set itself; say with eval_dataset_split which "
            f"part of it, such as 'test'"
        )
    try:
        return open_rows(source, split, config if same else None, folder)
    except ConfigError as error:
        raise named_eval(error) from None


def named_eval(error: ConfigError) -> ConfigError:
    """A fault of a data set, said of the eval_dataset; also one between its rows and what the task makes of them, whose
    text begins with that."""
    text = re.sub(r"\bTask\(dataset", "Task(eval_dataset", str(error))
    text = re.sub(_OF_ROWS, "Task(eval_dataset=...): ", text).replace("of the data set", "of the eval_dataset")
    return ConfigError(re.sub(r"(?<!eval_)\bdataset_split", "eval_dataset_split", text))


def check_evaluation(config: RunConfig, eval_dataset: Any) -> str | None:
    """Raises `ConfigError` for evaluations without an eval_dataset. Returns a warning for one that is never read."""
    settings = config.eval
    if settings.is_on and eval_dataset is None:
        on = next(name for name in ("every", "at_start", "at_end") if getattr(settings, name))
        raise ConfigError(
            f"eval.{on} = {str(getattr(settings, on)).lower()}, and the task {config.task.path} has no rows to "
            f"evaluate on: give Task(eval_dataset=...), or leave out eval.{on}"
        )
    if not settings.is_on and eval_dataset is not None:
        return f"Task(eval_dataset=...) is never read, since {_OFF}: set one of them, or leave the data set out"
    steps = config.learner.steps
    if config.learner.epochs is None and settings.every and settings.every > steps:
        return (
            f"eval.every = {settings.every} is beyond the last step, learner.steps = {steps}: no evaluation is made in "
            f"between; lower eval.every, or set eval.at_end"
        )
    return None


def count_eval_rows(rows: Rows, wanted: int | str) -> int:
    """How many rows an evaluation of `wanted` of them takes at most: all there are, or of an iterable as many as are
    wanted, where it has them. Raises `ConfigError` for all of an iterable."""
    if rows.size is not None:
        return rows.size
    if isinstance(wanted, str):
        raise ConfigError(
            f"eval.rows = {wanted}, and Task(eval_dataset=...) is an iterable, whose number of rows is not known: set "
            f"eval.rows to how many of them an evaluation is to take"
        )
    seen = sum(1 for _ in rows.sample(wanted))
    return seen if rows.size is None else rows.size
