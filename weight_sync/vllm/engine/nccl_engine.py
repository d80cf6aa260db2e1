"""Extends vLLM's own NCCL engine by a check of the tensors that it loads in place.

Nothing is built during generation, so there is no shadow to compare the live layers with. Each tensor is noted as it
passes: each must come once, and every parameter of the model must get some. A tensor that is a parameter as it stands
(same name, shape and type) must be there bit for bit after the load; the parts of a fused layer are compared as they
stand in it, before vLLM packs or quantises it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from slipstream.weight_sync.vllm.engine.fingerprints import ModelFingerprints
from slipstream.weight_sync.vllm.engine.layer_proof import watching
from slipstream.weight_sync.vllm.engine.reload import DirectWrites, UpdateCheck


class NcclEngine(NCCLWeightTransferEngine):
    """Engine of one vLLM worker.

    Attributes:
        proven: Fingerprints that the live layers must have since the last update, None if unknown.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.proven: ModelFingerprints | None = None
        self._known: set[str] = set()
        self._check: UpdateCheck | None = None

    def start_weight_update(self) -> None:
        """Open an update."""
        self.proven = None
        super().start_weight_update()
        self._check = UpdateCheck(self.model)

    def receive_weights(self, update_info: Any) -> None:
        """Receive and load tensors. Raises ValueError if one comes twice, or in another type than the model's."""
        check = self._check
        if check is None:
            raise RuntimeError("no update was begun: call /start_weight_update first")
        check.check_announced(update_info.names, update_info.dtype_names, self.vllm_config)
        load = self.model.load_weights

        def noted(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                check.note(name, tensor)
                yield name, tensor

        with ExitStack() as undo:
            watched = undo.enter_context(watching(self._layers(), prints=True))
            self.model.load_weights = lambda weights: load(noted(weights))
            undo.callback(self.model.__dict__.pop, "load_weights", None)
            undo.enter_context(DirectWrites(self.model))
            super().receive_weights(update_info)
        check.take(watched)

    def finish_weight_update(self) -> None:
        """End the update. Raises ValueError if parameters of the model were not sent: it is not whole then."""
        check, self._check = self._check, None
        if check is None:
            raise RuntimeError("no update was begun: call /start_weight_update first")
        check.check_whole()
        with watching(self._layers(), prints=True) as watched:
            super().finish_weight_update()
        check.take(watched)
        self.proven = ModelFingerprints(check.prints, products=check.products, known=self._known)

    def _layers(self) -> list[tuple[str, Any, Any]]:
        return [(name, module, module) for name, module in self.model.named_modules()]
