"""The shape of a model, as far as memory depends on it, from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from slipstream.protocol.config import ModelSection

# Bytes of a value.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder. Norms, biases and routers are not counted: they are less than 1 % of any such model.

    Attributes:
        layers: Number of layers.
        hidden: Channels between layers.
        inner: Channels inside a feed-forward block, or inside one expert.
        heads: Attention heads.
        key_heads: Heads of keys and values.
        head: Channels of a head.
        vocabulary: Rows of the embedding.
        tied: Whether the output layer is the embedding.
        experts: Experts of a layer; 0: its feed-forward block is dense.
        chosen: Experts that a token goes to.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    chosen: int = 0

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, or of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def ends(self) -> int:
        """Parameters of embedding and output layer together."""
        return self.embedding * (1 if self.tied else 2)

    @property
    def layer_dense(self) -> int:
        """Parameters of a layer without its experts."""
        attention = 2 * self.hidden * self.head * (self.heads + self.key_heads)
        return attention + (0 if self.experts else 3 * self.hidden * self.inner)

    @property
    def layer_experts(self) -> int:
        """Parameters of a layer's experts."""
        return 3 * self.hidden * self.inner * self.experts

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        return self.layer_dense + self.layer_experts

    @property
    def parameters(self) -> int:
        """All parameters; of a mixture, those of all its experts."""
        return self.ends + self.layers * self.layer

    @property
    def largest_tensor(self) -> int:
        """Parameters of the largest tensor of a checkpoint."""
        return max(self.embedding, self.hidden * max(self.inner, self.heads * self.head))

    def adapter(self, rank: int) -> int:
        """Return the parameters of an adapter on all linear layers; of a mixture, on those of attention."""
        query, key = self.heads * self.head, self.key_heads * self.head
        channels = 2 * (self.hidden + query) + 2 * (self.hidden + key)
        if not self.experts:
            channels += 3 * (self.hidden + self.inner)
        return self.layers * rank * channels


def shape_of(architecture: Mapping[str, Any]) -> ModelShape | None:
    """Read the shape from a model's config.json; None for an architecture that is not the usual decoder, such as one
    whose layers differ in size."""
    text = architecture.get("text_config") or architecture
    try:
        hidden, heads = text["hidden_size"], text["num_attention_heads"]
        experts = text.get("num_experts") or text.get("num_local_experts") or 0
        shape = ModelShape(
            layers=text["num_hidden_layers"],
            hidden=hidden,
            inner=(experts and text.get("moe_intermediate_size")) or text["intermediate_size"],
            heads=heads,
            key_heads=text.get("num_key_value_heads") or heads,
            head=text.get("head_dim") or hidden // heads,
            vocabulary=text["vocab_size"],
            tied=bool(text.get("tie_word_embeddings")),
            experts=experts,
            chosen=text.get("num_experts_per_tok") or 1 if experts else 0,
        )
    except (KeyError, TypeError):
        return None
    sizes = [shape.layers, shape.hidden, shape.inner, shape.heads, shape.key_heads, shape.head, shape.vocabulary]
    usual = all(isinstance(size, int) for size in [*sizes, shape.experts, shape.chosen]) and min(sizes) > 0
    return shape if usual else None


def architecture_of(model: ModelSection) -> Mapping[str, Any] | None:
    """Read the model's config.json; None if it cannot be read, or if the model is not downloaded yet."""
    from huggingface_hub import try_to_load_from_cache

    path = Path(model.path)
    try:  # a path that is no folder may be no name of the hub either
        file = (
            path / "config.json"
            if path.is_dir()
            else try_to_load_from_cache(model.path, "config.json", revision=model.revision)
        )
        if not isinstance(file, str | Path):
            return None
        architecture = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return architecture if isinstance(architecture, dict) else None


def fetch_architecture(model: ModelSection) -> None:
    """Download a hub model's config.json if it is not here yet. A failure shows again when the model is loaded."""
    from huggingface_hub import hf_hub_download

    if not Path(model.path).exists() and architecture_of(model) is None:
        with suppress(OSError, ValueError):
            hf_hub_download(model.path, "config.json", revision=model.revision)


def model_shape(model: ModelSection) -> ModelShape | None:
    """Return the shape of the run's model; None if it is not known."""
    architecture = architecture_of(model)
    return None if architecture is None else shape_of(architecture)


def checkpoint_dtype(model: ModelSection) -> str | None:
    """Return the type that the checkpoint's config names, if `model.dtype` can be that; else None."""
    architecture = architecture_of(model) or {}
    for part in (architecture, architecture.get("text_config") or {}):
        found = part.get("dtype") or part.get("torch_dtype")
        if found in get_args(ModelSection.model_fields["dtype"].annotation):
            return str(found)
    return None
