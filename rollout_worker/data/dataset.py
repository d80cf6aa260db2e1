"""Opens a task's data sets, for training and for evaluations: rows in memory, an iterable, a file, or a name on the
hub.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.protocol.config import ConfigError, Finding, RunConfig
from slipstream.rollout_worker.data import files
from slipstream.rollout_worker.data.rows import Rows, Stream, Table

# A sequence of rows (a `datasets.Dataset` is one); an iterable that can be iterated again and again; a function that
# makes either, or a generator; a file, folder, glob or name on the hub.
DataSource: TypeAlias = Sequence[Mapping[str, Any]] | Iterable[Mapping[str, Any]] | Callable[[], Any] | str | Path

_FORMS = (
    "a list of dicts, a datasets.Dataset, an iterable, a function that makes one of these, a file such as "
    "'rows.jsonl', or a data set's name on the hub"
)

# Errors about rows that the checks of rewards, agents, tools and environments raise.
_OF_ROWS = r"^Task\((?!eval_)\w+=.*?\): (?=.*not a column of the data set|the prompts are|(the first )?row )"

_OFF = "eval.every, eval.at_start and eval.at_end are off"


def is_lazy(source: Any) -> bool:
    """Return whether rows can be had only by reading files, the network or a stream, or by running code."""
    if isinstance(source, str | Path):
        return True
    return (isinstance(source, Iterable) or callable(source)) and not (
        _is_table(source) or isinstance(source, Iterator)
    )


def open_rows(source: Any, split: str | None = None, config: str | None = None, folder: Path | None = None) -> Rows:
    """Open a data set: read its files, or download it from the hub.

    Args:
        split: Part of a data set on the hub, or of a folder.
        config: Configuration of such a data set.
        folder: Where a relative path is looked up before the working directory.

    Raises:
        ConfigError: It cannot be opened.
    """
    if isinstance(source, str | Path):
        source = files.load_data_files(str(source), split, config, folder)
    elif split is not None or config is not None:
        raise ConfigError(
            f"Task(dataset_split={split!r}, dataset_config={config!r}) say which part of a file or of a data set on "
            f"the hub to load, and dataset is a {type(source).__name__}; leave them out"
        )
    return _rows_of(source)


def _rows_of(source: Any) -> Rows:
    if isinstance(source, Mapping):
        raise ConfigError(
            f"Task(dataset=...) is a {type(source).__name__} with {', '.join(map(repr, source))}; give one of these, "
            f"such as dataset[{next(iter(source), 'train')!r}]"
        )
    if _is_table(source):
        if len(source) == 0:
            raise ConfigError("Task(dataset=...) is empty; give at least one row with a 'prompt' column")
        return Table(source, _fills_in_none(source))
    if isinstance(source, Iterator):
        raise ConfigError(
            f"Task(dataset=...) is a {type(source).__name__}, which can be read once only, and every worker and epoch "
            f"reads it again; give the function that makes it, or a list"
        )
    if isinstance(source, Iterable):
        skip = _skipping(source) if _is_of_datasets(source) else None
        return Stream(lambda epoch: _iteration(source, epoch), _fills_in_none(source), skip=skip)
    if callable(source):
        return _rows_made_by(source)
    raise ConfigError(f"Task(dataset=...) is a {type(source).__name__}; give {_FORMS}")


def _rows_made_by(function: Callable[[], Any]) -> Rows:
    """Open the rows of a function that makes the data set once, or an iteration of it for each epoch."""
    try:
        made = function()
    except ConfigError:
        raise
    except Exception as error:  # the function is the user's
        raise ConfigError(f"Task(dataset={_name(function)}) fails: {type(error).__name__}: {error}") from error
    if isinstance(made, Iterator):
        return Stream(lambda epoch: iter(function()))
    if callable(made):
        raise ConfigError(
            f"Task(dataset={_name(function)}) returns a {type(made).__name__}; return rows, such as a list of dicts"
        )
    return _rows_of(made)


def _iteration(source: Iterable[Any], epoch: int) -> Iterator[Any]:
    # A shuffled stream has its own order for each epoch.
    if callable(set_epoch := getattr(source, "set_epoch", None)):
        set_epoch(epoch)
    return iter(source)


def _skipping(source: Any) -> Callable[[int], Iterator[Any]]:
    """Return a function that iterates from a row of the first epoch on: `datasets` skips rows without reading them."""
    return lambda number: iter(source.skip(number))


def _is_table(source: Any) -> bool:
    return hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, str | type)


def _is_of_datasets(source: Any) -> bool:
    """Return whether it is a data set of the `datasets` library, which has Arrow tables."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(source, library.Dataset | library.IterableDataset)


def _fills_in_none(source: Any) -> bool:
    """Return whether the calls in its prompts all have the same arguments, with None for missing ones.

    They do in Arrow tables, except in columns of type Json.
    """
    return _is_of_datasets(source) and "Json(" not in repr((source.features or {}).get("prompt"))


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def open_eval_rows(source: Any, split: str | None, config: str | None, trained: Any, folder: Path | None) -> Rows:
    """Open the eval_dataset.

    Args:
        config: Configuration of `trained`, used if both are splits of one data set.
        trained: The data set that is trained on.

    Raises:
        ConfigError: It cannot be opened, or is the training data itself.
    """
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
    """Return an error about a data set as one about the eval_dataset, also where the text begins with the part of the
    task that does not fit its rows."""
    text = re.sub(r"\bTask\(dataset", "Task(eval_dataset", str(error))
    text = re.sub(_OF_ROWS, "Task(eval_dataset=...): ", text).replace("of the data set", "of the eval_dataset")
    return ConfigError(re.sub(r"(?<!eval_)\bdataset_split", "eval_dataset_split", text))


def check_evaluation(config: RunConfig, eval_dataset: Any) -> None:
    """Raise `ConfigError` for evaluations without an eval_dataset."""
    settings = config.eval
    if settings.is_on and eval_dataset is None:
        on = next(name for name in ("every", "at_start", "at_end") if getattr(settings, name))
        raise ConfigError(
            f"eval.{on} = {str(getattr(settings, on)).lower()}, and the task {config.task.path} has no rows to "
            f"evaluate on: give Task(eval_dataset=...), or leave out eval.{on}"
        )


def find_evaluation_warnings(config: RunConfig, eval_dataset: Any) -> list[Finding]:
    """Find an eval_dataset or settings of [eval] that are never read, and evaluations that are never made."""
    settings, steps = config.eval, config.learner.steps
    unread = ["Task(eval_dataset=...)"] if not settings.is_on and eval_dataset is not None else []
    if unread := unread + [f"eval.{name}" for name in settings.unread]:
        text = f"{', '.join(unread)}: never read, since {_OFF}"
        return [Finding("warning", text, "set one of them for evaluations")]
    if config.learner.epochs is None and settings.every and settings.every > steps:
        text = f"eval.every = {settings.every} is beyond the last step, learner.steps = {steps}"
        return [Finding("warning", text, "lower eval.every, or set eval.at_end")]
    return []


def count_eval_rows(rows: Rows, wanted: int | str) -> int:
    """Return the maximum number of rows of an evaluation: all there are, or of an iterable at most `wanted`. Raises
    `ConfigError` where all rows of an iterable are wanted."""
    if rows.size is not None:
        return rows.size
    if isinstance(wanted, str):
        raise ConfigError(
            f"eval.rows = {wanted}, and Task(eval_dataset=...) is an iterable, whose number of rows is not known: set "
            f"eval.rows to how many of them an evaluation is to take"
        )
    seen = sum(1 for _ in rows.sample(wanted))
    return seen if rows.size is None else rows.size


@dataclass(frozen=True, slots=True)
class RowSample:
    """The rows of one data set that checks look at before a run, and how messages name that data set.

    Attributes:
        rows: All rows.
        sample: Gives up to a number of rows that a run takes, each with its number, as `Rows.sample`.
        given: How the data set is given, such as `task.path = multiply.py`.
        suffix: Follows "prompts" and "rows" in messages: empty, or " of the eval_dataset".
        lost: Consequence for a row that cannot be used, such as "will be dropped".
        evaluated: Whether it is the eval_dataset.
    """

    rows: Rows
    sample: Callable[[int], Iterator[tuple[int, Any]]]
    given: str
    suffix: str
    lost: str
    evaluated: bool = False

    @property
    def first(self) -> Any:
        """The first row; None where there is none."""
        return next((row for _, row in self.sample(1)), None)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Have errors about rows name this data set."""
        try:
            yield
        except ConfigError as error:
            raise (named_eval(error) if self.evaluated else error) from None
