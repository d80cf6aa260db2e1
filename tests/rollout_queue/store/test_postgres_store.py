"""PostgreSQL: one active queue, taken over from when it is silent, and connections that break at any moment."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psycopg
import pytest

from slipstream.protocol.config import ConfigError, QueueSection, RunConfig
from slipstream.rollout_queue.ledger.records import RowRecord, RunState, TicketRecord, TicketState
from slipstream.rollout_queue.store import build, postgres, postgres_database
from slipstream.rollout_queue.store.base import MAX_SILENCE_S, StoreError, Superseded
from slipstream.rollout_queue.store.changes import Changes, Payload
from slipstream.rollout_queue.store.copying import move_to_postgres
from slipstream.rollout_queue.store.postgres import PostgresStore
from slipstream.rollout_queue.store.postgres_database import LAYOUTS, Database, schema_of
from slipstream.rollout_queue.store.postgres_reader import PostgresReader
from tests.kit.config import config
from tests.kit.copies import start_function
from tests.kit.postgres import Cluster, cluster, killable_cluster
from tests.kit.relay import Relay, relay

RUN = "run-1.x"


@dataclass
class Place:
    """A database, in which stores are opened, and closed after the test."""

    url: str
    stack: ExitStack

    def store(self, name: str = "one", url: str | None = None) -> PostgresStore:
        database = Database(QueueSection(store=url or self.url), RUN)
        store = PostgresStore(database, f"http://{name}:8200")
        self.stack.callback(store.close)
        return store

    def active(self, name: str = "one", url: str | None = None) -> PostgresStore:
        store = self.store(name, url)
        assert store.acquire() is None
        return store

    def admin(self, statement: str) -> list[tuple[object, ...]]:
        database = self.url.rpartition("/")[2]
        return cluster().admin(f'SET search_path = "{schema_of(RUN)}"; {statement}', database)

    def reader(self) -> PostgresReader:
        return PostgresReader(Database(QueueSection(store=self.url), RUN))


@pytest.fixture
def place() -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(cluster().new_database(), stack)


@pytest.fixture
def between(place: Place) -> Iterator[Relay]:
    with relay(cluster().port) as between:
        yield between


def through(place: Place, between: Relay) -> str:
    return place.url.replace(f":{cluster().port}/", f":{between.port}/")


def one(index: int, **fields: int) -> Changes:
    record = TicketRecord(index, 0, index, "w", 0, TicketState.READY)
    return Changes(tickets={record.id: record}, payloads={record.id: Payload.of(b"x" * 100_000)}, **fields)


def stored(store: PostgresStore) -> set[int]:
    return {record.index for record in store.load().live}


def test_one_queue_is_active_and_the_next_takes_over_when_it_ends(place: Place) -> None:
    first, second = place.active(), place.store("two")
    assert second.acquire() == "http://one:8200"
    first.commit(one(1))
    first.close()
    assert second.acquire() is None
    assert stored(second) == {1}
    assert place.store("three").acquire() == "http://two:8200"


def test_runs_of_one_database_are_apart(place: Place) -> None:
    place.active().commit(one(1))
    other = PostgresStore(Database(QueueSection(store=place.url), "other"), "")
    place.stack.callback(other.close)
    assert other.acquire() is None
    assert stored(other) == set()


def test_the_names_of_long_runs_stay_apart() -> None:
    long = [schema_of("r" * 60 + end) for end in "ab"]
    assert len({*long, schema_of("R"), schema_of("r")}) == 4
    assert max(map(len, long)) <= 63


def test_a_silent_owner_is_disconnected_and_stores_nothing_more(place: Place) -> None:
    """As a stopped process, which keeps its connection and wakes up later."""
    first, second = place.active(), place.store("two")
    first.commit(one(1))
    place.admin(f"UPDATE owner SET seen_at = seen_at - INTERVAL '{MAX_SILENCE_S - 2} s'")
    assert second.acquire() == "http://one:8200", "it may only be slow"
    place.admin("UPDATE owner SET seen_at = seen_at - INTERVAL '3 s'")
    assert second.acquire() is None
    with pytest.raises(Superseded, match="another queue has become the active one on postgresql://"):
        first.commit(one(2))
    second.commit(one(3))
    assert stored(second) == {1, 3}


def commit_until_superseded(url: str, pipe: int) -> None:
    """Be an active queue, and say how it ended."""
    store = PostgresStore(Database(QueueSection(store=url), RUN), "http://stopped:8200")
    store.acquire()
    try:
        for index in range(100_000):
            store.commit(one(index))
            os.write(pipe, b".")
    except Superseded:
        os.write(pipe, b"superseded")


def test_i1_a_process_that_is_stopped_is_taken_over_from_and_ends_when_it_wakes_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "MAX_SILENCE_S", 0.5)
    said, theirs = os.pipe()
    process = start_function([postgres.__name__], commit_until_superseded, place.url, pipes=(theirs,))
    os.close(theirs)
    with os.fdopen(said, "rb") as answers:
        assert answers.read(20) == b"." * 20
        store = place.store("two")
        assert store.acquire() == "http://stopped:8200"
        process.send_signal(signal.SIGSTOP)
        while store.acquire() is not None:
            time.sleep(0.05)
        kept = stored(store)
        process.send_signal(signal.SIGCONT)
        rest = answers.read()
        assert rest.endswith(b"superseded")
        told = 20 + rest.count(b".")
    process.wait(30)
    assert stored(store) == kept
    assert kept >= set(range(told)), "what it was told is stored, is"


def test_empty_changes_show_that_the_owner_is_alive(place: Place) -> None:
    first, second = place.active(), place.store("two")
    place.admin(f"UPDATE owner SET seen_at = seen_at - INTERVAL '{MAX_SILENCE_S + 1} s'")
    first.commit(Changes())
    assert second.acquire() == "http://one:8200"


def test_an_epoch_that_another_has_raised_is_noticed_within_the_commit(place: Place) -> None:
    first = place.active()
    place.admin("UPDATE owner SET epoch = epoch + 1")
    with pytest.raises(Superseded):
        first.commit(one(1, prune_below=0))
    assert place.reader().read_ledger() == []


def test_a_connection_that_ended_is_made_anew_and_the_lock_taken_again(place: Place) -> None:
    first, second = place.active(), place.store("two")
    for index in range(3):
        place.admin("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'slipstream'")
        first.commit(one(index))
        assert second.acquire() == "http://one:8200"
    assert stored(first) == {0, 1, 2}


def test_a_queue_whose_lock_another_took_while_it_was_away_ends(place: Place) -> None:
    first, second = place.active(), place.store("two")
    place.admin("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'slipstream'")
    assert second.acquire() is None
    for work in (lambda: first.commit(one(1)), first.load):
        with pytest.raises(Superseded):
            work()


@pytest.mark.parametrize("moment", ["request", "answer", "client"])
def test_a_commit_whose_outcome_is_unknown_takes_effect_once(place: Place, between: Relay, moment: str) -> None:
    """The connection breaks before PostgreSQL hears of the commit, before its answer, or between two commits."""
    store = place.active(url=through(place, between))
    store.commit(one(1))
    place.admin("CREATE TABLE written (id TEXT)")
    place.admin("GRANT ALL ON written TO PUBLIC")
    place.admin(
        "CREATE FUNCTION note() RETURNS TRIGGER LANGUAGE plpgsql AS "
        "'BEGIN INSERT INTO written VALUES (NEW.id); RETURN NEW; END'; "
        "CREATE TRIGGER noting AFTER INSERT OR UPDATE ON tickets FOR EACH ROW EXECUTE FUNCTION note()"
    )
    between.break_at(moment)
    store.commit(one(2, prune_below=1))
    store.commit(one(3))
    assert place.admin("SELECT id FROM written") == [("2.0",), ("3.0",)]
    assert store.payloads(["2.0"]) == {"2.0": Payload.of(b"x" * 100_000)}


def test_a_database_that_stays_away_ends_the_queue_with_the_remedy(
    place: Place, between: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place.active(url=through(place, between).replace("slipstream@", "slipstream:hunter2@"))
    monkeypatch.setattr(postgres, "MAX_LOST_S", 0.5)
    between.break_at("client")
    between.close()
    with pytest.raises(StoreError, match=r"could not be reached for 0\.5 s: .*; start PostgreSQL") as failed:
        store.commit(one(1))
    assert "hunter2" not in str(failed.value)


def test_a_database_that_is_away_at_the_start_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    own = killable_cluster()
    try:
        with ExitStack() as stack:
            place = Place(own.new_database(), stack)
            own.stop()
            with pytest.raises(ConfigError, match=r"cannot be reached: .*; start PostgreSQL, or mend queue\.store"):
                place.reader().run_state()
            opening = threading.Thread(target=place.active, name="opening")
            opening.start()
            while "no connection, trying again for up to 60 s" not in caplog.text:
                time.sleep(0.02)
            own.start()
            opening.join(60)
            assert not opening.is_alive()
            assert place.store("two").acquire() == "http://one:8200"
    finally:
        own.close()


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("nowhere.invalid", "failed to resolve host"),
        ("127.0.0.1:1,127.0.0.1:2", "127.0.0.1.*port 2"),
    ],
)
def test_a_database_that_stays_away_at_the_start_is_no_wrong_setting(
    place: Place, monkeypatch: pytest.MonkeyPatch, host: str, answer: str
) -> None:
    monkeypatch.setattr(postgres, "MAX_LOST_S", 0.5)
    with pytest.raises(StoreError, match=rf"could not be reached for 0\.5 s: .*{answer}.*; start PostgreSQL"):
        place.store(url=f"postgresql://{host}/runs")


def test_a_database_that_is_silent_is_not_asked_a_second_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question takes its whole time-out: a command would answer after ten seconds, not five."""

    def silent(*_: Any, **__: Any) -> NoReturn:
        raise psycopg.errors.ConnectionTimeout("connection timeout expired")

    def asked_again(_: bytes) -> NoReturn:
        raise AssertionError("it was asked again")

    monkeypatch.setattr(psycopg, "connect", silent)
    monkeypatch.setattr(psycopg.pq, "PGconn", SimpleNamespace(ping=asked_again))
    with pytest.raises(ConfigError, match=r"cannot be reached: connection timeout expired; start PostgreSQL"):
        place.reader().run_state()


def test_a_database_without_a_free_connection_is_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, in words alone, and so does one that refuses a wrong setting."""
    monkeypatch.setattr(postgres, "MAX_LOST_S", 0.5)
    database = place.url.rpartition("/")[2]
    cluster().admin("CREATE ROLE crowded LOGIN CONNECTION LIMIT 0", database)
    for crowded in (place.url.replace("slipstream@", "crowded@"), f"{place.url}?target_session_attrs=standby"):
        with pytest.raises(StoreError, match=r"could not be reached for 0\.5 s"):
            place.store(url=crowded)


@pytest.mark.parametrize(
    ("password", "advice"),
    [
        ("", r"no password supplied; put the password into PGPASSWORD or ~/\.pgpass"),
        (
            ":hunter2",
            r"password authentication failed .*; mend queue\.store, or the password in PGPASSWORD",
        ),
        (":secret", None),
    ],
)
def test_a_password_that_is_missing_or_wrong_is_a_wrong_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, password: str, advice: str | None
) -> None:
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))
    monkeypatch.delenv("PGPASSWORD", raising=False)
    own = killable_cluster()
    try:
        with ExitStack() as stack:
            place = Place(own.new_database(), stack)
            own.ask_for_passwords()
            url = place.url.replace("slipstream@", f"slipstream{password}@")
            if advice is None:
                place.active(url=url)
                return
            with pytest.raises(ConfigError, match=rf"queue\.store = postgresql://.*{advice}") as error:
                place.store(url=url)
            assert "hunter2" not in str(error.value)
    finally:
        own.close()


def test_i1_what_was_committed_outlives_kills_of_postgresql_and_queues_go_on() -> None:
    """Commits that are under way when PostgreSQL is killed are found or repeated, without a word from the queue."""
    own = killable_cluster()
    try:
        with ExitStack() as stack:
            place = Place(own.new_database(), stack)
            store = place.active()
            for round_ in range(3):
                committed = kill_amid_commits(own, store, round_ * 1000)
                kept = stored(store)
                assert kept == {index for index in kept if index // 1000 < round_} | committed
    finally:
        own.close()


def kill_amid_commits(own: Cluster, store: PostgresStore, first: int) -> set[int]:
    """Kill PostgreSQL while a thread commits, and start it again. Returns what was committed, all told."""
    committed: set[int] = set()
    done, halfway = threading.Event(), threading.Event()

    def commit() -> None:
        while not done.is_set():
            index = first + len(committed)
            store.commit(one(index))
            committed.add(index)
            if len(committed) == 20:
                halfway.set()

    thread = threading.Thread(target=commit)
    thread.start()
    assert halfway.wait(60)
    own.kill()
    before = len(committed)
    own.start()
    while len(committed) <= before + 5:
        assert thread.is_alive()
        done.wait(0.01)
    done.set()
    thread.join(60)
    return committed


def test_a_name_with_the_character_nul_is_stored_without_it(place: Place) -> None:
    store = place.active()
    store.commit(Changes(tickets={"1.0": TicketRecord(1, 0, 1, "a\0b", 0, reason="failed:\0")}))
    assert store.records(["1.0"])["1.0"].worker_id == "a\N{SYMBOL FOR NULL}b"


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda url: url.replace("127.0.0.1", "127.0.0.1:1,127.0.0.1"), None),
        (lambda url: url + "-nowhere", r'database "test_.*-nowhere" does not exist; mend queue\.store$'),
        (lambda url: f"{url}?sslmode=verify-full", "server does not support SSL"),
        (lambda url: f"{url}?zebra=1", 'invalid URI query parameter: "zebra"'),
    ],
)
def test_bad_input_a_database_that_cannot_be_used_is_named_with_its_fault(
    place: Place, change: Callable[[str], str], refused: str | None
) -> None:
    url = change(place.url.replace("slipstream@", "slipstream:hunter2@"))
    if refused is None:
        place.active(url=url)
        return
    with pytest.raises(ConfigError, match=rf"queue\.store = postgresql://slipstream@.*{refused}") as error:
        place.store(url=url)
    assert "hunter2" not in str(error.value)


def test_a_schema_of_a_newer_release_is_refused_with_the_remedy(place: Place) -> None:
    place.active().close()
    place.admin(f"UPDATE layout SET number = {len(LAYOUTS) + 1}")
    for read in (place.store, place.reader().run_state, place.reader().read_ledger):
        with pytest.raises(ConfigError, match=rf"layout {len(LAYOUTS) + 1}.*upgrade, or choose another run\.name"):
            read()


def test_a_schema_of_an_earlier_layout_is_brought_to_the_newest_with_what_it_holds(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(postgres_database, "LAYOUTS", LAYOUTS[:1])
        place.active().close()
        columns = """id, "index", attempt, serial, worker_id, version, state, failures, bytes, tokens, oldest_version,
            arrival_version, servers"""
        place.admin(f"INSERT INTO tickets ({columns}) VALUES ('1.0', 1, 0, 1, 'w', 0, 'ready', 0, 9, 3, 0, 0, '[]')")
    store = place.active()
    assert stored(store) == {1}
    store.commit(Changes(rows={7: RowRecord(7, 1, 0.5, 0.25)}))
    assert store.load().rows == [RowRecord(7, 1, 0.5, 0.25)]
    facts = place.reader().look()
    assert (facts.layout, facts.queue) == (len(LAYOUTS), "the queue at http://one:8200")
    assert "migrated to layout 2: a change of a ticket's state touches no index" in caplog.text


def test_a_change_of_a_ticket_touches_no_index(place: Place) -> None:
    """PostgreSQL then writes a third less of its log, and has no dead entries to clear away."""
    store = place.active()
    states = [TicketState.ISSUED, TicketState.READY, TicketState.LEASED, TicketState.READY, TicketState.LEASED]
    for state in [TicketState.REISSUED, *states]:
        store.commit(Changes(tickets={"1.0": TicketRecord(1, 0, 1, "w", 0, state)}))
    store.close()
    place.admin("SELECT pg_stat_force_next_flush()")
    counted = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'tickets'"
    while (found := place.admin(counted)) != [(5, 5)]:
        assert found[0][1] == found[0][0], "an update that touched an index"
        time.sleep(0.05)


@pytest.mark.parametrize("command", [build, lambda config: move_to_postgres(config, config)], ids=["build", "copy"])
def test_without_psycopg_the_remedy_is_named(
    command: Callable[[RunConfig], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for module in (postgres, postgres_database):
        monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(ConfigError, match=r"psycopg is not installed here: pip install 'slipstream-rl\[postgres\]'"):
        command(config(queue={"store": "postgresql://db/runs"}))


def test_a_role_that_may_not_create_the_schema_is_told_the_grant(place: Place) -> None:
    database = place.url.rpartition("/")[2]
    cluster().admin("CREATE ROLE weak LOGIN", database)
    weak = place.store(url=place.url.replace("slipstream@", "weak@"))
    with pytest.raises(StoreError, match=f'GRANT CREATE ON DATABASE "{database}" TO "weak"'):
        weak.acquire()
    weak.close()
    place.active()


def test_a_schema_is_put_aside_under_another_name_unless_a_queue_runs(place: Place) -> None:
    store = place.active()
    store.commit(Changes(run=RunState(version=7)))
    with pytest.raises(ConfigError, match="is in use by another queue"):
        place.reader().set_aside(Path("failed-start-1"))
    store.close()
    place.reader().set_aside(Path("failed-start-1"))
    assert not place.reader().exists()
    aside = PostgresReader(Database(QueueSection(store=place.url), f"{RUN}_failed-start-1"))
    assert aside.run_state().version == 7


def test_a_record_whose_bytes_were_changed_is_damage_with_the_remedy(place: Place) -> None:
    store = place.active()
    store.commit(one(1))
    place.admin("UPDATE tickets SET state = 'reAdy'")
    with pytest.raises(StoreError, match=r"postgresql://.* is damaged: .*; restore it from a backup"):
        store.records(["1.0"])
