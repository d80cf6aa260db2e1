"""How weights travel from the learner to a server's workers: one module or folder a transport, chosen by
`weight_sync.transport`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protocol.config import WeightSyncSection
    from weight_sync.transports.base import Transport


@dataclass(frozen=True)
class Ends:
    """A transport's two ends as `module:class`, so that each process imports only its own.

    learner: a `base.Transport`, made from `WeightSyncSection`. engine: a `WeightTransferEngine` of vLLM.
    stages: as `base.Transport.stages`.
    """

    learner: str
    engine: str
    stages: bool = True


# The names are those of the setting, and of vLLM's weight-transfer backends.
TRANSPORTS = {
    "gloo": Ends("weight_sync.transports.gloo.sender:GlooTransport", "weight_sync.transports.gloo.engine:GlooEngine"),
}


def build(section: WeightSyncSection) -> Transport:
    """The learner's end of the transport that `section` names, not connected yet."""
    module, _, name = TRANSPORTS[section.transport].learner.partition(":")
    transport: Transport = getattr(import_module(module), name)(section)
    return transport
