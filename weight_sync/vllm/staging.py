"""One update on its way into a worker: received and built on a thread, beside generation."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

Weights = dict[str, torch.Tensor]


class Staging(threading.Thread):
    """Runs `receive`, then `build` with what it gave. `shadow`: what `build` gave; None until it is ready."""

    def __init__(self, receive: Callable[[], Weights], build: Callable[[Weights], Any]) -> None:
        super().__init__(name="weight-staging", daemon=True)
        self.shadow: Any = None
        self._receive = receive
        self._build = build
        self._stage = "receiving"
        self._error: str | None = None
        self._seconds: dict[str, float] = {}

    def run(self) -> None:
        try:
            began = time.monotonic()
            weights = self._receive()
            self._seconds["receiving"] = time.monotonic() - began
            self._stage = "building"
            began = time.monotonic()
            self.shadow = self._build(weights)
            self._seconds["building"] = time.monotonic() - began
            self._stage = "ready"
        except BaseException as error:
            # Who sent them may be gone; whoever asks for the swap is told.
            self._error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._stage = "failed"
            logger.warning("weights were not staged while %s: %s", *self._place())

    def _place(self) -> tuple[str, str | None]:
        return ("building" if "receiving" in self._seconds else "receiving"), self._error

    def report(self) -> dict[str, Any]:
        return {"stage": self._stage, "error": self._error, "seconds": dict(self._seconds)}
