"""Counts the bytes that a server or a rank of the learner takes on one GPU, by kind; and those of a checkpoint.

Sizes of weights follow from the model's shape and the run file. What a process takes besides is an estimate, with its
formula in the function that makes it; none was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self

from slipstream.deploy.servers.model_shape import BYTES, ModelShape
from slipstream.protocol.config import LearnerSection, RunConfig
from slipstream.protocol.config.adapter_checks import is_adapter_published_alone
from slipstream.protocol.config.sections.servers import flag_value, served_bits, size_of
from slipstream.weight_sync.transports.registry import TRANSPORTS

GIB = 1024**3

# Buffers of a bucket at each end of a transport: one is filled while the other is sent or read.
BUCKETS = 2

# CUDA's context, NCCL's buffers and captured graphs of a vLLM server; context and NCCL of a rank of the learner.
SERVER_RUNTIME = 2 * GIB
LEARNER_RUNTIME = GIB

# Tokens that vLLM computes in one step by default (vllm 0.32, `get_batch_defaults` for GPUs of 70 GiB and more).
BATCHED_TOKENS = 8192

# Optimisers: values kept for each weight; their bytes, None for those of the weight; values of a step's own
# temporaries for each weight. Those that page keep their values on the host while the GPU is full.
_OPTIMISERS: dict[str, tuple[float, float | None, int]] = {
    "adamw_torch_fused": (2, None, 0),
    "adamw_torch": (2, None, 1),
    "adamw_torch_8bit": (2, 1.02, 0),
    "adamw_torch_4bit": (2, 0.54, 0),
    "adamw_bnb_8bit": (2, 1.02, 0),
    "adamw_8bit": (2, 1.02, 0),
    "paged_adamw_32bit": (0, None, 0),
    "paged_adamw_8bit": (0, None, 0),
    "ademamix": (3, 4, 0),
    "ademamix_8bit": (3, 1.02, 0),
    "paged_ademamix_32bit": (0, None, 0),
    "paged_ademamix_8bit": (0, None, 0),
    "lion_32bit": (1, 4, 0),
    "lion_8bit": (1, 1.02, 0),
    "paged_lion_32bit": (0, None, 0),
    "paged_lion_8bit": (0, None, 0),
    "rmsprop_bnb": (1, 4, 0),
    "rmsprop_bnb_8bit": (1, 1.02, 0),
    "rmsprop_bnb_32bit": (1, 4, 0),
    "stable_adamw": (2, None, 1),
    "adafactor": (0, None, 1),
    "muon": (1, None, 0),
    "sgd": (0, None, 1),
    "adagrad": (1, None, 1),
    "rmsprop": (1, None, 1),
}

# Arguments of an optimiser, each of which keeps one more value for each weight.
_KEEPS_MORE = ("momentum", "amsgrad", "centered", "beta1")


@dataclass(frozen=True)
class Parallelism:
    """How a vLLM server spreads its model over GPUs. Data-parallel engines hold a copy each, but for the experts of a
    mixture, which all GPUs of a stage share, with and without `--enable-expert-parallel` (vllm 0.32,
    `FusedMoEParallelConfig.make`)."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Self:
        """Read it from a server's command line."""
        return cls(
            int(flag_value(arguments, "--tensor-parallel-size", "-tp") or 1),
            int(flag_value(arguments, "--pipeline-parallel-size", "-pp") or 1),
            int(flag_value(arguments, "--data-parallel-size", "-dp") or 1),
            int(flag_value(arguments, "--prefill-context-parallel-size", "-pcp") or 1),
        )

    @property
    def gpus(self) -> int:
        """GPUs of a server."""
        return self.tensor * self.pipeline * self.data * self.context


@dataclass(frozen=True)
class ByteCounts:
    """Bytes of one process on one GPU, by kind."""

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(count for _, count in self.kinds())

    def kinds(self) -> Iterator[tuple[str, int]]:
        """Return the name and the bytes of each kind that takes any."""
        for kind in fields(self):
            if count := getattr(self, kind.name):
                yield kind.name, count

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {gib(count)}" for name, count in self.kinds())


@dataclass(frozen=True)
class ServerBytes(ByteCounts):
    """Bytes of a server on each of its GPUs.

    Attributes:
        weights: Its shard of the weights that serve.
        new_weights: The shard of the next version, built during generation.
        staging: Buffers for what arrives.
        engine: vLLM's own.
        cache: Keys and values.
    """

    weights: int
    new_weights: int
    staging: int
    engine: int
    cache: int


@dataclass(frozen=True)
class LearnerBytes(ByteCounts):
    """Bytes of one rank of the learner.

    Attributes:
        weights: Those that the optimiser steps on; with an adapter, the base.
        gradients: Their gradients.
        optimiser: What the optimiser keeps, and its temporaries.
        computing: Weights in the type that computes; with `learner.shard_weights`, of the layers at work.
        reference: Further models: that of `learner.kl_coef`, and the policy of one step before.
        published: The rank's share of the weights that are being published.
        staging: Buffers for what is sent.
        logits: `learner.logits_mib`.
        activations: What the forward pass keeps for the backward pass.
        runtime: CUDA's context and NCCL's buffers.
    """

    weights: int
    gradients: int
    optimiser: int
    computing: int
    reference: int
    published: int
    staging: int
    logits: int
    activations: int
    runtime: int = LEARNER_RUNTIME


def server_bytes(shape: ModelShape, config: RunConfig, transport: str) -> ServerBytes:
    """Count a server's bytes on the fullest of its GPUs, with a cache for one sequence of `vllm.max_model_len`."""
    arguments, parallel = config.vllm.args, Parallelism.of(config.vllm.args)
    kept, published = BYTES[config.served_dtype], BYTES[config.model.dtype]
    bits = served_bits(arguments)
    layers, ends = _stage(shape, parallel)
    weights = int(layers * (bits / 8 if bits else kept) + ends * kept)
    staged = TRANSPORTS[transport].stages
    alone = _published_alone(config)
    if alone:
        weights += (min(config.queue.max_staleness, 6) + 3) * shape.adapter(config.lora.r) * kept // parallel.tensor
    return ServerBytes(
        weights,
        weights if staged and not alone else 0,
        0 if alone else _arriving(shape, config, transport, published),
        _engine(shape, config, parallel),
        config.vllm.max_model_len * token_bytes(shape, config),
    )


def token_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Return the bytes of a token's keys and values on one GPU of a server."""
    parallel = Parallelism.of(config.vllm.args)
    eight_bits = (flag_value(config.vllm.args, "--kv-cache-dtype") or "").startswith("fp8")
    heads = _up(shape.key_heads, parallel.tensor)
    size = 1 if eight_bits else BYTES[config.served_dtype]
    return 2 * _up(shape.layers, parallel.pipeline) * heads * shape.head * size


def learner_bytes(
    shape: ModelShape, config: RunConfig, tokens: int, checkpointing: bool, beside: int = 0
) -> LearnerBytes:
    """Count the bytes of one rank.

    Args:
        shape: The model.
        config: The run file.
        tokens: Tokens of a row.
        checkpointing: Whether only the layers' inputs are kept for the backward pass.
        beside: Servers on its GPU.
    """
    learner, adapter = config.learner, shape.adapter(config.lora.r)
    published = BYTES[config.model.dtype]
    compute = 4 if config.model.dtype == "float16" else published
    kept = compute if learner.weights_dtype == "model" else 4
    parts = learner.ranks if learner.shard_weights else 1
    whole = shape.parameters
    alone = _published_alone(config)
    if adapter:
        bits = config.model.quantised_bits
        base = shape.layers * shape.layer * (bits / 8 + 1 / 16) + shape.ends * compute if bits else whole * compute
        weights, trained, ends, kept, stream = int(base) + 4 * adapter, adapter, 0, 4, compute
    else:
        weights, trained, ends, stream = whole * kept // parts, whole, shape.ends, kept
    computing, gathered = (0, 0) if adapter or kept == compute else (whole * compute, 0)
    if parts > 1:
        # Two layers are whole at a time, one that computes and the next; embedding and output layer always are.
        computing, gathered = (2 * shape.layer + shape.ends) * compute, (shape.layer + shape.ends) * kept
    return LearnerBytes(
        weights,
        trained * kept // parts + gathered,
        _optimiser(learner, trained, ends, kept) // parts,
        computing,
        _further_models(learner, whole * compute, trained * kept, bool(adapter)) // parts,
        (adapter if alone else whole) * published // learner.ranks,
        0 if alone else _leaving(config, beside),
        learner.logits_mib << 20,
        activation_bytes(shape, tokens, checkpointing, stream, compute),
    )


def activation_bytes(shape: ModelShape, tokens: int, checkpointing: bool, stream: int, compute: int) -> int:
    """Estimate what the forward pass of a row keeps, attention being FlashAttention (after arXiv:2205.05198, section 4,
    with gated feed-forward blocks and norms in float32).

    A token keeps in each layer: the norms' inputs and outputs, 16 h; the inputs of the linear layers, 2 c h; queries,
    keys, values and what attention returns, c (2 q + 2 k); four tensors of the feed-forward block, 4 c i. h, q, k and i
    are channels and c the bytes of `compute`; of a mixture, i counts for each chosen expert. One layer's worth more is
    at work in the backward pass.

    Args:
        shape: The model.
        tokens: Tokens of the row.
        checkpointing: Whether only the layers' inputs are kept.
        stream: Bytes of a value between layers.
        compute: Bytes of a value inside them.
    """
    experts = max(1, shape.chosen)
    attention = compute * 2 * (shape.heads + shape.key_heads) * shape.head
    copied = compute * shape.hidden * (shape.chosen if shape.experts else 0)
    layer = (16 + 2 * compute) * shape.hidden + attention + 4 * compute * shape.inner * experts + copied
    kept = shape.layers * shape.hidden * stream + layer if checkpointing else shape.layers * layer
    return tokens * (kept + layer + 16 * shape.hidden)


def gib(count: float) -> str:
    """Show bytes in GiB; in MiB below a tenth of one, which would be 0.0 GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 or count <= 0 else f"{count / 2**20:.0f} MiB"


def _arriving(shape: ModelShape, config: RunConfig, transport: str, published: int) -> int:
    """Return the bytes of a server's buffers for what arrives, from all ranks together."""
    if transport == "ipc":  # it is loaded from where it lies
        return 0
    # In place, tensors arrive whole.
    largest = 0 if TRANSPORTS[transport].stages else shape.largest_tensor * published
    return BUCKETS * max(config.weight_sync.bucket_bytes, largest)


def _leaving(config: RunConfig, beside: int) -> int:
    """Return the bytes of a rank's buffers for what it sends to each server: by ipc two, to those `beside` it."""
    bucket = config.weight_sync.bucket_bytes
    servers = max(1, len(config.vllm.servers) or config.vllm.count)
    return BUCKETS * beside * bucket if beside else servers * bucket // config.learner.ranks


def _stage(shape: ModelShape, parallel: Parallelism) -> tuple[int, int]:
    """Return the parameters of layers, and of embedding and output layer, on a GPU of the fullest stage."""
    layers = _up(shape.layers, parallel.pipeline)
    dense = _up(layers * shape.layer_dense, parallel.tensor)
    experts = _up(layers * shape.layer_experts, parallel.tensor * parallel.data * parallel.context)
    ends = shape.ends if parallel.pipeline == 1 else shape.embedding
    return dense + experts, _up(ends, parallel.tensor)


def _engine(shape: ModelShape, config: RunConfig, parallel: Parallelism) -> int:
    """Estimate what vLLM takes besides weights and cache: runtime, a step's activations, and the logits of a sample.

    A step holds about four tensors of the hidden channels and two of the feed-forward block for each token; sampling
    holds three float32 values for each sequence and word.
    """
    tokens = size_of(flag_value(config.vllm.args, "--max-num-batched-tokens") or "") or BATCHED_TOKENS
    size = BYTES[config.served_dtype]
    inner = _up(shape.inner * max(1, shape.chosen), parallel.tensor)
    logits = 12 * config.vllm.max_num_seqs * shape.vocabulary
    return SERVER_RUNTIME + tokens * size * (4 * shape.hidden + 2 * inner) + logits


def checkpoint_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Return the least bytes that a checkpoint takes on disk: weights, what the optimiser keeps, and a reference that
    moves."""
    learner, adapter = config.learner, shape.adapter(config.lora.r)
    compute = 4 if config.model.dtype == "float16" else BYTES[config.model.dtype]
    if adapter:
        return shape.parameters * BYTES[config.model.dtype] + 4 * adapter + _optimiser_state(learner, adapter, 0, 4)
    kept = compute if learner.weights_dtype == "model" else 4
    moved = shape.parameters * compute if learner.reference_sync_steps else 0
    return shape.parameters * kept + _optimiser_state(learner, shape.parameters, shape.ends, kept) + moved


def _optimiser(learner: LearnerSection, trained: int, ends: int, kept: int) -> int:
    """Return the bytes of the optimiser's state and of its step's temporaries."""
    return _optimiser_state(learner, trained, ends, kept) + trained * _OPTIMISERS[learner.optim][2] * kept


def _optimiser_state(learner: LearnerSection, trained: int, ends: int, kept: int) -> int:
    values, size, _ = _OPTIMISERS[learner.optim]
    values += sum(bool(learner.optim_args.get(name)) for name in _KEEPS_MORE)
    count = trained * values * (kept if size is None else size)
    if learner.optim == "muon":  # AdamW takes embedding and output layer
        count += ends * kept
    elif size == 1.02 and "torch" not in learner.optim:  # bitsandbytes keeps those of embeddings in float32
        count += ends * values * (4 - size)
    return int(count)


def _further_models(learner: LearnerSection, reference: int, previous: int, adapted: bool) -> int:
    """Return the bytes of the models next to the policy. The base of an adapter is the reference already."""
    of_reference = reference if learner.kl_coef > 0 and not adapted else 0
    return of_reference + (previous if learner.proximal == "last_step" else 0)


def _published_alone(config: RunConfig) -> bool:
    return is_adapter_published_alone(config.weight_sync.adapter_only, config.model, config.lora, on_gpu=True)


def _up(count: int, parts: int) -> int:
    return -(-count // parts)
