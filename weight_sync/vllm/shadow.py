"""The new weights of one worker, made ready beside generation so that the pause holds nothing but an exchange."""

from __future__ import annotations

from typing import Any

from weight_sync.vllm.reload import load_staged
from weight_sync.vllm.staging import Weights


class Reload:
    """Weights that are loaded into the live model under the pause."""

    def __init__(self, model: Any, model_config: Any, weights: Weights) -> None:
        self._model = model
        self._model_config = model_config
        self._weights = weights

    def exchange(self) -> None:
        """Make the live model compute with the new weights; generation must stand still. Whatever it raises, the model
        may then be half new."""
        load_staged(self._model, self._model_config, self._weights)


def build(model: Any, vllm_config: Any, weights: Weights) -> Any:
    """What exchanges the weights of `model` for `weights` (tensors by name, as in a checkpoint): has `exchange()`.

    Raises ValueError where names, shapes or types are not the model's; the live model is not touched.
    """
    return Reload(model, vllm_config.model_config, weights)
