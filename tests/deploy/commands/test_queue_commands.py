"""`slipstream queue` and the commands that care for its store, as they are typed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.deploy import cli
from slipstream.protocol.config import load
from slipstream.rollout_queue import service
from slipstream.rollout_queue import store as stores
from slipstream.rollout_queue.ledger.records import RunState
from slipstream.rollout_queue.store.changes import Changes
from slipstream.rollout_queue.store.sqlite import SqliteReader
from tests.deploy.conftest import save_checkpoint
from tests.kit.postgres import cluster

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def slipstream(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command here; its exit code and what it printed."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["slipstream", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out + printed.err

    return run


def put(run_file: Path, version: int, *overrides: str) -> None:
    store = stores.build(load(run_file, [*overrides]))
    store.acquire()
    store.commit(Changes(run=RunState(version=version, id=f"run-{version}")))
    store.close()


def test_the_queue_starts_with_and_without_the_name_of_its_command(
    run_file: Path, slipstream: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(service, "serve", lambda config: started.append(config.queue.port))
    for words in (["queue"], ["queue", "run"]):
        assert slipstream(*words, run_file, "--queue.port", "8211") == (0, "")
    assert started == [8211, 8211]
    assert slipstream("queue", "backups", run_file)[0] == 2
    assert slipstream("queue", run_file, "--zebra", "1")[0] == 2


def test_a_backup_is_written_beside_a_running_queue_and_replaces_nothing(
    run_file: Path, slipstream: Run, tmp_path: Path
) -> None:
    file = tmp_path / "backup.db"
    code, said = slipstream("queue", "backup", run_file, file)
    assert (code, "there is no store; has the run's queue been started?" in said) == (2, True)
    store = stores.build(load(run_file))
    store.acquire()
    store.commit(Changes(run=RunState(version=7)))
    assert slipstream("queue", "backup", run_file, file) == (
        0,
        f"{file}: 0 tickets, 0 groups and 0 servers; read whole\n",
    )
    store.close()
    assert SqliteReader(file).run_state().version == 7
    code, said = slipstream("queue", "backup", run_file, file)
    assert (code, "is there already" in said) == (2, True)
    again = tmp_path / "again.db"
    code, said = slipstream("queue", "backup", run_file, again, "--json")
    told = json.loads(said)
    assert (code, told["file"], told["rows"]["tickets"]) == (0, str(again), 0)


def test_a_standing_run_is_copied_to_postgresql_and_its_new_line_is_printed(run_file: Path, slipstream: Run) -> None:
    url = cluster().new_database()
    put(run_file, 7)
    code, said = slipstream("queue", "copy", run_file, "--to", url)
    assert code == 0, said
    assert said.endswith(f'before the queue starts again:\nstore = "{url}"\n')
    assert stores.open_for_reading(load(run_file, ["--queue.store", url])).run_state().version == 7
    assert slipstream("queue", "copy", run_file, "--to", url)[0] == 2
    assert slipstream("queue", "copy", run_file, "--to", "sqlite")[0] == 2
    assert slipstream("ledger", run_file, "--queue.store", url) == (0, "")


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_new_ledger_puts_the_old_one_aside(run_file: Path, slipstream: Run, kind: str) -> None:
    chosen = ["--queue.store", cluster().new_database() if kind == "postgresql" else kind]
    folder = load(run_file).run_dir
    save_checkpoint(run_file)
    for number in (0, 1, 2):
        code, said = slipstream("queue", "new", run_file, *chosen)
        assert code == 0, said
        assert (f"put aside as old-store-{number}" in said) == (number > 0)
        run = stores.open_for_reading(load(run_file, chosen)).run_state()
        assert (run.version, bool(run.id)) == (0, True)
        put(run_file, number + 5, *chosen)
    if kind == "sqlite":
        assert SqliteReader(folder / "old-store-2" / "queue.db").run_state().version == 6
    store = stores.build(load(run_file, chosen))
    store.acquire()
    commands = [("queue", "new", run_file, *chosen)]
    if kind == "sqlite":
        commands.append(("queue", "copy", run_file, "--to", cluster().new_database()))
    for command in commands:
        code, said = slipstream(*command)
        assert (code, "is active on it: stop it first" in said, "run.name" in said) == (2, True, False)
    store.close()
    assert not (folder / "old-store-3").exists()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_mistyped_run_gets_no_ledger_and_the_runs_that_are_there_are_named(
    run_file: Path, slipstream: Run, kind: str
) -> None:
    chosen = ["--queue.store", cluster().new_database() if kind == "postgresql" else kind]
    save_checkpoint(run_file)
    typo = [*chosen, "--run.name", "smal"]
    code, said = slipstream("queue", "new", run_file, *typo)
    assert (code, "run.name = smal: there is no such run" in said, said.endswith("are: small\n")) == (2, True, True)
    config = load(run_file, typo)
    assert not config.run_dir.exists()
    assert not stores.open_for_reading(config).exists()
    put(run_file, 7, *typo)
    assert slipstream("queue", "new", run_file, *typo)[0] == 0


def test_a_copy_to_a_database_that_is_away_ends_at_once(run_file: Path, slipstream: Run) -> None:
    put(run_file, 7)
    code, said = slipstream("queue", "copy", run_file, "--to", "postgresql://127.0.0.1:1/runs")
    assert (code, "cannot be reached" in said, "start PostgreSQL" in said) == (2, True, True)


def test_a_store_in_memory_has_no_ledger_to_begin_anew(run_file: Path, slipstream: Run) -> None:
    put(run_file, 7)
    code, said = slipstream("queue", "new", run_file, "--queue.store", ":memory:")
    assert (code, "begins again with each start" in said) == (2, True)
    assert stores.open_for_reading(load(run_file)).run_state().version == 7
