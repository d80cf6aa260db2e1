"""The table of transports, chosen by `weight_sync.transport`: where the two ends of each are, as text."""

from __future__ import annotations

from dataclasses import dataclass

# Transports that `weight_sync.delta` applies to.
SEND_DELTAS = frozenset({"gloo", "http"})

STAGED_ENGINE = "slipstream.weight_sync.vllm.engine.staged_engine:StagedEngine"


@dataclass(frozen=True)
class Ends:
    """A transport's two ends as `module:class`, so that each process imports only its own.

    Attributes:
        learner: Where it stages, a `base.Sender`, made from `WeightSyncSection`; else a `base.Transport`.
        worker: Where it stages, a `receiver.Receiver`; else a `WeightTransferEngine` of vLLM.
        backend: vLLM's name of the engine, if one of its own has the transport's name; None: the transport's.
        stages: As `base.Transport.stages`.
        replaces: Whether the engine takes the place of vLLM's own of that name.
    """

    learner: str
    worker: str
    backend: str | None = None
    stages: bool = True
    replaces: bool = False

    @property
    def engine(self) -> str:
        """vLLM's `WeightTransferEngine`, as `module:class`."""
        return STAGED_ENGINE if self.stages else self.worker


# The names are those of the setting.
TRANSPORTS = {
    "gloo": Ends(
        "slipstream.weight_sync.transports.gloo.sender:GlooSender",
        "slipstream.weight_sync.transports.gloo.receiver:GlooReceiver",
    ),
    "nccl": Ends(
        "slipstream.weight_sync.transports.gpu.nccl_sender:NcclTransport",
        "slipstream.weight_sync.vllm.engine.nccl_engine:NcclEngine",
        stages=False,
        replaces=True,
    ),
    "nccl_staged": Ends(
        "slipstream.weight_sync.transports.gpu.nccl_sender:NcclSender",
        "slipstream.weight_sync.transports.gpu.nccl_receiver:NcclReceiver",
    ),
    # vLLM's own engine of that name pickles, and loads in place.
    "ipc": Ends(
        "slipstream.weight_sync.transports.gpu.ipc:IpcSender",
        "slipstream.weight_sync.transports.gpu.ipc:IpcReceiver",
        "slipstream_ipc",
    ),
    "http": Ends(
        "slipstream.weight_sync.transports.http.sender:HttpSender",
        "slipstream.weight_sync.transports.http.receiver:HttpReceiver",
    ),
}


def choice(cpu: bool, shares_gpu: bool, quantised: bool) -> str:
    """Choose the transport of a server.

    Args:
        cpu: Whether its vLLM is the build for CPUs.
        shares_gpu: Whether the learner is on the same GPU.
        quantised: Whether it serves weights in another type than the checkpoint's, which only vLLM's own reload makes.
    """
    if cpu:
        return "gloo"
    if shares_gpu:
        return "ipc"
    return "nccl" if quantised else "nccl_staged"


def backend(transport: str) -> str:
    """Return the name that vLLM's `--weight-transfer-config` has for the engine of `transport`."""
    return TRANSPORTS[transport].backend or transport


def of_backend(name: str) -> str | None:
    """Return the transport whose engine vLLM calls `name`, None if Slipstream has none."""
    return next((transport for transport in TRANSPORTS if name == backend(transport)), None)
