"""From what a task names as its data set to rows: in memory, an iterable, a file, or a name on the hub."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from protocol.config import ConfigError
from rollout_worker.data import files
from rollout_worker.data.rows import Rows, Stream, Table

# A sequence of rows (a `datasets.Dataset` is one); an iterable that can be iterated again and again; a function that
# makes either, or a generator; a file, folder, glob or name on the hub.
DataSource: TypeAlias = Sequence[Mapping[str, Any]] | Iterable[Mapping[str, Any]] | Callable[[], Any] | str | Path

_FORMS = (
    "a list of dicts, a datasets.Dataset, an iterable, a function that makes one of these, a file such as "
    "'rows.jsonl', or a data set's name on the hub"
)


def is_lazy(source: Any) -> bool:
    """Whether rows of it are only to be had by reading files, the network or a stream, or by running code."""
    if isinstance(source, str | Path):
        return True
    return (isinstance(source, Iterable) or callable(source)) and not (
        _is_table(source) or isinstance(source, Iterator)
    )


def open_rows(source: Any, split: str | None = None, config: str | None = None, folder: Path | None = None) -> Rows:
    """The rows of `source`; files are read, and what is on the hub is downloaded.

    split, config: which part of a data set on the hub, or of a folder. folder: where a relative path is looked up,
    before the working directory. Raises `ConfigError`.
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
        return Table(source, _is_of_datasets(source))
    if isinstance(source, Iterator):
        raise ConfigError(
            f"Task(dataset=...) is a {type(source).__name__}, which can be read once only, and every worker and epoch "
            f"reads it again; give the function that makes it, or a list"
        )
    if isinstance(source, Iterable):
        is_arrow = _is_of_datasets(source)
        skip = _skipping(source) if is_arrow else None
        return Stream(lambda epoch: _iteration(source, epoch), is_arrow, skip=skip)
    if callable(source):
        return _rows_made_by(source)
    raise ConfigError(f"Task(dataset=...) is a {type(source).__name__}; give {_FORMS}")


def _rows_made_by(function: Callable[[], Any]) -> Rows:
    """Of a function that makes the data set, once, or an iteration of it, for each epoch."""
    try:
        made = function()
    except ConfigError:
        raise
    except Exception as error:  # the function is the user's
        raise ConfigError(f"Task(dataset={_name(function)}) fails: {type(error).__name__}: {error}") from error
    if isinstance(made, Iterator):
        return Stream(lambda epoch: iter(function()))
    if callable(made):
        raise ConfigError(f"Task(dataset={_name(function)}) gives a {type(made).__name__}; it is to give rows")
    return _rows_of(made)


def _iteration(source: Iterable[Any], epoch: int) -> Iterator[Any]:
    # A streamed data set that was shuffled has an order for each epoch.
    if callable(set_epoch := getattr(source, "set_epoch", None)):
        set_epoch(epoch)
    return iter(source)


def _skipping(source: Any) -> Callable[[int], Iterator[Any]]:
    """From a row of the first epoch on: `datasets` passes over rows without reading them."""
    return lambda number: iter(source.skip(number))


def _is_table(source: Any) -> bool:
    return hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, str | type)


def _is_of_datasets(source: Any) -> bool:
    """Whether it is a data set of the `datasets` library, which is made of Arrow tables."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(source, library.Dataset | library.IterableDataset)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
