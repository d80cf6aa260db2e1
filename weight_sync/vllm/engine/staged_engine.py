"""vLLM's end of every staged transport: receives and builds during generation, exchanges under the pause.

A call to an engine blocks vLLM's engine loop, so `update_weights` hands the work to a thread and returns. Only
`finish_weight_update`, which vLLM's worker calls inside the swap, touches the live model. Captured graphs of a GPU hold
pointers into it, so its tensors stay where they are and are written to, which the shadow does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from slipstream.weight_sync.transports.receiver import Receiver, Share, Worker, of_one_version
from slipstream.weight_sync.transports.registry import TRANSPORTS, of_backend
from slipstream.weight_sync.transports.staging_cores import on_staging_cores
from slipstream.weight_sync.vllm.engine import shadow_modules
from slipstream.weight_sync.vllm.engine.arrivals import Arrivals, MustBeWhole, kind_of
from slipstream.weight_sync.weights.parts import NotInParts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShareInfos:
    """Body of `/init_weight_transfer_engine` and `/update_weights`: what each rank of the learner that sends has to
    say, as `base.Sender` returns it."""

    shares: list[dict[str, Any]]


class Staging(threading.Thread):
    """Receives the shares of an update, and builds from what arrives, on a thread.

    Attributes:
        shadow: The result of `build`, None until it is ready.
    """

    def __init__(self, receive: Sequence[Callable[[], Share]], build: Callable[[Sequence[Share]], Any]) -> None:
        super().__init__(name="weight-staging", daemon=True)
        self.shadow: Any = None
        self._receive = receive
        self._build = build
        self._stage = "receiving"
        self._error: str | None = None
        self._seconds: dict[str, float] = {}

    def run(self) -> None:
        with on_staging_cores():
            self._stage_update()

    def _stage_update(self) -> None:
        try:
            began = time.monotonic()
            shares = self._received()
            self._seconds["receiving"] = time.monotonic() - began
            self._stage = "building"
            began = time.monotonic()
            self.shadow = self._build(shares)
            self._seconds["building"] = time.monotonic() - began
            self._stage = "ready"
        except BaseException as error:
            # The learner that sent the weights may be gone. The next caller that asks for a swap gets the error.
            self._error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._stage = "failed"
            logger.warning("weights were not staged while %s: %s", *self._place())

    def _received(self) -> list[Share]:
        if len(self._receive) == 1:
            return [self._receive[0]()]
        shares = [_begun(receive) for receive in self._receive]
        wait(shares)
        return [share.result() for share in shares]

    def _place(self) -> tuple[str, str | None]:
        return ("building" if "receiving" in self._seconds else "receiving"), self._error

    def report(self) -> dict[str, Any]:
        """Return `stage`, `error` and `seconds` by stage."""
        return {"stage": self._stage, "error": self._error, "seconds": dict(self._seconds)}


def _begun(receive: Callable[[], Share]) -> Future[Share]:
    """Call `receive` on a daemon thread: the process must not wait for a rank that hangs before it can end."""
    share: Future[Share] = Future()

    def run() -> None:
        try:
            share.set_result(receive())
        except BaseException as error:
            share.set_exception(error)

    threading.Thread(target=run, name="weight-share", daemon=True).start()
    return share


class StagedEngine(WeightTransferEngine):
    """Engine of one vLLM worker. vLLM's name of the transport, in `config.backend`, chooses the receivers.

    vLLM's `WeightTransferEngine` says when each method is called.

    Attributes:
        proven: Fingerprints of the shadow that was swapped in last (`fingerprints.ModelFingerprints`), None if unknown.
    """

    init_info_cls = ShareInfos
    update_info_cls = ShareInfos

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.proven: Any = None
        self._staging: Staging | None = None
        self._receivers: list[Receiver] = []
        self._stream: Any = None
        # Set once no shadow of the model could be built: then all weights are kept until the pause.
        self._whole = False
        # Kinds of tensors that a loader turned out to need in one piece, however large.
        self._in_one: set[str] = set()
        if self.device.type == "cpu":
            shadow_modules.install_torch_packing()

    @property
    def shadow(self) -> Any:
        """The new weights while they wait for the swap, as `shadow.build` made them; None before and after."""
        return self._staging.shadow if self._staging is not None else None

    @property
    def worker(self) -> Worker:
        """This worker, as the receivers see it."""
        parallel = self.parallel_config
        return Worker(1 + int(parallel.data_parallel_index * parallel.world_size + parallel.rank), self.device)

    def init_transfer_engine(self, init_info: ShareInfos) -> None:
        """Connect to all ranks of the learner that send. Blocks until they are met, where the transport does."""
        self.shutdown()
        name = of_backend(self.config.backend)
        assert name is not None
        module, _, cls = TRANSPORTS[name].worker.partition(":")
        make = getattr(import_module(module), cls)
        with on_staging_cores():
            for info in init_info.shares:
                self._receivers.append(make(info, self.worker))

    def start_weight_update(self) -> None:
        """Open an update. Raises RuntimeError while the thread of the one before still runs."""
        self._check_over()
        self._staging = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShareInfos) -> None:
        """Begin to receive and to build on a thread. `staging` returns how far it is.

        Raises:
            RuntimeError: No learner is connected, or the last update is still received.
            ValueError: The shares are not one of each rank, all of one version.
        """
        receivers = list(self._receivers)
        if not receivers:
            raise RuntimeError("not connected to a learner: call /init_weight_transfer_engine first")
        if len(receivers) != len(update_info.shares):
            raise ValueError(f"an update of {len(update_info.shares)} shares, and {len(receivers)} ranks are connected")
        updates = of_one_version(update_info.shares)
        self._check_over()

        def receiving(receiver: Receiver, update: dict[str, Any]) -> Callable[[], Share]:
            def receive() -> Share:
                self._enter_device()
                return receiver.receive(update)

            return receive

        calls = [receiving(*pair) for pair in zip(receivers, updates, strict=True)]
        self._staging = Staging(calls, self.build)
        self._staging.start()

    def build(self, shares: Sequence[Share]) -> Any:
        """Build the shadow of `self.model` from what arrives, done when this returns. Raises ValueError if the weights
        are not the model's."""
        from slipstream.weight_sync.vllm.engine.shadow import build

        with self._beside_generation() as synchronise:
            arrivals = Arrivals(shares, synchronise, self._in_one)
            try:
                built = build(self.model, self.vllm_config, arrivals, self._whole)
            except MustBeWhole:
                self._whole = True
                raise
            except NotInParts as error:  # the next update gives the loader all of it
                self._in_one.add(kind_of(error.name))
                raise
            synchronise()  # the swap copies on another stream
            return built

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
            RuntimeError: They are not ready; the model is not touched. On a GPU also a copy that failed.
        """
        report = self.staging()
        if report["stage"] != "ready":
            raise RuntimeError(f"weights not swapped: {report['error'] or 'they have not all arrived'}")
        staging, self._staging = self._staging, None
        assert staging is not None
        self.proven = None
        staging.shadow.exchange()
        self.proven = getattr(staging.shadow, "proven", None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def shutdown(self) -> None:
        """Drop the connections and the staged weights."""
        self._staging = None
        receivers, self._receivers = self._receivers, []
        for receiver in receivers:
            receiver.close()

    def _enter_device(self) -> None:
        """Give this thread the worker's GPU: a new thread has GPU 0, and would open it."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _check_over(self) -> None:
        if self._staging is not None and self._staging.is_alive():
            raise RuntimeError("the reception of the last update has not ended")

    @contextmanager
    def _beside_generation(self) -> Iterator[Callable[[], None]]:
        """On a GPU, put this thread's work onto a stream apart from generation's. Yields what waits for it."""
        if self.device.type != "cuda":
            yield lambda: None
            return
        self._enter_device()
        if self._stream is None:
            make: Any = torch.cuda.Stream
            self._stream = make(self.device)
        with torch.cuda.stream(self._stream):
            yield self._stream.synchronize
