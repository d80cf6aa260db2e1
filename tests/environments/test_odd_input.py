"""What a policy may write that no author of an environment or a sandbox thinks of."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.environments import openenv_environment
from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.task.environment_instance import interface_of
from slipstream.sandboxes.remote import RemoteSandbox


@pytest.mark.parametrize("number", ["9" * 20, "9" * 400])
def test_an_action_beyond_any_integer_is_told_to_the_policy(number: str) -> None:
    pytest.importorskip("gymnasium")
    from slipstream.environments import gymnasium_environment

    environment = gymnasium_environment("FrozenLake-v1")()
    environment.reset(seed=1)
    assert "no such action" in str(environment.respond([{"role": "assistant", "content": number}]))
    environment.close()


def test_an_opponent_that_cannot_be_called_is_refused() -> None:
    pytest.importorskip("textarena")
    from slipstream.environments import textarena_environment

    with pytest.raises(ConfigError, match="opponent='random' cannot be called"):
        textarena_environment("TicTacToe-v0", players=2, opponent="random")  # type: ignore[arg-type]


def test_a_word_list_that_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As nltk says it, which Wordle asks for its words."""
    nltk = pytest.importorskip("nltk")

    def download(name: str, print_error_to: Any = None) -> None:
        print("[nltk_data] Error loading words", file=print_error_to or sys.stderr)

    monkeypatch.setattr(nltk, "download", download)
    arena = pytest.importorskip("textarena")
    from slipstream.environments import textarena_environment

    class Words(arena.Env):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            nltk.download("words")
            raise LookupError("*\n  Resource 'words' not found.\n  >>> import nltk\n  >>> nltk.download('words')\n*")

        def reset(self, num_players: int, seed: int | None = None) -> None: ...

        def step(self, action: str) -> Any: ...

    arena.envs.registration.register("Words-v0", Words)
    with pytest.raises(ConfigError) as refused:
        textarena_environment("Words-v0")
    assert "python -m nltk.downloader words" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capsys.readouterr().err == ""
    assert nltk.download is download


def test_an_openenv_environment_says_which_column_begins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(GenericEnvClient=lambda *_, **__: None)
    monkeypatch.setattr("slipstream.environments.openenv.library", lambda *_: client)
    for columns, begins_by in ((("seed", "episode_id"), "seed"), (("level",), None)):
        made = openenv_environment("http://127.0.0.1:8000", columns=columns)()
        assert interface_of(made).begins_by == begins_by


class HereSandbox(RemoteSandbox):
    """Runs the line of a remote sandbox in a shell of this machine."""

    def _open(self) -> Any:
        return "a shell"

    def _shell(self, opened: Any, line: str, seconds: float) -> tuple[str, int]:
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=seconds, check=False)
        return done.stdout + done.stderr, done.returncode

    def _end(self, opened: Any) -> None:
        pass


@pytest.mark.parametrize("code", ["#" * 99_000, "#" + "\u00e4" * 49_000])
def test_a_program_too_long_for_a_remote_shell_is_an_error_of_the_program(code: str) -> None:
    assert "at most 90000 are run" in HereSandbox().run(code)


def test_the_longest_program_of_a_remote_sandbox_runs() -> None:
    assert HereSandbox().run("print(7)\n#" + "x" * 89_000) == "7"
