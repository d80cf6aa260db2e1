"""How weights travel from the learner to a server's workers: one module or folder a transport, chosen by
`weight_sync.transport`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Ends:
    """A transport's two ends as `module:class`, so that each process imports only its own.

    learner: a `base.Transport`, made from `WeightSyncSection`. engine: a `WeightTransferEngine` of vLLM. backend: what
    vLLM calls that engine, where another of its own has the transport's name. stages: as `base.Transport.stages`.
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

# Those of which `weight_sync.delta` means something.
SEND_DELTAS = frozenset({"gloo", "http"})


def choice(cpu: bool, shares_gpu: bool, quantised: bool) -> str:
    """For a server. cpu: its vLLM is the build for CPUs. shares_gpu: the learner is on the same GPU. quantised: it
    serves weights in another type than the checkpoint's, which only vLLM's own reload makes anew."""
    if cpu:
        return "gloo"
    if shares_gpu:
        return "ipc"
    return "nccl" if quantised else "nccl_staged"


def backend(transport: str) -> str:
    """What vLLM's `--weight-transfer-config` calls the engine of `transport`."""
    return TRANSPORTS[transport].backend or transport


def of_backend(name: str) -> str | None:
    """The transport whose engine vLLM calls `name`; None for one that is not ours to send to."""
    return next((transport for transport in TRANSPORTS if name == backend(transport)), None)
