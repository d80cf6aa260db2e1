"""The table of transports, chosen by `weight_sync.transport`: where the two ends of each are, as text."""

from __future__ import annotations

from dataclasses import dataclass

# Transports that `weight_sync.delta` applies to.
SEND_DELTAS = frozenset({"gloo", "http"})


@dataclass(frozen=True)
class Ends:
    """A transport's two ends as `module:class`, so that each process imports only its own.

    Attributes:
        learner: A `base.Transport`, made from `WeightSyncSection`.
        engine: A `WeightTransferEngine` of vLLM.
        backend: vLLM's name of the engine, if one of its own has the transport's name; None: the transport's.
        stages: As `base.Transport.stages`.
        replaces: Whether the engine takes the place of vLLM's own of that name.
    """

    learner: str
    engine: str
    backend: str | None = None
    stages: bool = True
    replaces: bool = False


# The names are those of the setting.
TRANSPORTS = {
    "gloo": Ends(
        "weight_sync.transports.gloo.sender:GlooTransport", "weight_sync.vllm.engine.staged_engine:GlooEngine"
    ),
    "nccl": Ends(
        "weight_sync.transports.gpu.nccl_sender:NcclTransport",
        "weight_sync.vllm.engine.nccl_engine:NcclEngine",
        stages=False,
        replaces=True,
    ),
    "nccl_staged": Ends(
        "weight_sync.transports.gpu.nccl_sender:NcclStagedTransport",
        "weight_sync.vllm.engine.device_engines:NcclStagedEngine",
    ),
    # vLLM's own engine of that name pickles, and loads in place.
    "ipc": Ends(
        "weight_sync.transports.gpu.ipc:IpcTransport",
        "weight_sync.vllm.engine.device_engines:IpcEngine",
        "slipstream_ipc",
    ),
    "http": Ends(
        "weight_sync.transports.http.sender:HttpTransport", "weight_sync.vllm.engine.staged_engine:HttpEngine"
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
