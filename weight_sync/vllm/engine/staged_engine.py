"""vLLM's end of every staged transport: receives and builds beside generation, exchanges under the pause.

A call to an engine blocks vLLM's engine loop, so `update_weights` hands the work to a thread and returns. Only
`finish_weight_update`, which vLLM's worker calls inside the swap, touches the live model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weight_sync.transports.gloo.group import GlooGroup, GlooInitInfo
from weight_sync.transports.gloo.receiver import GlooReceiver, GlooUpdateInfo
from weight_sync.transports.http.receiver import HttpInitInfo, HttpReceiver, HttpUpdateInfo
from weight_sync.vllm.engine import shadow_modules
from weight_sync.vllm.engine.reload import Weights

logger = logging.getLogger(__name__)


class Receiver(Protocol):
    """A worker's end of a connection to the learner."""

    def receive(self, update_info: Any, /, *into: Any) -> Weights:
        """Receive weights and verify them, on a thread beside generation.

        Returns:
            Tensors by name, as in a checkpoint: views of memory that is good until the next update.

        Raises:
            Exception: They did not arrive. The text reaches the learner.
        """

    def close(self) -> None:
        """Close the connection to the learner. Never raises, and may be called again."""


class Staging(threading.Thread):
    """Runs `receive`, then `build` with its result, on a thread.

    Attributes:
        shadow: The result of `build`, None until it is ready.
    """

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
            # The learner that sent the weights may be gone. The next caller that asks for a swap gets the error.
            self._error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._stage = "failed"
            logger.warning("weights were not staged while %s: %s", *self._place())

    def _place(self) -> tuple[str, str | None]:
        return ("building" if "receiving" in self._seconds else "receiving"), self._error

    def report(self) -> dict[str, Any]:
        """Return `stage`, `error` and `seconds` by stage."""
        return {"stage": self._stage, "error": self._error, "seconds": dict(self._seconds)}


class StagedEngine(WeightTransferEngine):
    """Engine of one vLLM worker. A subclass gives `init_info_cls`, `update_info_cls` and `join`.

    vLLM's `WeightTransferEngine` says when each method is called.

    Attributes:
        proven: Fingerprints of the shadow that was swapped in last (`fingerprints.ModelFingerprints`), None if unknown.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.proven: Any = None
        self._staging: Staging | None = None
        self._receiver: Any = None
        if self.device.type == "cpu":
            shadow_modules.install_torch_packing()

    @property
    def shadow(self) -> Any:
        """The new weights while they wait for the swap, as `shadow.build` made them; None before and after."""
        return self._staging.shadow if self._staging is not None else None

    def join(self, init_info: Any) -> Receiver:
        """Connect to the learner that `init_info` names."""
        raise NotImplementedError

    @property
    def group_rank(self) -> int:
        """This worker's rank in a group of the learner, which is rank 0, and all workers of the server."""
        parallel = self.parallel_config
        return 1 + int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def init_transfer_engine(self, init_info: Any) -> None:
        self.shutdown()
        self._receiver = self.join(init_info)

    def receive(self, update_info: Any) -> Weights:
        """Receive over the connection that `init_transfer_engine` made, as `Receiver.receive` does."""
        receiver = self._receiver
        if receiver is None:
            raise RuntimeError("the connection to the learner was closed")
        return self.received(receiver, update_info)

    def received(self, receiver: Any, update_info: Any) -> Weights:
        weights: Weights = receiver.receive(update_info)
        return weights

    def start_weight_update(self) -> None:
        """Open an update. Raises RuntimeError while the thread of the one before still runs."""
        if self._staging is not None and self._staging.is_alive():
            raise RuntimeError("the reception of the last update has not ended")
        self._staging = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        """Begin to receive and to build on a thread. `staging` returns how far it is."""
        if self._receiver is None:
            raise RuntimeError("not connected to a learner: call /init_weight_transfer_engine first")
        if self._staging is not None and self._staging.is_alive():
            raise RuntimeError("the reception of the last update has not ended")
        self._staging = Staging(lambda: self.receive(update_info), self.build)
        self._staging.start()

    def build(self, weights: Weights) -> Any:
        """Build the shadow of `self.model` with `weights`. Raises ValueError if they are not the model's."""
        from weight_sync.vllm.engine.shadow import build

        return build(self.model, self.vllm_config, weights)

    def staging(self, wait_s: float = 0.0) -> dict[str, Any]:
        """Return how far the update is, after at most `wait_s` seconds of waiting for its end.

        Returns:
            `stage` ("receiving", "building", "ready" or "failed"), `error`, and `seconds` by stage.
        """
        if self._staging is None:
            return {"stage": "failed", "error": "no weights were sent since start_weight_update", "seconds": {}}
        if wait_s:
            self._staging.join(wait_s)
        return self._staging.report()

    def finish_weight_update(self) -> None:
        """Exchange the live weights for the shadow's. Generation must stand still.

        Raises:
            RuntimeError: They are not ready; the model is not touched.
        """
        report = self.staging()
        if report["stage"] != "ready":
            raise RuntimeError(f"weights not swapped: {report['error'] or 'they have not all arrived'}")
        staging, self._staging = self._staging, None
        assert staging is not None
        self.proven = None
        staging.shadow.exchange()
        self.proven = getattr(staging.shadow, "proven", None)

    def shutdown(self) -> None:
        """Drop the connection and the staged weights."""
        self._staging = None
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


class GlooEngine(StagedEngine):
    """Engine of one vLLM worker. See `StagedEngine`."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def join(self, init_info: GlooInitInfo) -> GlooReceiver:
        return GlooReceiver(GlooGroup.join(init_info, self.group_rank))


class HttpEngine(StagedEngine):
    """Engine of one vLLM worker. See `StagedEngine`."""

    init_info_cls = HttpInitInfo
    update_info_cls = HttpUpdateInfo

    def join(self, init_info: HttpInitInfo) -> HttpReceiver:
        receiver = HttpReceiver(init_info)
        receiver.greet()
        return receiver
