"""Runs each program in its own container, by podman or docker: without network, capabilities or a disk."""

from __future__ import annotations

import shutil
import uuid

from slipstream.processes import Limits, Ran, run_program
from slipstream.protocol.config import ConfigError
from slipstream.sandboxes.base import Sandbox

_ENGINES = ("podman", "docker")
# How both programs end where no container could be run, as a program in one may too.
_NOT_RUN = (125, 126, 127)
# Variables of this machine that both programs set in containers, where they may hold passwords.
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
_PROCESSES = 128
_KILL = Limits(20.0, None, 1000)


class ContainerSandbox(Sandbox):
    """Runs programs in containers.

    Args:
        image: An image with `python3`, which is there already.
        limits: What a program may use.
        engine: podman or docker, or the path of one; None for the first that is installed.

    Raises:
        ConfigError: None is installed.
    """

    def __init__(
        self, image: str = "python:3.12-slim", limits: Limits | None = None, engine: str | None = None
    ) -> None:
        super().__init__(limits or Limits())
        found = next(filter(None, map(shutil.which, [engine] if engine else _ENGINES)), None)
        if found is None:
            raise ConfigError(
                f"ContainerSandbox needs {engine or ' or '.join(_ENGINES)}, which is not installed: apt-get install "
                f"podman, or use another sandbox of slipstream.sandboxes"
            )
        self._engine = found
        self._image = image

    def close(self) -> None:
        """Nothing is kept open."""

    def _run(self, code: str) -> str:
        ran = self._in_container(code)
        if ran.exit_code in _NOT_RUN and (empty := self._in_container("")).exit_code in _NOT_RUN:
            raise RuntimeError(f"{self._engine} cannot run {self._image!r}: {empty.output[-1000:]}")
        return ran.text

    def _in_container(self, code: str) -> Ran:
        name = f"slipstream-{uuid.uuid4().hex[:12]}"
        proxies = [f"--env={variable}=" for each in _PROXIES for variable in (each, each.upper())]
        memory = [] if self.limits.memory_mb is None else [f"--memory={self.limits.memory_mb}m"]
        command = [
            *(self._engine, "run", "--rm", "--interactive", f"--name={name}", "--pull=never", "--network=none"),
            *("--read-only", "--tmpfs=/tmp:size=64m", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
            *(f"--pids-limit={_PROCESSES}", *memory, *proxies, self._image, "python3", "-I", "-"),
        ]
        ran = run_program(command, self.limits, stdin=code, limits_memory=False)
        if ran.exit_code is None:  # the program that was killed is not the container
            for how in (["kill"], ["rm", "--force"]):  # of one that had not begun, killing leaves the rest
                run_program([self._engine, *how, name], _KILL, limits_memory=False)
        return ran
