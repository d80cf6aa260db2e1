"""I8: the run's secret, and what is derived from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.deploy.servers.tokens import check_arguments, token_of
from slipstream.protocol import access
from slipstream.protocol.config import ConfigError
from tests.kit import config

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def no_token_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(access.TOKEN_VARIABLE, raising=False)
    monkeypatch.delenv(access.TOKEN_FILE_VARIABLE, raising=False)
    monkeypatch.setattr(access, "_hidden", None)


def bearer(token: str) -> bytes:
    return f"Bearer {token}".encode()


def test_i8_a_role_s_token_is_stable_told_apart_and_holds_nothing_of_the_secret() -> None:
    made = {role: access.derive_token(SECRET, role) for role in access.ROLES}
    assert made["worker"] == "slw-VnOqM-nsE8yg26UpY0YfDflDN88Wbs7-eCvlOH4zm_8"  # workers elsewhere keep theirs
    assert len(set(made.values())) == 3
    assert {role: access.role_of(token) for role, token in made.items()} == {role: role for role in access.ROLES}
    assert not any(SECRET in token for token in made.values())
    assert access.derive_token(SECRET + "x", "worker") != made["worker"]


@pytest.mark.parametrize("role", access.ROLES)
def test_i8_no_token_can_be_derived_from_a_role_s(role: access.Role) -> None:
    held = access.derive_token(SECRET, role)
    with pytest.raises(access.TokenError, match=f"holds a {role}'s token, but .* needs the run's secret") as error:
        access.derive_token(held, "learner")
    assert held not in str(error.value)
    with pytest.raises(access.TokenError):
        access.AccessTokens(held)
    assert access.token_for(held, "learner") == held


def test_what_a_process_sends_is_its_role_s_token_and_never_the_secret() -> None:
    run = config(queue={"token": SECRET})
    assert run.token == SECRET
    for role in access.ROLES:
        assert run.token_for(role) == access.derive_token(SECRET, role)
    assert config().token_for("worker") is None
    assert SECRET not in repr(run)


@pytest.mark.parametrize("role", access.ROLES)
def test_i8_a_ring_knows_every_role_and_nothing_else(role: access.Role) -> None:
    ring = access.AccessTokens(SECRET)
    token = access.derive_token(SECRET, role)
    assert ring.holder(bearer(token)) == role
    assert ring.holder(bearer(SECRET)) == "all"
    for wrong in ("", token[:-1], token + "x", token.upper(), f"slw-{token[4:-1]}x", "slw-"):
        assert ring.holder(bearer(wrong)) is None
    assert ring.holder(token.encode()) is None
    assert ring.holder(b"\xff" * 100) is None
    assert access.AccessTokens(SECRET + "x").holder(bearer(token)) is None


def test_a_refusal_names_the_role_that_is_needed_and_how_to_get_it() -> None:
    ring, held = access.AccessTokens(SECRET), access.derive_token(SECRET, "viewer")
    denied = ring.denied(bearer(held), ("learner",), "POST /v1/leases", "queue")
    assert denied is not None
    assert denied.status == 403
    assert "POST /v1/leases needs the token of a learner, and this is a viewer's" in denied.message
    assert "`slipstream token learner`" in denied.message
    nobody = ring.denied(b"Bearer guess", access.ROLES, "GET /", "queue")
    assert nobody is not None
    assert nobody.status == 401
    assert "set SLIPSTREAM_TOKEN to the run's secret, or to what `slipstream token viewer` prints" in nobody.message
    absent = ring.denied(b"", ("worker",), "POST /v1/tickets", "queue")
    assert absent is not None
    assert absent.message.startswith("a token is needed: ")
    assert "`slipstream token worker`" in absent.message
    assert not {held, SECRET, "guess"} & {*denied.message.split(), *nobody.message.split()}
    assert ring.denied(bearer(SECRET), ("learner",), "", "") is None
    assert ring.denied(bearer(held), access.ROLES, "", "") is None


def test_the_environment_goes_before_the_file_and_both_before_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text("from-a-file\n")
    file.chmod(0o600)
    run = config(queue={"token": "from-the-run-file"})
    assert run.token == "from-the-run-file"
    monkeypatch.setenv(access.TOKEN_FILE_VARIABLE, str(file))
    assert run.token == "from-a-file"
    monkeypatch.setenv(access.TOKEN_VARIABLE, "from-the-environment")
    assert run.token == "from-the-environment"


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("s3cret-of-the-run", 0o644, "other users may use it (mode 0644): chmod 600"),
        ("s3cret-of-the-run", 0o620, "other users may use it (mode 0620)"),
        (" \n", 0o600, "holds no token; write one line"),
        ("s3cret-of-the-run\nanother", 0o600, "holds no token; write one line"),
        ("s3cret-of-the-run" * 1000, 0o600, "holds no token; write one line"),
    ],
)
def test_i8_a_file_that_others_may_read_or_that_holds_no_token_is_refused(
    tmp_path: Path, text: str, mode: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    file.chmod(mode)
    monkeypatch.setenv(access.TOKEN_FILE_VARIABLE, str(file))
    with pytest.raises(access.TokenError) as error:
        access.given_token()
    assert says in str(error.value)
    assert "s3cret" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(access.TokenError, match=r"gone: the token cannot be read: No such file"):
        access.read_token_file(tmp_path / "gone")


def test_i8_what_is_hidden_is_in_no_child_s_environment_and_still_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(access.TOKEN_VARIABLE, SECRET)
    access.hide_token()
    assert config().token_for("worker") == access.derive_token(SECRET, "worker")
    assert SECRET not in subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    assert access.environment_without_token(
        {access.TOKEN_VARIABLE: "a", access.TOKEN_FILE_VARIABLE: "b", "PATH": "c"}
    ) == {"PATH": "c"}


def test_the_command_prints_a_role_s_token_of_the_environment_s_secret_or_of_a_file_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(0o600)
    assert token_of("viewer", file) == access.derive_token(SECRET, "viewer")
    monkeypatch.setenv(access.TOKEN_VARIABLE, SECRET)
    line = [sys.executable, "-m", "slipstream.deploy.cli", "token", "learner"]
    printed = subprocess.run(line, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout
    assert printed == access.derive_token(SECRET, "learner") + "\n"


@pytest.mark.parametrize(
    ("role", "held", "says"),
    [
        ("admin", SECRET, "ROLE = admin: there is no such role; the roles are: worker, learner, viewer"),
        ("worker", "", "SLIPSTREAM_TOKEN is not set"),
        ("worker", "hunter2", "the secret has 7 characters, and whoever holds a role's token could find it by trying"),
        ("learner", access.derive_token(SECRET, "worker"), "holds a worker's token"),
    ],
)
def test_what_the_command_cannot_derive_from_is_named(
    role: str, held: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(access.TOKEN_VARIABLE, held)
    with pytest.raises(ConfigError) as error:
        token_of(role, None)
    assert says in str(error.value)
    assert not held or held not in str(error.value)


@pytest.mark.parametrize(
    "arguments", [["--queue.token", SECRET], [f"--queue.token={SECRET}"], [access.derive_token(SECRET, "viewer")]]
)
def test_i8_a_token_on_a_command_line_is_refused_and_not_repeated(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="every user of the machine can read: set SLIPSTREAM_TOKEN") as error:
        check_arguments(["up", "run.toml", *arguments])
    assert SECRET not in str(error.value)
    assert arguments[-1] not in str(error.value)
    check_arguments(["up", "run.toml", "--queue.port", "8200", "--queue.store", "postgresql://me@db:5433/runs"])


@pytest.mark.parametrize(
    "argument", ["postgresql://me:hunter2@db/runs", "--queue.store=postgres://db/runs?password=hunter2"]
)
def test_the_password_of_a_database_is_refused_on_a_command_line(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"its password does not belong on a command line.*PGPASSWORD") as error:
        check_arguments(["queue", "copy", "run.toml", "--to", argument])
    assert "hunter2" not in str(error.value)
