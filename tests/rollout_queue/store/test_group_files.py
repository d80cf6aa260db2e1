"""The files of groups next to the SQLite file: kept through a restart, damage, a cut, and a backup meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.protocol.config import ConfigError
from slipstream.rollout_queue.ledger.records import TicketRecord, TicketState
from slipstream.rollout_queue.store import copying, group_files, sqlite_file
from slipstream.rollout_queue.store.base import StoreError
from slipstream.rollout_queue.store.changes import Changes, Payload
from slipstream.rollout_queue.store.sqlite import SqliteReader, SqliteStore
from slipstream.rollout_queue.store.sqlite_file import FILE_NAME, groups_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_files, "FILE_BYTES", 50_000)


def active(path: Path) -> SqliteStore:
    store = SqliteStore(path)
    assert store.acquire() is None
    return store


def body(name: str, size: int = 20_000) -> Payload:
    return Payload.of(name.encode() * (size // len(name)))


def ready(*names: str) -> Changes:
    tickets = {name: TicketRecord(int(name[:-2]), 0, 0, "w", 0, TicketState.READY) for name in names}
    return Changes(tickets=tickets, payloads={name: body(name) for name in names})


def let_go(*names: str) -> Changes:
    tickets = {name: TicketRecord(int(name[:-2]), 0, 0, "w", 0, TicketState.FORGOTTEN, step=1) for name in names}
    return Changes(tickets=tickets, let_go=frozenset(names))


def ids(*indices: int) -> list[str]:
    return [f"{index}.0" for index in indices]


def files(path: Path) -> list[Path]:
    return sorted(groups_of(path).iterdir())


def test_a_body_is_written_once_and_kept_through_restarts(path: Path) -> None:
    with closing(active(path)) as store:
        store.commit(ready("0.0"))
        store.commit(ready("1.0"))
        assert store.size().bytes >= 40_000
    assert sum(file.stat().st_size for file in files(path)) < 41_000
    assert path.stat().st_size < 200_000
    for _ in range(3):
        with closing(active(path)) as store:
            assert store.payloads(ids(0, 1, 2)) == {name: body(name) for name in ids(0, 1)}
    assert len(files(path)) == 1, "a start writes nothing"


def test_a_file_goes_with_the_last_of_its_groups(path: Path) -> None:
    with closing(active(path)) as store:
        for index in range(9):
            store.commit(ready(f"{index}.0"))
        assert len(files(path)) == 3
        largest = store.size().bytes
        store.commit(let_go(*ids(0, 1, 2, 4, 5)))
        assert len(files(path)) == 2
        assert store.size().bytes < largest - 50_000
        assert set(store.payloads(ids(*range(9)))) == set(ids(3, 6, 7, 8))
        store.commit(let_go(*ids(3, 6, 7, 8)))
        store.commit(ready("10.0"))
        assert len(files(path)) == 1
    with closing(active(path)) as store:
        assert store.payloads(ids(*range(11))) == {"10.0": body("10.0")}


def test_what_a_killed_queue_wrote_and_did_not_commit_is_gone_after_the_next_start(path: Path) -> None:
    with closing(active(path)) as store:
        store.commit(ready("0.0"))
        with store._groups.written({"1.0": body("1.0")}):
            pass
        with store._groups.written({name: body(name) for name in ids(2, 3)}):
            pass
    with closing(active(path)) as store:
        assert set(store.payloads(ids(0, 1, 2, 3))) == {"0.0"}
        store.commit(ready(*ids(1, 4)))
        assert store.payloads(ids(1, 4)) == {name: body(name) for name in ids(1, 4)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.data())
def test_a_body_is_right_or_known_to_be_wrong_wherever_a_file_was_cut_or_changed(tmp_path: Path, data: Any) -> None:
    path = tmp_path / str(len(list(tmp_path.iterdir()))) / FILE_NAME
    names = ids(*range(4))
    with closing(active(path)) as store:
        store.commit(Changes(tickets=ready(*names).tickets, payloads={name: body(name, 200) for name in names}))
    (file,) = files(path)
    held = bytearray(file.read_bytes())
    each = len(held) // len(names)
    at = data.draw(st.integers(0, len(held) - 1))
    if data.draw(st.booleans()):
        del held[at:]
    else:
        held[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(held)
    with closing(active(path)) as store:
        found = store.payloads(names)
        sound = [name for name, payload in found.items() if payload.sound_body is not None]
        assert {name: found[name] for name in sound} == {name: body(name, 200) for name in sound}
        before = names[: at // each]
        assert sound[: len(before)] == before, "what lies before it is untouched"
        assert len(sound) < len(names)
        store.commit(ready("9.0"))
        assert store.payloads(["9.0"]) == {"9.0": body("9.0")}


def test_a_body_without_a_checksum_that_was_cut_off_is_not_taken_for_whole(path: Path) -> None:
    with closing(active(path)) as store:
        store.commit(Changes(tickets=ready("0.0").tickets, payloads={"0.0": Payload(b"older" * 100, None)}))
        os.truncate(files(path)[0], files(path)[0].stat().st_size - 1)
        assert store.payloads(["0.0"]) == {}


@pytest.mark.parametrize(
    "harm", [Path.unlink, lambda file: os.truncate(file, 30_000), lambda file: file.write_bytes(b"")]
)
def test_a_newest_file_that_is_taken_away_under_the_queue_ends_it(path: Path, harm: Callable[[Path], object]) -> None:
    with closing(active(path)) as store:
        store.commit(ready(*ids(0, 1)))
        harm(files(path)[-1])
        with pytest.raises(StoreError, match=r"000001\.groups was deleted, replaced or cut off.*start the queue again"):
            store.commit(ready("2.0"))
        assert set(store.records(ids(0, 1, 2))) == set(ids(0, 1))
    with closing(active(path)) as store:
        store.commit(ready("2.0"))


def test_a_full_disk_leaves_no_half_of_a_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a part of what is written, then nothing."""
    writev = os.writev
    with closing(active(path)) as store:
        store.commit(ready("0.0"))
        size = files(path)[0].stat().st_size
        with monkeypatch.context() as full:

            def a_part(file: int, parts: Any) -> int:
                return writev(file, [parts[0], parts[1][:1000]])

            def nothing(file: int, data: Any) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

            full.setattr(os, "writev", a_part)
            full.setattr(os, "write", nothing)
            with pytest.raises(StoreError, match=r"queue\.db failed: .*No space left on device; free or repair"):
                store.commit(ready("1.0"))
        assert files(path)[0].stat().st_size == size
        with monkeypatch.context() as slow:
            slow.setattr(os, "writev", a_part)
            store.commit(ready("2.0"))
        assert store.payloads(ids(0, 1, 2)) == {name: body(name) for name in ids(0, 2)}


def test_too_many_open_files_are_not_blamed_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(file: int, parts: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with closing(active(path)) as store:
        monkeypatch.setattr(os, "writev", nothing)
        with pytest.raises(StoreError, match=r"Too many open files; raise the limit of open files \(ulimit -n"):
            store.commit(ready("0.0"))


def test_a_backup_has_every_group_of_its_moment_while_a_queue_deletes_others(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the folder comes after the ledger was read, and files may have gone in between."""
    store = active(path)
    for index in range(12):
        store.commit(ready(f"{index}.0"))
    gone = iter(range(0, 8, 3))
    link_into = group_files.GroupFiles.link_into

    def late(self: group_files.GroupFiles, folder: Path) -> None:
        with contextlib.suppress(StopIteration):
            first = next(gone)
            store.commit(let_go(*ids(first, first + 1, first + 2)))
        link_into(self, folder)

    monkeypatch.setattr(group_files.GroupFiles, "link_into", late)
    rows = copying.back_up(SqliteReader(path), tmp_path / "backup.db")
    assert rows["payloads"] == 12 - 3, "the second look found all: those that went since were linked by then"
    with closing(sqlite3.connect(tmp_path / "backup.db")) as db:
        held = dict(db.execute("SELECT id, body FROM payloads"))
        assert {name for (name,) in db.execute("SELECT id FROM tickets WHERE state = 'ready'")} == set(held)
    assert held == {name: body(name).body for name in ids(*range(3, 12))}
    assert not list(tmp_path.glob(".*")), "links would keep all that is deleted later"
    store.close()


def test_a_backup_that_is_killed_leaves_nothing_that_the_next_one_does_not_delete(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(active(path)) as store:
        store.commit(ready(*ids(0, 1)))
    link_into = group_files.GroupFiles.link_into

    def killed(self: group_files.GroupFiles, folder: Path) -> None:
        link_into(self, folder)
        os._exit(9)

    if not (child := os.fork()):
        monkeypatch.setattr(group_files.GroupFiles, "link_into", killed)
        copying.back_up(SqliteReader(path), tmp_path / "backup.db")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert files(path)[0].stat().st_nlink == 2
    with sqlite_file.folder_of_links(path), pytest.raises(ConfigError, match="another backup of it is under way"):
        copying.back_up(SqliteReader(path), tmp_path / "backup.db")
    with monkeypatch.context() as without_links:

        def refuse(*_: Any) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        without_links.setattr(os, "link", refuse)
        with pytest.raises(ConfigError, match=r"queue\.db: cannot be backed up: .*not permitted; .*hard links"):
            copying.back_up(SqliteReader(path), tmp_path / "backup.db")
    assert copying.back_up(SqliteReader(path), tmp_path / "backup.db")["payloads"] == 2
    assert files(path)[0].stat().st_nlink == 1


def test_a_group_that_is_lost_does_not_keep_a_backup_from_ending(path: Path, tmp_path: Path) -> None:
    with closing(active(path)) as store:
        for index in range(4):
            store.commit(ready(f"{index}.0"))
    files(path)[0].unlink()
    assert copying.back_up(SqliteReader(path), tmp_path / "backup.db")["payloads"] == 1


@pytest.fixture
def older(path: Path) -> Path:
    """A file of the layout in which bodies were rows."""
    with closing(active(path)) as store:
        store.commit(Changes(tickets=ready(*ids(*range(100))).tickets))
        rows = [(name, body(name).body, body(name).checksum) for name in ids(*range(100))]
        store._db.executemany("INSERT INTO payloads (id, body, checksum) VALUES (?, ?, ?)", rows)
    return path


def test_an_older_file_takes_no_more_than_its_groups_once_more_even_where_its_migration_was_killed(
    older: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(sqlite3.Connection):
        def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
            if statement == "VACUUM":
                raise KeyboardInterrupt
            return super().execute(statement, *arguments)

    connect = sqlite3.connect
    with monkeypatch.context() as killed:
        killed.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **named, factory=Killed))
        store = SqliteStore(older)
        with pytest.raises(KeyboardInterrupt):
            store.acquire()
        assert store.size().log_bytes < 500_000, "the log has the deleted bodies, too"
        store.close()
    assert older.stat().st_size > 2_000_000
    with closing(active(older)) as store:
        assert older.stat().st_size < 200_000
        assert store.payloads(ids(*range(100))) == {name: body(name) for name in ids(*range(100))}


@pytest.fixture
def backup(path: Path, tmp_path: Path) -> Path:
    with closing(active(path)) as store:
        store.commit(ready(*ids(0, 1)))
        copying.back_up(SqliteReader(path), tmp_path / "backup.db")
        store.commit(let_go("0.0"))
        store.commit(Changes(tickets=ready("2.0").tickets, payloads={"2.0": Payload.of(b"newer")}))
    return tmp_path / "backup.db"


def test_a_backup_that_is_put_back_beside_the_newer_files_takes_its_own(path: Path, backup: Path) -> None:
    backup.replace(path)
    for end in ("-wal", "-shm"):
        Path(f"{path}{end}").unlink(missing_ok=True)
    with closing(active(path)) as store:
        assert store.payloads(ids(0, 1, 2)) == {name: body(name) for name in ids(0, 1)}
        assert path.stat().st_size < 100_000, "what was moved out is not kept twice"
        store.commit(ready("2.0"))
        assert store.payloads(["2.0"]) == {"2.0": body("2.0")}
    with closing(active(path)) as store:
        assert store.payloads(ids(0, 1, 2)) == {name: body(name) for name in ids(0, 1, 2)}
