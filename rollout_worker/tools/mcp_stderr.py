"""Passes on what an MCP server writes to stderr, and keeps its end for the error of a server that goes away."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TextIO

# Seconds for the last lines of a server that has gone away, lines that an error shows, and bytes that are kept.
_WITHIN_S = 1.0
_LINES = 3
_BYTES = 4096


class StderrTail:
    """The stderr of one process.

    Args:
        to: File that gets all of it.

    Attributes:
        file: File for the process to write to. Close it here as soon as the process has it.
    """

    def __init__(self, to: TextIO) -> None:
        read, write = os.pipe()
        self.file = os.fdopen(write, "w")
        self._to = to
        self._end = b""
        self._thread = threading.Thread(target=self._main, args=(read,), daemon=True, name="mcp-stderr")
        self._thread.start()

    def last_lines(self) -> str:
        """Return the last lines in one; empty if there are none. Waits a moment for those of a process that ends."""
        self._thread.join(_WITHIN_S)
        lines = [line.strip() for line in self._end.decode("utf-8", "replace").splitlines() if line.strip()]
        return " | ".join(lines[-_LINES:])

    def _main(self, read: int) -> None:
        with open(read, "rb", buffering=0) as stream:
            while written := stream.read(65536):
                self._end = (self._end + written)[-_BYTES:]
                with contextlib.suppress(OSError, ValueError):  # the file was closed, or its disk is full
                    self._to.write(written.decode("utf-8", "replace"))
                    self._to.flush()
