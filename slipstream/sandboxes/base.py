"""The interface of all sandboxes: `run` takes a program and returns what it printed, within limits."""

from __future__ import annotations

from abc import ABC, abstractmethod

from slipstream.processes import Limits

# Characters of a program.
MAX_CODE_CHARACTERS = 100_000


class Sandbox(ABC):
    """Runs Python programs that a policy wrote. Used from several threads.

    Args:
        limits: What a program may use.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def run(self, code: str) -> str:
        """Run a program.

        Args:
            code: Python, at most MAX_CODE_CHARACTERS characters.

        Returns:
            The printed text, cut to the limit, and after it how the program ended, where it did not end well.

        Raises:
            RuntimeError: If no program can be run.
        """
        if len(code) > MAX_CODE_CHARACTERS:
            return f"error: the program has {len(code)} characters; at most {MAX_CODE_CHARACTERS} are run"
        return self._run(code)

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open."""

    @abstractmethod
    def _run(self, code: str) -> str:
        """Run a program that is not too long, as `run`."""
