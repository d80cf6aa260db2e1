"""Copies of a store as a whole: backups next to a running queue, the move to PostgreSQL, and the way back."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.rollout_queue import store as stores
from slipstream.rollout_queue.store import copying
from slipstream.rollout_queue.store.base import Store
from slipstream.rollout_queue.store.changes import Changes
from slipstream.rollout_queue.store.sqlite import SqliteStore
from slipstream.rollout_queue.store.sqlite_file import FILE_NAME
from tests.kit import config
from tests.kit.postgres import cluster
from tests.kit.stores import active, in_every_table, with_store

IDS = [f"{index}.0" for index in range(40)]
EVERYTHING = in_every_table(len(IDS), pruned_below=3)


@pytest.fixture(params=["sqlite", "postgresql"])
def run_config(request: pytest.FixtureRequest, tmp_path: Path) -> RunConfig:
    return with_store(request.param, tmp_path)


@pytest.fixture
def store(run_config: RunConfig) -> Iterator[Store]:
    with closing(active(run_config)) as store:
        store.commit(EVERYTHING)
        yield store


def test_a_backup_beside_a_running_queue_is_a_store_of_its_own(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    file = tmp_path / "backups" / FILE_NAME
    file.parent.mkdir()
    rows = copying.back_up(stores.open_for_reading(run_config), file)
    assert (rows["tickets"], rows["payloads"], rows["sums"], rows["evaluation_tickets"]) == (37, 37, 1, 1)
    assert [path.name for path in file.parent.iterdir()] == [FILE_NAME], "one file, whole"
    before, held = store.load(), store.payloads(IDS)
    store.commit(Changes(let_go=frozenset(IDS)))
    with closing(SqliteStore(file)) as restored:
        assert restored.acquire() is None
        assert restored.load() == before
        assert restored.payloads(IDS) == held
        assert len(held) == 37
        restored.commit(Changes(let_go=frozenset(IDS)))


def test_a_backup_replaces_no_file(store: Store, run_config: RunConfig, tmp_path: Path) -> None:
    file = tmp_path / "backup.db"
    file.write_text("precious")
    with pytest.raises(ConfigError, match=r"backup\.db is there already: choose another file"):
        copying.back_up(stores.open_for_reading(run_config), file)
    with pytest.raises(ConfigError, match=r"nowhere/backup\.db: cannot be written.*choose another place"):
        copying.back_up(stores.open_for_reading(run_config), tmp_path / "nowhere" / "backup.db")
    assert file.read_text() == "precious"


def test_a_damaged_store_gives_no_backup(tmp_path: Path) -> None:
    run_config = config(run={"dir": str(tmp_path)})
    path = run_config.run_dir / FILE_NAME
    with closing(active(run_config)) as store:
        store.commit(EVERYTHING)
    with closing(sqlite3.connect(path)) as db:
        root = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'tickets'").fetchone()[0]
        page = db.execute("PRAGMA page_size").fetchone()[0]
    with path.open("r+b") as file:
        file.seek((root - 1) * page + 8)
        file.write(b"\xff" * 64)
    with pytest.raises(ConfigError, match=r"queue\.db|backup\.db"):
        copying.back_up(stores.open_for_reading(run_config), tmp_path / "backup.db")
    assert not (tmp_path / "backup.db").exists()


def test_a_run_without_a_store_has_no_backup(run_config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no store; has the run's queue been started"):
        copying.back_up(stores.open_for_reading(run_config), tmp_path / "backup.db")
    in_memory = config(run={"dir": str(tmp_path)}, queue={"store": ":memory:"})
    with pytest.raises(ConfigError, match=r'queue\.store = ":memory:" keeps nothing that could be copied'):
        copying.back_up(stores.open_for_reading(in_memory), tmp_path / "backup.db")
    assert list(tmp_path.iterdir()) == []


def test_a_standing_run_moves_to_postgresql_whole(tmp_path: Path) -> None:
    here = config(run={"dir": str(tmp_path)})
    there = config(run={"dir": str(tmp_path)}, queue={"store": cluster().new_database()})
    with pytest.raises(ConfigError, match=r"there is no .*queue\.db to copy from"):
        copying.move_to_postgres(here, there)
    with pytest.raises(ConfigError, match=r"out of its SQLite store alone.*give --queue\.store sqlite"):
        copying.move_to_postgres(there, there)
    with closing(active(here)) as store:
        store.commit(EVERYTHING)
        before, held = store.load(), store.payloads(IDS)
        with pytest.raises(ConfigError, match="is in use by another queue"):
            copying.move_to_postgres(here, there)
    with closing(active(there)), pytest.raises(ConfigError, match=r"the queue at http.* uses the run's schema"):
        copying.move_to_postgres(here, there)
    rows = copying.move_to_postgres(here, there)
    assert (rows["tickets"], rows["payloads"]) == (37, 37)
    with closing(active(there)) as moved:
        assert moved.load() == before
        assert moved.payloads(IDS) == held
    with pytest.raises(ConfigError, match=r"it holds a run run already: choose another run\.name"):
        copying.move_to_postgres(here, there)
