"""Builds the policy, and checks before anything trains that it scores a packed row as it scores each sequence alone.

Layers that mix positions (convolutions, linear attention, token shifts), capacities of experts and embeddings that look
at the whole row all show in the log-probs, so no list of such models is needed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch.distributed.tensor import DTensor

from slipstream.learner.attention import layouts
from slipstream.learner.feed.packing import PACKED_ATTENTION, PackedRow, Sample, pack_row
from slipstream.learner.model import export, loading, vision
from slipstream.learner.model.adapter import Adapter
from slipstream.learner.model.adapter_checks import check_used
from slipstream.learner.model.loading import load_network
from slipstream.learner.model.logprobs import token_scores
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.model.precision import Precision
from slipstream.learner.model.sharded_loading import Outline, WholeLoadNeeded
from slipstream.learner.ranks import wrapping
from slipstream.learner.ranks.team import Team
from slipstream.protocol.config import ConfigError, LearnerSection, LoraSection, ModelSection

logger = logging.getLogger(__name__)


def load_policy(
    path: str,
    model: ModelSection,
    scoring: Scoring,
    learner: LearnerSection | None = None,
    longest: int | None = None,
    lora: LoraSection | None = None,
    team: Team | None = None,
    images: bool = False,
) -> Policy:
    """Load the policy and check that this learner can train it.

    Where ranks hold parts of the weights it comes sharded, and each rank has read its part; but whole, with a line that
    says why, where the checkpoint cannot be read by part.

    Args:
        path: Folder or hub name of the weights, the model's own or a checkpoint's.
        learner: How it is run; the defaults without it.
        longest: Tokens of the longest sequence that servers take, `vllm.max_model_len`.
        lora: The adapter that trains in place of the weights, where its `r` is above 0.
        team: Needed to shard the weights. All its ranks must load the policy.
        images: Whether rows have images. Their layout is `padded`.

    Raises:
        ConfigError: This learner cannot train the model.
    """
    learner = learner or LearnerSection()
    precision = Precision.of(model, learner)
    adapted = lora is not None and lora.r > 0
    # Weights that do not train are kept in the type that computes.
    kept = precision.compute if adapted else precision.weights
    policy = None
    if team is not None and team.sharded:
        policy = _loaded_by_part(path, model, scoring, precision, longest, team, images)
    tried: Sequence[layouts.Layout] = ["padded"] if images else layouts.possible(learner.layout, model.attention)
    if policy is None:
        others = layouts.BATCH_ATTENTION if "padded" in tried and model.attention == PACKED_ATTENTION else ()
        network = load_network(path, model, kept, PartialState().device, longest, others, images)
        policy = Policy(network, model.attention, scoring, precision)
    policy.one_batch = team is not None and team.sharded
    network = policy.model
    policy.run(partial(_choose_layout, policy, tried, path, longest, learner.token_budget))
    if images:
        if scoring.routing:
            raise ConfigError(
                "images.enabled = true, learner.router_aux_loss_coef > 0: the routers' loss is not computed for rows "
                "with images: set learner.router_aux_loss_coef = 0"
            )
        policy.run(partial(vision.check, policy))
        policy.layout_note = "learner.layout: padded, since images.enabled = true"
    wrapping.resharded(policy)
    if adapted and lora is not None:
        policy.adapter = Adapter(network, lora, model, kept)
        policy.run(partial(check_used, network, partial(_try_row, policy)))
    published = None if policy.adapter is None else policy.adapter.published()
    export.check_export(network, path, model.revision if path == model.path else None, published)
    if learner.compile:
        loading.compile_layers(network)
        policy.check_compiled()
    if learner.gradient_checkpointing:
        loading.checkpoint_layers(network, None if policy.replay is None else policy.replay.again)
    return policy


def _loaded_by_part(
    path: str,
    model: ModelSection,
    scoring: Scoring,
    precision: Precision,
    longest: int | None,
    team: Team,
    images: bool,
) -> Policy | None:
    """Load this rank's part of the policy; None if a rank cannot read the checkpoint by part."""
    outline, why = None, ""
    try:
        outline = Outline(path, model, precision.weights, images)
    except WholeLoadNeeded as reason:
        why = str(reason)
    if not team.agree(outline is not None) or outline is None:
        if team.leads:
            logger.warning("model.path = %s: each rank loads the whole model first, %s", path, why or "as another must")
        return None
    network = outline.network
    loading.freeze_all_but_text(network, model.train_vision)
    device = PartialState().device
    policy = Policy(network, model.attention, scoring, precision)
    policy = wrapping.sharded(policy, device, precision.of_layers)
    policy.to_empty(device=device)
    outline.fill()
    if longest is not None:
        loading.fix_rope_frequencies(network, longest)
    return policy


def _choose_layout(
    policy: Policy, tried: Sequence[layouts.Layout], path: str, longest: int | None, budget: int
) -> None:
    """Give the policy the first layout that is exact for it; padded, with the first attention that is. Raises
    `ConfigError`: none is."""
    refused: list[ConfigError] = []
    ways = [(layout, attention) for layout in tried for attention in layouts.attentions(layout)]
    for layout, attention in ways:
        try:
            if not policy.use(layout, attention):
                continue
            _check(policy, path, longest, budget)
        except ConfigError as error:
            refused.append(error)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any kind: it is the model's own code
            text = (
                f"model.path = {path}: {type(policy.model).__name__} cannot score a row with model.attention = "
                f"{policy.attention}, learner.layout = {layout}: {type(error).__name__}: {error}; choose another "
                f"model.attention, or another model"
            )
            refused.append(ConfigError(text))
        else:
            if refused:
                policy.layout_note = f"learner.layout: {layout}, since {_reason(refused[0])}"
            return
    raise refused[-1]


def _reason(refused: ConfigError) -> str:
    """Return what a refusal says between the model that it names and its remedy."""
    text = re.sub(r"^model\.path[^:]*: ", "", str(refused))
    return re.split(r"; |: choose|, compared with", text)[0]


def _check(policy: Policy, path: str, longest: int | None, budget: int) -> None:
    if longest is not None:
        config = policy.model.config.get_text_config()
        loading.check_lengths(config, path, longest, padded=policy.layout == "padded")
    _check_positions(policy, path, longest)
    with _exactly(policy) as exactly:
        policy.check_logits()
        if exactly:
            check_packing(policy, longest, budget)
    policy.check_routing()
    policy.check_replay()
    check_packing(policy, longest, budget, exactly)


# Where configs say how many positions there are.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "n_ctx")


def _check_positions(policy: Policy, path: str, longest: int | None) -> None:
    """Raise `ConfigError` if the model has a table of positions that ends below `longest`."""
    config = policy.model.config.get_text_config()
    there = next((size for name in _POSITIONS if (size := getattr(config, name, None))), None)
    if longest is None or not isinstance(there, int) or not there < longest or there > _most_tokens(policy):
        return
    try:
        policy.score([min(5, policy.vocabulary_size - 1)] * min(longest, there + _PADDING_OF_TABLES))
    except (IndexError, RuntimeError, ValueError):
        raise ConfigError(
            f"model.path = {path}: its table of positions ends at {there}, and vllm.max_model_len = {longest}: set "
            f"vllm.max_model_len to at most {there}"
        ) from None


# Rows of tables for other than positions, at most.
_PADDING_OF_TABLES = 8

# Weights that are kept twice while the layout is checked.
_MAX_EXACT = 2_000_000_000


# Attention that is computed in float32 as well; kernels of others take 16 bits alone.
_EXACT_ATTENTION = (PACKED_ATTENTION, *layouts.BATCH_ATTENTION)


@contextmanager
def _exactly(policy: Policy) -> Iterator[bool]:
    """Have a policy of 16 bits compute in float32, and tell whether it does. What 16 bits round off hides how weights
    that were hardly trained mix sequences."""
    given = policy.precision
    tensors = [*policy.model.parameters(), *policy.model.buffers()]
    narrow = {tensor: tensor.data for tensor in tensors if tensor.dtype in (torch.bfloat16, torch.float16)}
    quantised = getattr(policy.model.config, "quantization_config", None) is not None
    parted = any(isinstance(tensor, DTensor) for tensor in tensors)
    alike = given.compute in TOLERANCE or policy.attention not in _EXACT_ATTENTION
    if alike or quantised or parted or sum(data.numel() for data in narrow.values()) > _MAX_EXACT:
        yield False
        return
    try:
        for tensor, data in narrow.items():
            tensor.data = data.float()
        policy.precision = Precision(torch.float32, torch.float32, given.servers)
        yield True
    finally:
        policy.precision = given
        for tensor, data in narrow.items():
            tensor.data = data


# Nats, mean over a sequence's tokens: more than rounding makes, less than any mixing makes.
TOLERANCE = {torch.float32: 2e-4, torch.float64: 2e-4}

TOLERANCE_OF_16_BITS = 0.2

# Nats, of any token, for what has no effect: other tokens in the same computation, of the same shape. Nearly always the
# difference is 0; a mixture may add its experts' tokens up in another order.
LEAK = {torch.float32: 5e-6, torch.float64: 5e-6}

LEAK_OF_16_BITS = 0.02

# Tokens of the made-up sequences: the first two share their first `SHARED` tokens, the others nothing. Padded, the last
# one stands next to the second.
LENGTHS = (13, 9, 12, 8)

SHARED = 5

# Then the same with sequences so many times as long, for layers that look further back, if servers take them.
STRETCH = {"cpu": 8}
STRETCH_ELSEWHERE = 24

# Then a row of `learner.token_budget` tokens, with a sequence as long as servers take or as this, for windows of
# attention and capacities of experts; if a forward pass over it costs at most so many products of weights and tokens.
FAR = 2048
WORK = {"cpu": 3e10}
WORK_ELSEWHERE = 1e14

# Sequences of a row that are compared.
_COMPARED = len(LENGTHS)

# Sequences whose first halves are kept while all else in the row is drawn again. In pairs it is half the work, and of
# the other sequence of the pair the second half is drawn again too.
_KEPT_ALONE = ((0,), (1,), (2,), (3,))
_KEPT_IN_PAIRS = ((0, 3), (1, 2))


@torch.no_grad()
def check_packing(policy: Policy, longest: int | None, budget: int | None = None, was_exact: bool = False) -> None:
    """Raise `ConfigError` if the log-probs of a row of several sequences are not those of each alone, through the
    network's own eager attention and its own logits.

    Args:
        longest: The servers' `max_model_len`; None to leave out the check at far positions.
        budget: `learner.token_budget`; None to leave out the check of a full row.
        was_exact: Whether all rows passed in float32. Then the longer ones show what kernels of 16 bits do.
    """
    stretch = min(STRETCH.get(policy.device.type, STRETCH_ELSEWHERE), (longest or 0) // max(LENGTHS))
    if stretch <= 1 or not was_exact:
        _check_rows(policy, LENGTHS, longest)
    if stretch > 1:
        _check_rows(policy, tuple(stretch * length for length in LENGTHS), longest)
    if longest is not None and budget is not None and (far := _far_lengths(policy, longest, budget)):
        _check_rows(policy, far, longest)


def _far_lengths(policy: Policy, longest: int, budget: int) -> tuple[int, ...]:
    """Return the lengths of a full row's sequences, at first a long one; none if they would cost too much, or if the
    row would be shorter than one that was checked."""
    room = min(budget, _most_tokens(policy))
    long = min(longest, FAR, room // 2)
    if long <= max(LENGTHS) * STRETCH["cpu"] or room <= sum(LENGTHS) * STRETCH["cpu"]:
        return ()
    lengths = (long, long // 2, *LENGTHS[2:])
    return lengths + (room - sum(lengths)) // (long // 2) * (long // 2,)


def _most_tokens(policy: Policy) -> int:
    work = WORK.get(policy.device.type, WORK_ELSEWHERE)
    return int(work / sum(parameter.numel() for parameter in policy.model.parameters()))


def _check_rows(policy: Policy, lengths: tuple[int, ...], longest: int | None) -> None:
    row, sequences = _made_up(policy, lengths)
    with _eager(policy) as eager:
        alone = [_alone(policy, ids, eager) for ids in sequences[:_COMPARED]]
        cut = lengths[0] // 2
        later = _redrawn(policy, sequences[0], torch.arange(cut, device=policy.device))
        ahead = float((_alone(policy, later, eager)[: cut - 1] - alone[0][: cut - 1]).abs().max())
    if ahead > _leak_bound(policy):
        raise ConfigError(
            f"model.path: {type(policy.model).__name__} scores a token by what comes after it: it is no causal "
            f"language model; choose a decoder-only model"
        )
    scores = policy.at(row, 1.0).logprobs
    _compare(policy, row, scores, alone, lengths)
    _check_apart(policy, row, scores, lengths)
    # A batch counts its positions; rotary embeddings may still look at the longest of its sequences.
    reads_length = policy.layout != "padded" or bool(
        getattr(policy.model.config.get_text_config(), "rope_parameters", None)
    )
    if reads_length and longest is not None and longest > max(lengths):
        far = _with_far_position(row, longest - 1)
        _compare(policy, far, policy.at(far, 1.0).logprobs, alone[:-1], lengths, f" at position {longest - 1}")


def _check_apart(policy: Policy, row: PackedRow, before: torch.Tensor, lengths: tuple[int, ...]) -> None:
    """Raise `ConfigError` if a score changes with tokens of other sequences, or with later tokens.

    Weights that were never trained hardly show it: all their scores are nearly alike. But where nothing leaks, nothing
    changes at all.

    Args:
        before: The row's scores, float32 [S].
    """
    for kept in _KEPT_ALONE if lengths == LENGTHS else _KEPT_IN_PAIRS:
        halves = [(row.rollout == rollout).nonzero()[: lengths[rollout] // 2, 0] for rollout in kept]
        scored = torch.cat(halves)
        places = row.positions[row.scored[scored]]
        others = replace(row, input_ids=_redrawn(policy, row.input_ids[0], places)[None])
        after = policy.at(others, 1.0).logprobs
        leak = float((after[scored] - before[scored]).abs().max())
        if leak > _leak_bound(policy):
            raise ConfigError(
                f"model.path: {type(policy.model).__name__} scores a token {leak:.1g} nats differently where "
                f"other sequences of its row change{_layers_of(policy)}: the learner's rows would mix sequences"
            )


def _leak_bound(policy: Policy) -> float:
    return LEAK.get(policy.precision.compute, LEAK_OF_16_BITS)


def _redrawn(policy: Policy, ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Draw other tokens, int64 [T], for all but the places `kept`."""
    random = np.random.default_rng(1)
    size = policy.vocabulary_size
    other = (ids + torch.from_numpy(random.integers(1, size, len(ids))).to(ids.device)) % size
    return other.index_copy(0, kept, ids[kept])


def _layers_of(policy: Policy) -> str:
    kinds = sorted(set(getattr(policy.model.config.get_text_config(), "layer_types", None) or []))
    return f" (layers of type {', '.join(kinds)})" if kinds else ""


def _made_up(policy: Policy, lengths: tuple[int, ...]) -> tuple[PackedRow, list[torch.Tensor]]:
    """Make a row, and return it with its sequences, each int64 [T]."""
    random = np.random.default_rng(0)
    size = policy.vocabulary_size
    sequences = [random.integers(0, size, length).astype(np.int32) for length in lengths]
    sequences[1][:SHARED] = sequences[0][:SHARED]
    samples = []
    for rollout, ids in enumerate(sequences):
        weights = np.ones(len(ids), dtype=np.float32)
        weights[0] = 0.0
        samples.append(Sample(ids, np.zeros_like(weights), weights, np.zeros_like(ids), weights > 0, rollout))
    row = pack_row(samples, branches=policy.layout == "trie").to(policy.device)
    return row, [torch.from_numpy(ids).to(policy.device, torch.int64) for ids in sequences]


@torch.no_grad()
def _try_row(policy: Policy) -> None:
    row, _ = _made_up(policy, LENGTHS)
    policy.at(row, 1.0)


def _with_far_position(row: PackedRow, position: int) -> PackedRow:
    """Move the last token of the last sequence to `position`: embeddings that look at the greatest position of a row
    then treat the other sequences differently."""
    positions = row.position_ids.clone()
    places = row.positions[row.scored[row.rollout == len(LENGTHS) - 1]]
    positions[0, places.max()] = position
    return replace(row, position_ids=positions, longest=position + 1)


# Tokens of a sequence whose logits may be held whole.
_WITH_LOGITS = 128


def _alone(policy: Policy, ids: torch.Tensor, eager: bool) -> torch.Tensor:
    """Score a sequence by itself, float32 [T - 1]. Where `eager` is false, through the learner's own attention."""
    if not eager:
        return torch.from_numpy(policy.score(ids.tolist())).to(ids.device)
    with policy.precision.autocast(policy.device):
        if len(ids) <= _WITH_LOGITS:
            logits = policy.model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
            scores: torch.Tensor = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            return scores
        hidden = policy.tower(input_ids=ids[None, :-1], use_cache=False).last_hidden_state[0]
        return token_scores(policy.lm_head(1.0), hidden, ids[1:]).logprobs


@contextmanager
def _eager(policy: Policy) -> Iterator[bool]:
    """Whether the network can be switched to its eager attention, as it is inside."""
    network: Any = policy.model
    try:
        network.set_attn_implementation("eager")
    except (ValueError, ImportError, AttributeError):
        yield False
        return
    try:
        yield network.config._attn_implementation == "eager"
    finally:
        network.set_attn_implementation(policy.attention)


def _compare(
    policy: Policy,
    row: PackedRow,
    scores: torch.Tensor,
    alone: list[torch.Tensor],
    lengths: tuple[int, ...],
    far: str = "",
) -> None:
    """Raise `ConfigError` if the row's `scores`, float32 [S], are not those of each sequence alone."""
    apart = [float((scores[row.rollout == i] - expected).abs().mean()) for i, expected in enumerate(alone)]
    worst = max(apart)
    if worst <= TOLERANCE.get(policy.precision.compute, TOLERANCE_OF_16_BITS):
        return
    which = apart.index(worst)
    name = type(policy.model).__name__
    refusal = (
        f"model.path: {name} scores a sequence of {lengths[which]} tokens {worst:.3g} nats a token off where it stands "
        f"in a packed row, compared with alone"
    )
    if far:
        raise ConfigError(
            f"{refusal}, because another sequence has a token{far}: its position embeddings look at the whole row. "
            f"Lower vllm.max_model_len to the length that the model was trained on before it was extended"
        )
    raise ConfigError(
        f"{refusal}, through its eager attention{_layers_of(policy)}: the learner's rows would mix sequences, or "
        f"model.attention = {policy.attention} computes something else; choose a model with attention layers only"
    )
