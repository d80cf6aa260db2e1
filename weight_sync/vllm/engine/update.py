"""One update on its way into a worker: `Staging` receives and builds it, `UpdateCheck` checks a load in place."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from weight_sync.vllm.engine.contract import VllmConfig
from weight_sync.vllm.engine.fingerprints import Products, fingerprint
from weight_sync.vllm.engine.layer_proof import Watched

logger = logging.getLogger(__name__)


class UpdateCheck:
    """Checks one update of `model`, which vLLM has made ready to load.

    Attributes:
        prints: Fingerprints that the live tensors must have after the load, by name.
        products: Expected products of layers that cannot be read, by the layer's name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.prints: dict[str, str] = {}
        self.products: dict[str, Products] = {}
        self._model = model
        self._as_they_stand = {
            name: (parameter.shape, parameter.dtype)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self._seen: set[str] = set()

    def check_announced(self, names: Sequence[str], dtypes: Sequence[str], vllm_config: VllmConfig) -> None:
        """Check names and types before anything is received.

        Raises:
            ValueError: A tensor comes twice, or in another type than the model's.
        """
        twice = [name for name, times in Counter([*names, *self._seen]).items() if times > 1]
        if twice:
            raise ValueError(f"{len(twice)} tensors were sent twice, among them {twice[0]}")
        known = {str(dtype) for _, dtype in self._as_they_stand.values()} | {str(vllm_config.model_config.dtype)}
        known |= {str(buffer.dtype) for buffer in self._model.buffers()}
        for name, dtype in zip(names, dtypes, strict=True):
            if f"torch.{dtype}" not in known:
                raise ValueError(
                    f"{name} came as {dtype}, and this server's model is {sorted(known)}: "
                    f"set model.dtype to one type for both"
                )

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Note a tensor that is about to be loaded."""
        self._seen.add(name)
        if self._as_they_stand.get(name) == (tensor.shape, tensor.dtype):
            self.prints[name] = fingerprint(tensor)

    def take(self, watched: Watched) -> None:
        """Add the values that layers had when they were loaded. Fingerprints of tensors that arrived under a
        parameter's name take precedence."""
        self.prints = watched.prints | self.prints
        self.products |= watched.products

    def check_whole(self) -> None:
        """Check that every parameter was sent whole.

        To be called before vLLM ends the load: vLLM only warns, and keeps the old weights of a layer that got nothing.

        Raises:
            ValueError: Some were not.
        """
        short = [name for name, module in self._model.named_modules() for name in self._short(name, module)]
        if short:
            raise ValueError(
                f"{len(short)} parameters of this server's model were not sent whole, among them {short[0]}: it holds "
                f"older weights there"
            )

    def _short(self, name: str, module: Any) -> Iterator[str]:
        info = get_layerwise_info(module)
        parameters = {of: tensor for of, tensor in info.restore_metadata[0].items() if of not in SKIP_TENSORS}
        if not info.can_load() or not parameters or is_deferred_attention_layer(module):
            return
        # A tied head has the embedding's weight, and a padded vocabulary is more than was sent.
        if isinstance(module, ParallelLMHead) and info.load_numel == 0:
            return
        if isinstance(module, VocabParallelEmbedding) and info.load_numel > 0:
            return
        # Some quantised layers have more than a checkpoint holds, and experts may be another worker's.
        plain = type(getattr(module, "quant_method", None)).__name__.startswith(("Unquantized", "NoneType"))
        plain = plain and all(tensor.ndim < 3 for tensor in parameters.values())
        if info.load_numel == 0 or (plain and info.load_numel < sum(tensor.numel() for tensor in parameters.values())):
            yield from (f"{name}.{of}" for of in parameters)


Weights = dict[str, torch.Tensor]


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
