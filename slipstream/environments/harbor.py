"""Tasks of Harbor, which Terminal-Bench has from its second version on: each episode is a trial of its program.

The program `harbor` needs Python 3.12 and a place for containers, so it is called as a program, from whatever
environment it is installed in (release 0.26.0). Its agent asks the policy at the episode's endpoint.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.environments.base import metrics_of
from slipstream.processes import Limits, own_variables, run_program
from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.task.agent import Endpoint
from slipstream.rollout_worker.task.task import Task

# Column with the folder of a row's task.
FOLDER = "harbor_folder"
# The variable in which the agent finds the endpoint's key, in its own process alone.
_KEY_NAME = "SLIPSTREAM_ENDPOINT_KEY"
_AT_A_LIMIT = "context_length_exceeded"
_OUTPUT_CHARACTERS = 4000


def harbor_task(
    tasks: str | Path,
    *,
    agent: str = "terminus-2",
    environment: str = "docker",
    memory_mb: int | None = None,
    timeout_s: float = 1800.0,
    reward: str = "reward",
    config: Mapping[str, Any] | None = None,
    program: str = "harbor",
) -> Task:
    """Make a task of Harbor's tasks.

    Args:
        tasks: A folder of task folders, each with a task.toml, as `harbor dataset download` writes it; or one task.
        agent: Harbor's agent that the policy drives.
        environment: Where the containers run: docker, daytona, modal, e2b, ...
        memory_mb: Memory of a container; None for what the task names.
        timeout_s: Seconds for a whole trial.
        reward: Name of the reward among those of the task's verifier; a single one needs no name.
        config: Further fields of Harbor's trial configuration.
        program: The program, by a path where it is in another environment.

    Raises:
        ConfigError: The program or the tasks are missing.
    """
    found = shutil.which(program)
    if found is None:
        raise ConfigError(
            f"harbor_task needs the program {program!r}, which is not there: pip install harbor (Python 3.12), in an "
            f"environment of its own if need be, and give program='/path/to/bin/harbor'"
        )
    folder = Path(tasks).expanduser().resolve()
    folders = (
        [folder] if (folder / "task.toml").is_file() else sorted(each.parent for each in folder.glob("*/task.toml"))
    )
    if not folders:
        raise ConfigError(
            f"harbor_task({str(tasks)!r}): there is no task.toml in it or one folder below; get tasks by "
            f"`harbor dataset download NAME`"
        )
    rows = [{"prompt": [{"role": "user", "content": _instruction(each)}], FOLDER: str(each)} for each in folders]
    chosen: dict[str, Any] = {"type": environment}
    if memory_mb is not None:
        chosen["override_memory_mb"] = memory_mb
    player = _Player(found, agent, chosen, timeout_s, reward, dict(config or {}))
    return Task(dataset=rows, agent=player.play)


def _instruction(folder: Path) -> str:
    try:
        return (folder / "instruction.md").read_text(encoding="utf-8") or folder.name
    except (OSError, UnicodeError):  # tasks of several steps have one for each
        return folder.name


class _Player:
    def __init__(
        self,
        program: str,
        agent: str,
        environment: dict[str, Any],
        timeout_s: float,
        reward: str,
        config: dict[str, Any],
    ) -> None:
        self._program = program
        self._agent = agent
        self._environment = environment
        self._timeout_s = timeout_s
        self._reward = reward
        self._config = config

    def play(self, endpoint: Endpoint, harbor_folder: str) -> dict[str, Any]:
        """Play one trial.

        Args:
            endpoint: Answers with the policy.
            harbor_folder: The task.

        Raises:
            RuntimeError: The trial failed, or gave no reward.
        """
        with tempfile.TemporaryDirectory(prefix="slipstream-harbor-") as folder:
            path = Path(folder) / "trial.json"
            path.write_text(json.dumps(self._trial(endpoint, harbor_folder, folder)), encoding="utf-8")
            ran = run_program(
                [self._program, "trial", "start", "-c", str(path)],
                Limits(self._timeout_s, None, _OUTPUT_CHARACTERS),
                environment=own_variables() | {_KEY_NAME: endpoint.api_key},
                folder=folder,
            )
            if ran.exit_code is None:
                raise RuntimeError(f"harbor: the trial took longer than timeout_s = {self._timeout_s:g}: {ran.output}")
            try:
                result = json.loads((Path(folder) / "trials" / "trial" / "result.json").read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise RuntimeError(f"harbor: the trial left no result ({error}): {ran.text}") from None
        return self._outcome(result)

    def _trial(self, endpoint: Endpoint, task: str, folder: str) -> dict[str, Any]:
        agent = {
            "name": self._agent,
            "model_name": f"openai/{endpoint.model}",
            "base_url": endpoint.base_url,
            "model_api_key_name": _KEY_NAME,
            **self._config.get("agent", {}),
        }
        return {
            **self._config,
            "task": {"path": task},
            "trial_name": "trial",
            "trials_dir": f"{folder}/trials",
            "agent": agent,
            "environment": {**self._environment, **self._config.get("environment", {})},
        }

    def _outcome(self, result: Mapping[str, Any]) -> dict[str, Any]:
        failure = result.get("exception_info")
        rewards = (result.get("verifier_result") or {}).get("rewards") or {}
        numbers = {name: value for name, value in rewards.items() if isinstance(value, int | float)}
        found = numbers.get(self._reward, next(iter(numbers.values())) if len(numbers) == 1 else None)
        if found is None and failure and _AT_A_LIMIT in str(failure.get("exception_message")):
            return {"stop_condition": _AT_A_LIMIT, "reward": 0.0}
        if found is None and failure:
            raise RuntimeError(f"harbor: {failure.get('exception_type')}: {failure.get('exception_message')}")
        if found is None:
            raise RuntimeError(
                f"harbor: the verifier gave no reward {self._reward!r}; it gave: {', '.join(numbers) or 'none'}; name "
                f"one: harbor_task(..., reward=...)"
            )
        ended = str(failure.get("exception_type")) if failure else "completed"
        return {**metrics_of(numbers), "stop_condition": ended, "reward": float(found)}
