"""What the tests of weight sync share: a link without a data plane, snapshots that the fake server can prove."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.kit.fake_vllm import FakeVllm
from tests.kit.fake_vllm.engine import logprob_of
from weight_sync.probe import Probe
from weight_sync.snapshot import Snapshot
from weight_sync.transports.base import TransferError

PROBE_IDS = [3, 1, 4, 1, 5]


def probe(shift: float = 0.0) -> Probe:
    """What the fake answers to `PROBE_IDS`, each log-prob `shift` too high."""
    exact = [logprob_of(token, place) for place, token in enumerate(PROBE_IDS[1:], start=1)]
    return Probe(PROBE_IDS, np.array(exact, dtype=np.float32) + np.float32(shift))


def snapshot(version: int, shift: float = 0.0) -> Snapshot:
    return Snapshot(version, [("w", torch.full((4,), float(version)))], probe(shift))


class FakeLink:
    """Sends nothing; `during_send` is called in its place, on the publisher's thread."""

    def __init__(self, during_send: Callable[[Snapshot], None]) -> None:
        self.sent: list[int] = []
        self.closed = False
        self._during_send = during_send

    def init_info(self) -> dict[str, Any]:
        return {"master_port": 1}

    def connect(self) -> None: ...

    def update_info(self, snapshot: Snapshot) -> dict[str, Any]:
        return snapshot.manifest.as_dict()

    def send(self, snapshot: Snapshot) -> None:
        if self.closed:
            raise TransferError("the link is closed")
        self._during_send(snapshot)
        self.sent.append(snapshot.version)

    def close(self) -> None:
        self.closed = True


class Links:
    """Makes links and keeps them; a test may replace `during_send`."""

    def __init__(self) -> None:
        self.made: list[FakeLink] = []
        self.workers: list[int] = []
        self.during_send: Callable[[Snapshot], None] = lambda snapshot: None
        self._lock = threading.Lock()

    def __call__(self, workers: int) -> FakeLink:
        with self._lock:
            self.workers.append(workers)
            self.made.append(FakeLink(lambda snapshot: self.during_send(snapshot)))
            return self.made[-1]


def control_calls(fake: FakeVllm) -> list[str]:
    """The routes asked, without the questions that change nothing."""
    return [path for path in fake.calls if path not in ("/weight_info", "/get_world_size", "/is_paused")]
