"""Runs programs in sandboxes of E2B, Modal and Daytona, by their clients. Each needs an account.

A sandbox is opened at the first program and kept until `close`; its programs see each other's files.
"""

from __future__ import annotations

import base64
import math
import threading
from abc import abstractmethod
from typing import Any

from slipstream.environments.base import library
from slipstream.processes import Limits, Ran
from slipstream.sandboxes.base import Sandbox

# Seconds that a sandbox may live, whatever happens to this process.
LIFETIME_S = 3600
# Seconds for an answer, beyond a program's time.
_PATIENCE_S = 15.0
_LATE = (124, 137)
# Bytes of a program: it is a part of one argument of the shell, of which Linux takes 128 KiB, in base64.
MAX_CODE_BYTES = 90_000


class RemoteSandbox(Sandbox):
    """Runs programs by a shell somewhere else, which sets the limits."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits or Limits())
        self._lock = threading.Lock()
        self._opened: Any = None

    def close(self) -> None:
        """End the sandbox."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            self._end(opened)

    def _run(self, code: str) -> str:
        if (size := len(code.encode("utf-8", "replace"))) > MAX_CODE_BYTES:
            return f"error: the program has {size} bytes; at most {MAX_CODE_BYTES} are run"
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            opened = self._opened
        try:
            output, exit_code = self._shell(opened, self._line(code), self.limits.seconds + _PATIENCE_S)
        except Exception as error:  # of the client, whatever it is
            raise RuntimeError(f"{type(self).__name__}: {type(error).__name__}: {error}") from error
        text = output[: self.limits.output_characters].rstrip("\n")
        return Ran(text, None if exit_code in _LATE else exit_code).text

    def _line(self, code: str) -> str:
        """Return the shell's line that runs a program within the limits."""
        program = base64.b64encode(code.encode("utf-8", "replace")).decode()
        memory = "" if self.limits.memory_mb is None else f"ulimit -v {self.limits.memory_mb << 10}; "
        inner = (
            f"set -o pipefail; {memory}f=$(mktemp); echo {program} | base64 -d > $f; "
            f"timeout -k 1 {self.limits.seconds:g} python3 -I $f 2>&1 < /dev/null "
            f"| head -c {self.limits.output_characters}"
        )
        return f"bash -c '{inner}'"

    @abstractmethod
    def _open(self) -> Any:
        """Open a sandbox."""

    @abstractmethod
    def _shell(self, opened: Any, line: str, seconds: float) -> tuple[str, int]:
        """Run a line of a shell. Returns its output and exit code."""

    @abstractmethod
    def _end(self, opened: Any) -> None:
        """End a sandbox."""


class E2BSandbox(RemoteSandbox):
    """A sandbox of E2B (client 2.63). `template`: with python3; None for E2B's base. Key: E2B_API_KEY."""

    def __init__(self, limits: Limits | None = None, template: str | None = None) -> None:
        super().__init__(limits)
        self._client = library("e2b", "e2b", "E2BSandbox")
        self._template = template

    def _open(self) -> Any:
        return self._client.Sandbox.create(template=self._template, timeout=LIFETIME_S, allow_internet_access=False)

    def _shell(self, opened: Any, line: str, seconds: float) -> tuple[str, int]:
        try:
            result = opened.commands.run(line, timeout=seconds)
        except self._client.CommandExitException as ended:  # any exit code but 0
            result = ended
        return result.stdout + result.stderr, int(result.exit_code)

    def _end(self, opened: Any) -> None:
        opened.kill()


class ModalSandbox(RemoteSandbox):
    """A sandbox of Modal (client 1.6). `image`: a `modal.Image` with python3; None for Debian's. `app`: its name."""

    def __init__(self, limits: Limits | None = None, image: Any = None, app: str = "slipstream") -> None:
        super().__init__(limits)
        self._client = library("modal", "modal", "ModalSandbox")
        self._image = image
        self._app = app

    def _open(self) -> Any:
        return self._client.Sandbox.create(
            app=self._client.App.lookup(self._app, create_if_missing=True),
            image=self._client.Image.debian_slim() if self._image is None else self._image,
            timeout=LIFETIME_S,
            memory=None if self.limits.memory_mb is None else 2 * self.limits.memory_mb,
            block_network=True,
        )

    def _shell(self, opened: Any, line: str, seconds: float) -> tuple[str, int]:
        process = opened.exec("sh", "-c", line, timeout=math.ceil(seconds))
        output = process.stdout.read() + process.stderr.read()
        return output, int(process.wait())

    def _end(self, opened: Any) -> None:
        opened.terminate()


class DaytonaSandbox(RemoteSandbox):
    """A sandbox of Daytona (client 0.226). `image`: with python3 and bash. Key: DAYTONA_API_KEY."""

    def __init__(self, limits: Limits | None = None, image: str = "python:3.12-slim") -> None:
        super().__init__(limits)
        self._library = library("daytona", "daytona", "DaytonaSandbox")
        self._image = image
        self._client: Any = None

    def _open(self) -> Any:
        self._client = self._client or self._library.Daytona()
        gib = None if self.limits.memory_mb is None else math.ceil(2 * self.limits.memory_mb / 1024)
        params = self._library.CreateSandboxFromImageParams(
            image=self._image,
            resources=self._library.Resources(memory=gib),
            network_block_all=True,
            auto_stop_interval=LIFETIME_S // 60,
            ephemeral=True,
        )
        return self._client.create(params)

    def _shell(self, opened: Any, line: str, seconds: float) -> tuple[str, int]:
        answer = opened.process.exec(line, timeout=math.ceil(seconds))
        return str(answer.result), int(answer.exit_code)

    def _end(self, opened: Any) -> None:
        self._client.delete(opened)
