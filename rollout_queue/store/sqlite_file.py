"""The file of the SQLite store: opens it, finds damage, and notices when it is taken away under a running queue."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from slipstream.protocol.config import ConfigError
from slipstream.rollout_queue.store.base import StoreError, hold_lock_file
from slipstream.rollout_queue.store.migrations import FIRST_LAYOUT, layout_of, migrate, newest_layout

logger = logging.getLogger(__name__)

FILE_NAME = "queue.db"

# SQLite's own next to it: its write-ahead log, which holds the newest commits, and the index over that.
LOG, INDEX = "-wal", "-shm"

# SQLite cuts a longer log off to this size once all of it is in the file; a shorter one never gets smaller.
KEPT_LOG_BYTES = 64 * 1024**2

# Seconds that the look through the payloads may take at the start. Each of them has a checksum besides.
MAX_CHECK_S = 5.0

# Errors that pass: the file itself is sound.
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def groups_of(path: Path) -> Path:
    """Return the folder of a file's groups."""
    return path.with_name(f"{path.stem}-groups")


def restore(path: Path) -> str:
    """Return what to do about a file that cannot be used."""
    return (
        f"move it away with its {path.name}{LOG} and {path.name}{INDEX}, put a backup in its place if you have one "
        f"(slipstream queue backup makes one), and start the queue again"
    )


def failed(path: Path, error: sqlite3.Error | OSError) -> StoreError:
    """Return the error of a store in use, with its remedy."""
    if isinstance(error, sqlite3.Error) and _code(error) in _DAMAGED:
        return damaged(path, error)
    if isinstance(error, sqlite3.Error) and is_locked(error):
        return StoreError(
            f"the queue's store {path}: {error} by another program: end that one (fuser {path} names it), then start "
            f"the queue again"
        )
    remedy = "free or repair its disk"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "raise the limit of open files (ulimit -n, LimitNOFILE= of systemd)"
    return StoreError(f"the queue's store {path} failed: {error}; {remedy}, then start the queue again")


def is_locked(error: sqlite3.Error) -> bool:
    """Tell whether another program has the file locked."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def damaged(path: Path, error: Exception) -> StoreError:
    """Return the error of a store that holds what nobody wrote, with its remedy."""
    return StoreError(f"the queue's store {path} is damaged: {error}; {restore(path)}")


@contextlib.contextmanager
def only_queue(path: Path) -> Iterator[None]:
    """Hold the lock file next to the file. Raises `ConfigError` if a queue does, or if it cannot be written."""
    file = path.with_suffix(".lock")
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(hold_lock_file(file))
        except BlockingIOError:
            raise ConfigError(f"{path} is in use by another queue: stop that one, or choose another run.name") from None
        except OSError as error:
            raise ConfigError(
                f"{file}: cannot be written: {error.strerror}; give this user the right to, or choose another run.dir"
            ) from error
        yield


@contextlib.contextmanager
def folder_of_links(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to the file, for links to what a backup takes; they keep that on the disk.

    It is deleted afterwards. What a backup that was killed left is deleted first.

    Raises:
        ConfigError: Another backup is under way, or what is done in it fails for the disk.
    """
    folder = path.with_name(f".{path.stem}-backup")
    try:
        with hold_lock_file(path.with_suffix(".backup-lock")):
            shutil.rmtree(folder, ignore_errors=True)
            try:
                folder.mkdir()
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        raise ConfigError(f"{path}: another backup of it is under way: wait for its end") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be backed up: {error}; a backup makes hard links to the groups, in a folder next to it"
        ) from error


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file for a queue: create, check or migrate it. A lock file allows one queue.

    Raises:
        ConfigError: The file cannot be used.
        StoreError: It cannot be used now, as while another program has it locked.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_queue(path))
        log = Path(f"{path}{LOG}")
        # SQLite would throw such a log away, and begin again.
        if path.exists() and not path.stat().st_size and log.exists() and log.stat().st_size:
            raise ConfigError(f"{path} is empty, and its {log.name} is not: it was cut off; {restore(path)}")
        try:
            # check_same_thread: the broker calls from one thread of an executor, not from the one that opened it.
            db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            stack.enter_context(contextlib.closing(db))
            check_layout(db, path)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA secure_delete = OFF")  # some builds write zeros over all that is deleted
            db.execute("PRAGMA wal_autocheckpoint = 0")  # the store chooses the moment, since it waits for the disk
            db.execute(f"PRAGMA journal_size_limit = {KEPT_LOG_BYTES}")
            check_sound(db, path)
            migrate(db, str(path))
        except sqlite3.Error as error:
            if _code(error) in _PASSING:
                raise StoreError(
                    f"{path}: cannot be opened now: {error}; end what else has it open, or free its disk, then start "
                    f"the queue again"
                ) from error
            raise ConfigError(f"{path}: cannot be used as the queue's store: {error}; {restore(path)}") from error
        yield db


def check_layout(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that this release cannot read; raises `ConfigError`."""
    layout, newest = layout_of(db), newest_layout()
    if layout > newest:
        raise ConfigError(
            f"{path}: written by a newer release of Slipstream (layout {layout}, this one knows {newest}): upgrade, or "
            f"move it away"
        )
    if 0 < layout < FIRST_LAYOUT:
        raise ConfigError(
            f"{path}: written by an older checkout of Slipstream (layout {layout}, the oldest known here is "
            f"{FIRST_LAYOUT}): finish the run with that checkout, or choose a new run.name"
        )


def check_sound(db: sqlite3.Connection, path: Path) -> None:
    """Look through a file for damage: the records whole, then payloads for at most `MAX_CHECK_S`.

    Raises:
        ConfigError: It is damaged.
    """
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in sorted(tables, key=lambda name: name == "payloads"):
        timer = threading.Timer(MAX_CHECK_S, db.interrupt)
        if table == "payloads":
            timer.start()
        try:
            faults = [fault for (fault,) in db.execute(f"PRAGMA quick_check({table})") if fault != "ok"]
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_INTERRUPT:
                raise
            logger.warning("%s: its payloads were looked through for %g s, not to their end", path, MAX_CHECK_S)
            faults = []
        finally:
            timer.cancel()
            if timer.ident is not None:
                timer.join()  # else it may interrupt the statement after this one
        # SQLite says so, too, if it was interrupted while it wrote down what it found.
        if faults and faults != ["interrupted"]:
            raise ConfigError(f"{path} is damaged, in its {table}: {faults[0].splitlines()[-1]}; {restore(path)}")


def count_rows(db: sqlite3.Connection) -> dict[str, int]:
    """Return the number of rows of each table."""
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    return {name: db.execute(f"SELECT COUNT(*) FROM {name}").fetchone()[0] for name in names}


class FileWatch:
    """Notices that the files which a queue has open are no longer those that stand on the disk.

    SQLite itself continues writing into a file that was deleted, and what it commits is lost.
    """

    def __init__(self, path: Path) -> None:
        """Begin to watch. The log is there once something was committed."""
        self._path = path
        self._sizes: dict[str, int] = {}
        self._file = str(path)
        names = [f"{path}{end}" for end in ("", LOG, INDEX)]
        self._known = [(name, self._identity(name)) for name in names]

    def check(self) -> None:
        """Raise `StoreError` if a file was deleted, replaced or cut off."""
        for name, known in self._known:
            if self._identity(name) != known:
                raise StoreError(
                    f"the queue's store {self._path}: {Path(name).name} was deleted, replaced or cut off while the "
                    f"queue ran, and what was stored since may be lost: {restore(self._path)}"
                )

    def _identity(self, name: str) -> tuple[int, int] | None:
        try:
            found = os.stat(name)  # a Path's own is several times as slow, and each commit looks at three files
        except OSError:
            return None
        before = self._sizes.get(name, 0)
        if found.st_size < (before if name == self._file else min(before, KEPT_LOG_BYTES)):
            return None
        self._sizes[name] = found.st_size
        return (found.st_dev, found.st_ino) if found.st_size else None


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's primary code of an error; 0 if it has none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
