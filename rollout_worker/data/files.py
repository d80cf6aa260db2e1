"""Loads a data set that a task names by its path or by its name on the hub.

JSON lines and JSON are read here, so that a worker needs no other package for them. The `datasets` library reads
everything else, and any data set with a split; its cache is shared by all workers of a machine.

Rows of JSON lines stay in their files. Memory holds only the place of each line. Files stay open, and an open file
keeps its content when another file replaces it, as editors do.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import re
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

from slipstream.protocol.config import ConfigError

_MARK = b"\xef\xbb\xbf"  # some programs write this byte order mark before UTF-8

# Maps endings of files to the loader of `datasets` that reads them.
_LOADERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}

_KINDS = f"{', '.join(_LOADERS)}, each also with .gz"

_OWN = "json"

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w][\w.-]*)?")

_MAX_NAMED = 8


class JsonLines(Sequence[dict[str, Any]]):
    """Reads the objects of one or several files, one a line, and skips empty lines.

    It is safe to read from several threads. The content of a file that ends in .gz is held in memory.

    Args:
        files: Files of JSON lines, in order.

    Raises:
        ConfigError: A file cannot be opened. Also raised later, on access to a line that is not an object.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._read: list[Callable[[int, int], bytes]] = []
        self._file, self._start, self._size = array("q"), array("q"), array("q")
        for number, file in enumerate(files):
            with open_text(file) as text:
                self._find_lines(number, text)
                self._read.append(self._reader(file, text))

    def __len__(self) -> int:
        return len(self._start)

    def __getitem__(self, number: Any) -> Any:
        read, start = self._read[self._file[number]], self._start[number]
        try:
            row = json.loads(read(start, self._size[number]))
        except (ValueError, RecursionError) as error:
            raise self._wrong(number, f"is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise self._wrong(number, f"is a {type(row).__name__}, not an object")
        return row

    def _find_lines(self, number: int, text: IO[bytes]) -> None:
        place = 0
        for line in text:
            skipped = len(_MARK) if not place and line.startswith(_MARK) else 0
            if line[skipped:].strip():
                self._file.append(number)
                self._start.append(place + skipped)
                self._size.append(len(line) - skipped)
            place += len(line)

    def _reader(self, file: Path, text: IO[bytes]) -> Callable[[int, int], bytes]:
        """Return a function of `start` and `size` that reads `size` bytes of a file's content from byte `start`."""
        if file.suffix == ".gz":
            text.seek(0)
            content = text.read()
            return lambda start, size: content[start : start + size]
        descriptor = os.dup(text.fileno())
        weakref.finalize(self, os.close, descriptor)
        return lambda start, size: os.pread(descriptor, size, start)

    def _wrong(self, number: int, what: str) -> ConfigError:
        file = self._file[number]
        line = 1 + self._read[file](0, self._start[number]).count(b"\n")
        return ConfigError(f"Task(dataset=...): {self._files[file]} line {line} {what}; write one object a line")


def open_text(file: Path) -> IO[bytes]:
    """Open a file's decompressed content at its start.

    Raises:
        ConfigError: The file cannot be opened.
    """
    try:
        return cast(IO[bytes], gzip.open(file)) if file.suffix == ".gz" else file.open("rb")
    except OSError as error:
        raise ConfigError(f"Task(dataset=...): {file} cannot be read: {error.strerror}") from None


def load_data_files(name: str, split: str | None, config: str | None, folder: Path | None) -> Any:
    """Load a data set as a sequence of rows.

    Args:
        name: A file, a glob or a folder; or a name on the hub.
        split: Name of the split; None for "train" where a data set has splits.
        config: Name of the data set's configuration; None for its default.
        folder: Folder in which paths are looked up first, before the working directory.

    Raises:
        ConfigError: The data set is not found or cannot be loaded.
    """
    places = [place for place in dict.fromkeys([folder, Path()]) if place is not None]
    found = next((files for place in places if (files := _find(place, name))), None)
    try:
        if found is not None:
            return _read(name, found, split, config)
        _refuse_a_path(name, places)
        return _library(name).load_dataset(name, config, split=split or "train")
    except ConfigError:
        raise
    except Exception as error:  # the library raises many types, depending on what is missing or broken
        # The error itself says only that a data set could not be generated.
        while type(error).__name__ == "DatasetGenerationError" and isinstance(error.__cause__, Exception):
            error = error.__cause__
        first = (str(error).strip().splitlines() or ["it does not say why"])[0]
        remedy = "fix it, or say with dataset_config and dataset_split which part of it"
        if isinstance(error, ConnectionError):
            remedy = "give the path of a copy, or start where the hub can be reached"
        if found is None:
            remedy = f"{remedy}; there is no file of that name (the kinds are {_KINDS})"
        raise ConfigError(
            f"Task(dataset={name!r}) cannot be loaded: {type(error).__name__}: {first:.400}; {remedy}"
        ) from error


def _find(place: Path, name: str) -> list[Path]:
    """Return the files, or the folder, that `name` means relative to `place`."""
    path = place / Path(name).expanduser()
    if path.exists():
        return [path]
    if not glob.has_magic(name):
        return []
    return sorted(file for found in glob.glob(str(path), recursive=True) if (file := Path(found)).is_file())


def _read(name: str, files: list[Path], split: str | None, config: str | None) -> Any:
    if files[0].is_dir():
        return _read_folder(name, files[0], split, config)
    loaders = {_loader(name, file) for file in files}
    if len(loaders) > 1:
        raise ConfigError(f"Task(dataset={name!r}) matches files of several kinds: {_named(files)}; name one kind")
    (loader,) = loaders
    if loader == _OWN and split is None and config is None:
        return _json(name, files)
    options = {"delimiter": "\t"} if loader == "csv" and ".tsv" in files[0].suffixes else {}
    data_files = [str(file.absolute()) for file in files]
    return _library(name).load_dataset(loader, config, data_files=data_files, split=split or "train", **options)


def _read_folder(name: str, folder: Path, split: str | None, config: str | None) -> Any:
    """Load a folder that `save_to_disk` wrote, one with a single data file, or one with the layout of the hub."""
    if (folder / "dataset_dict.json").is_file():
        splits = _library(name).load_from_disk(str(folder))
        if (split or "train") not in splits:
            raise ConfigError(
                f"Task(dataset={name!r}, dataset_split={split!r}): it has the splits {', '.join(splits)}; name one"
            )
        return splits[split or "train"]
    if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
        return _library(name).load_from_disk(str(folder))
    files = sorted(file for file in folder.iterdir() if file.is_file() and _kind(file) in _LOADERS)
    if len(files) == 1:
        return _read(name, files, split, config)
    return _library(name).load_dataset(str(folder.absolute()), config, split=split or "train")


def _json(name: str, files: list[Path]) -> Any:
    """Load JSON files. Rows of files of lines stay in the files; a list is held in memory."""
    lists = [_json_list(name, file) if _kind(file) == ".json" else None for file in files]
    if not any(rows is not None for rows in lists):
        return JsonLines(files)
    return [
        row for file, rows in zip(files, lists, strict=True) for row in (JsonLines([file]) if rows is None else rows)
    ]


def _json_list(name: str, file: Path) -> list[Any] | None:
    """Return the list that a JSON file holds; None if it holds an object a line.

    Raises:
        ConfigError: It holds neither a list of objects nor an object a line.
    """
    with open_text(file) as text:
        first = next((line.lstrip(b"\xef\xbb\xbf").strip() for line in text if line.strip()), b"")
        if first.startswith(b"{"):
            try:
                json.loads(first)
            except ValueError:
                raise ConfigError(
                    f"Task(dataset={name!r}): {file} begins with an object over several lines; give a list of rows, "
                    f"written [...], or one object a line"
                ) from None
            return None
        text.seek(0)
        content = text.read()
    rows = json.loads(content.removeprefix(b"\xef\xbb\xbf")) if content.strip() else []
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"Task(dataset={name!r}): {file} is not a list of objects; write each row as one object")
    return rows


def _loader(name: str, file: Path) -> str:
    if (loader := _LOADERS.get(_kind(file))) is None:
        raise ConfigError(f"Task(dataset={name!r}): {file} is of no kind that is known; the kinds are {_KINDS}")
    return loader


def _kind(file: Path) -> str:
    """Return a file's ending in lower case, without .gz."""
    return (Path(file.stem) if file.suffix == ".gz" else file).suffix.lower()


def _refuse_a_path(name: str, places: list[Path]) -> None:
    """Refuse a name that can only be meant as a path.

    Raises:
        ConfigError: The name is a path and no file matches it. The text names similar files.
    """
    parents = [(place / Path(name).expanduser()).parent for place in places]
    in_known_folder = "/" in name and any(parent.is_dir() for parent in parents)
    if _HUB_NAME.fullmatch(name) and _kind(Path(name)) not in _LOADERS and not in_known_folder:
        return
    what = "no file matches it" if glob.has_magic(name) else "there is no such file or folder"
    beside = sorted({file.name for parent in parents if parent.is_dir() for file in parent.iterdir()})
    data = [file for file in beside if _kind(Path(file)) in _LOADERS]
    near = get_close_matches(Path(name).name, beside, n=_MAX_NAMED, cutoff=0.5) or data
    there = f"; there is {', '.join(near[:_MAX_NAMED])}" if near else ""
    looked = " and ".join(dict.fromkeys(str(parent.absolute()) for parent in parents))
    raise ConfigError(f"Task(dataset={name!r}): {what} in {looked}{there}")


def _library(name: str) -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"Task(dataset={name!r}) needs the datasets library: pip install 'slipstream-rl[data]'; JSON lines and "
            f"JSON files are read without it"
        ) from None
    datasets.disable_progress_bars()  # the bars of several workers would mix
    return datasets  # type: ignore[no-any-return]


def _named(files: list[Path]) -> str:
    more = f" and {len(files) - _MAX_NAMED} more" if len(files) > _MAX_NAMED else ""
    return ", ".join(file.name for file in files[:_MAX_NAMED]) + more
