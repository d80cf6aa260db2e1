"""The policy: a transformers causal language model that scores packed rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers.utils import SAFE_WEIGHTS_NAME

from slipstream.learner.algorithm.loss_terms import Routing
from slipstream.learner.attention import layouts
from slipstream.learner.attention.experts import RouterReplay, UnknownRouters
from slipstream.learner.feed.packing import PACKED_ATTENTION, PackedRow, Sample, pack_row
from slipstream.learner.feed.recorded_experts import RoutedLayers
from slipstream.learner.model import export, vision
from slipstream.learner.model.adapter import Adapter
from slipstream.learner.model.loading import text_tower
from slipstream.learner.model.logprobs import LmHead, Mask, TokenScores, token_scores
from slipstream.learner.model.precision import Precision
from slipstream.protocol.config import ConfigError

Result = TypeVar("Result")

# How near a measured scale of logits is to the number in the config that it comes from.
_SAME_SCALE = 0.01

# Tokens of the row that routers are tried on. No layer has as many experts, which would look like as many tokens.
_REPLAYED = 13


@dataclass(frozen=True)
class Scoring:
    """How rows are scored.

    Attributes:
        temperature: That of the sampler.
        logits_mib: MiB that logits, and everything computed from them, may take.
        routing: Whether scores of a row say how its tokens were routed to experts.
        replay: Whether routers choose the experts that a row names (`learner.router_replay`).
    """

    temperature: float
    logits_mib: int
    routing: bool = False
    replay: bool = False


# Where configs say at which value logits are capped.
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")

# Tokens whose logits are compared with the model's own, the standard deviation of large ones, and how close they are.
_LOGITS_COMPARED, _LARGE_LOGITS = 48, 10.0
_CLOSE_LOGITS, _CLOSE_LOGITS_OF_16_BITS = 1e-3, 0.02


class Policy(torch.nn.Module):
    """Scores the sampled tokens of a packed row; this is what `Accelerator.prepare` wraps.

    It stays in evaluation mode: dropout would make its log-probs differ from the sampler's.

    Args:
        model: The transformers model.
        implementation: `model.attention`.

    Attributes:
        attention: Name of the model's attention.
        layout: How rows go through the model.
        layout_note: Why it is not the fastest one; "" if it is.
        one_batch: Whether a padded row is one batch.
        whole: Whether rows go through the whole model up to its output layer, in place of the tower.
        logit_scale: Factor of the model's logits, found by `check_logits`.
        adapter: The adapter that trains; None if the model's own weights train.
        replay: Has the routers of a mixture choose the experts that a row names; None if they choose for themselves.
    """

    def __init__(
        self,
        model: Any,
        implementation: str,
        scoring: Scoring,
        precision: Precision | None = None,
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.precision = precision or Precision()
        self.attention = self._wanted = implementation
        self.layout: layouts.Layout = "trie" if implementation == PACKED_ATTENTION else "packed"
        self.layout_note = ""
        self.one_batch = False
        self.whole = False
        self.logit_scale = 1.0
        self.adapter: Adapter | None = None
        self.replay: RouterReplay | None = None
        self._scoring = scoring

    def forward(self, row: PackedRow, temperature: float | None = None) -> TokenScores:
        """Score the row's N tokens that train.

        Args:
            temperature: None for the sampler's.

        Returns:
            Log-probs and entropies, each float32 [N].
        """
        return self.at(row, self._scoring.temperature if temperature is None else temperature)

    def at(self, row: PackedRow, temperature: float) -> TokenScores:
        """Score the row as `forward` does, at a given temperature."""
        with self.precision.autocast(self.device):
            states = self._states(row)
            mask = None if row.mask_pairs is None or row.mask_ids is None else Mask(row.mask_pairs, row.mask_ids)
            scores = token_scores(
                self.lm_head(temperature), states.hidden[row.positions], row.targets, mask, row.teacher_ids
            )
            routing = self._routing(row, states) if self._scoring.routing else None
        others = None if scores.others is None else scores.others[row.scored]
        return TokenScores(scores.logprobs[row.scored], scores.entropy[row.scored], routing, others)

    def use(self, layout: layouts.Layout, attention: str | None = None) -> bool:
        """Score rows in this layout; padded, with the network's own `attention`, or with its best. Returns False if it
        has no such one. Raises `ConfigError` if the model lacks the attention for another layout."""
        self.layout = layout
        if layout != "padded":
            with suppress(ValueError, ImportError):
                self.model.set_attn_implementation(self._wanted)
            if self.model.config._attn_implementation != self._wanted:
                raise ConfigError(f"model.path: {type(self.model).__name__} takes no attention but its own")
            self.attention = self._wanted
            return True
        before = self.model.config._attn_implementation
        if attention is not None:
            if before == attention:
                return False
            self.attention = layouts.set_batch_attention(self.model, (attention,))
            return self.attention == attention
        self.attention = before
        if self.attention == PACKED_ATTENTION:
            self.attention = layouts.set_batch_attention(self.model)
        return True

    def run(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns. Where ranks hold parts of the weights it runs as a forward pass does: with the
        weights that are needed whole, on all ranks together."""
        return work()

    @torch.no_grad()
    def score(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        """Score a sequence at temperature 1.

        Returns:
            log p(token_ids[i + 1] | token_ids[: i + 1]), float32 [T - 1].
        """
        row = plain_row(token_ids).to(self.device)
        with self.precision.autocast(self.device):
            scores = token_scores(self.lm_head(1.0), self._states(row).hidden[row.positions], row.targets)
        return cast("npt.NDArray[np.float32]", scores.logprobs.cpu().numpy())

    def named_weights(self) -> export.Published:
        """Return the weights that train, with the names and shapes of the model's checkpoint, in the learner's type.

        The publisher casts each as it is copied, so there is no second copy. A tied output layer appears once, as the
        embedding. An adapter is merged into each matrix as its turn comes.
        """
        return export.Published(self.model, None if self.adapter is None else self.adapter.published())

    @property
    def text(self) -> Any:
        """The part that turns tokens into hidden states; in a model with vision, its text tower."""
        return text_tower(self.model)

    @property
    def tower(self) -> Any:
        """The part that rows go through before the output layer."""
        return layouts.UpToOutput(self.model) if self.whole else self.text

    def save(self, folder: Path, state: dict[str, torch.Tensor] | None = None) -> None:
        """Write a model folder with the weights as they are, an adapter merged, or with those in `state`.

        Its config.json names the servers' type: servers and `from_pretrained` use that one unless told another. It
        holds no generation_config.json: the source's is copied (`checkpoints.model_folder`).
        """
        with export.writers_left_out(self.model):
            if self.adapter is None:
                self.model.save_pretrained(folder, state_dict=state)
            else:
                self.adapter.save_merged(folder, state)
        self._write_config(folder / "config.json")

    def save_without_weights(self, folder: Path) -> None:
        """Write the files of a model folder next to the weights."""
        self.save(folder, {})
        (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)  # some releases write an empty one

    def _write_config(self, path: Path) -> None:
        facts = json.loads(self.model.config.to_json_string())
        facts.pop("quantization_config", None)
        served = str(self.precision.servers).removeprefix("torch.")
        for part in (facts, *(value for value in facts.values() if isinstance(value, dict))):
            if "dtype" in part:
                part["dtype"] = served
        path.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @property
    def routed_layers(self) -> RoutedLayers | None:
        """The layers whose routers choose the experts that a row names; None if all choose for themselves."""
        return None if self.replay is None else self.replay.routed

    @property
    def skips_weights(self) -> bool:
        """Whether a row may leave out some of the weights: those of the part that sees, and those of experts without a
        token, unless a layer has all of its experts in one tensor, as transformers' own models do."""
        fused = any("expert" in name and parameter.ndim == 3 for name, parameter in self.model.named_parameters())
        sees = bool(getattr(self.model, "trains_vision", False))
        return sees or (_choices(self.model.config.get_text_config()) > 0 and not fused)

    @property
    def device(self) -> torch.device:
        parameter: torch.Tensor = next(self.model.parameters())
        return parameter.device

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)

    @torch.no_grad()
    def check_logits(self) -> None:
        """Find the scale of the logits. Raise `ConfigError` if the model computes them otherwise than `LmHead`, as with
        further layers.

        Ours must agree with the model's own on a short sequence, or it would train on wrong log-probs, silently. Where
        a model has more between its tower and its output layer, rows go through all of it.
        """
        self.whole = False
        try:
            self._find_scale()
        except (ConfigError, TypeError, AttributeError, KeyError, IndexError, ValueError):
            self.whole = True
            self._find_scale()

    def _find_scale(self) -> None:
        """Compare logits as they are, for the scale, and then large ones, as a trained model may have and an untrained
        one has not: a soft cap that is not known shows in these alone."""
        self.logit_scale = 1.0
        ours, theirs = self._both_logits(1.0)
        if not self._same_logits(ours, theirs):
            self.logit_scale = _scale(self.model.config.get_text_config(), ours, theirs)
            ours, theirs = self._both_logits(1.0)
        if self._same_logits(ours, theirs):
            ours, theirs = self._both_logits(_LARGE_LOGITS / max(float(ours.std()), 1e-6))
        if not self._same_logits(ours, theirs):
            raise ConfigError(
                f"model.path: {type(self.model).__name__} computes its logits in a way that the learner does not know "
                f"(they differ by {float((ours - theirs).abs().max()):.3g}): choose a model whose logits are "
                f"lm_head(hidden), times a number, with or without a soft cap ({', '.join(_SOFT_CAPS)})"
            )

    def _both_logits(self, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the learner's and the model's own logits of a row, float32 [T, V], of hidden states times `factor`."""
        row = plain_row([i % self.vocabulary_size for i in range(1, _LOGITS_COMPARED + 1)]).to(self.device)

        def scaled(module: Any, given: Any, output: Any) -> Any:
            output.last_hidden_state = output.last_hidden_state * factor
            return output

        hook = self.text.register_forward_hook(scaled) if factor != 1.0 else None
        try:
            with self.precision.autocast(self.device):
                hidden = self._states(row).hidden
                theirs = self.model(**layouts.arguments(row, self.layout, self.attention)).logits[0].float()
                return self.lm_head(1.0).logits(hidden), theirs
        finally:
            if hook is not None:
                hook.remove()

    def _same_logits(self, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        exact = self.precision.compute in (torch.float32, torch.float64)
        close = _CLOSE_LOGITS if exact else _CLOSE_LOGITS_OF_16_BITS
        return torch.allclose(ours, theirs, rtol=close, atol=close)

    @torch.no_grad()
    def check_routing(self) -> None:
        """Raise `ConfigError` if the routers' decisions are needed and the model does not return them."""
        if not self._scoring.routing:
            return
        config, row = self.model.config.get_text_config(), plain_row([0, 1]).to(self.device)
        if not self._states(row).router_logits or not _choices(config) or not hasattr(config, "router_aux_loss_coef"):
            raise ConfigError(
                f"learner.router_aux_loss_coef: {type(self.model).__name__} is not a mixture of experts whose routers "
                f"transformers shows: set it to 0"
            )

    @torch.no_grad()
    def check_replay(self) -> None:
        """Find the routers, if rows name experts. Raise `ConfigError` if they cannot be made to choose given ones: what
        they choose for themselves must give the same scores when it is given, and other experts must give others."""
        if not self._scoring.replay:
            return
        name = type(self.model).__name__
        row = plain_row([i % self.vocabulary_size for i in range(1, _REPLAYED + 2)]).to(self.device)
        try:
            if self.replay is None:
                sizes = expert_counts(self.model.config.get_text_config())
                self.replay = RouterReplay(self.model, partial(self._states, row), row.tokens, sizes)
            replay = self.replay
            with replay.watching() as chosen:
                own = self.at(row, 1.0).logprobs
            given = torch.stack(chosen, 1).short()
            same = self.at(replace(row, experts=given), 1.0).logprobs
            other = self.at(replace(row, experts=(given + 1) % replay.routed.experts), 1.0).logprobs
        except (UnknownRouters, KeyError) as error:
            raise ConfigError(
                f"learner.router_replay = true: {name} is not a mixture of experts whose routers can be given their "
                f"choice: {error}; set learner.router_replay = false"
            ) from error
        if not torch.equal(same, own) or torch.equal(other, own):
            raise ConfigError(
                f"learner.router_replay = true: {name} does not compute with the experts that its routers are given "
                f"(their own choice changes log-probs by {float((same - own).abs().max()):.1g} nats, others by "
                f"{float((other - own).abs().max()):.1g}); set learner.router_replay = false"
            )

    def check_compiled(self) -> None:
        """Compile the layers by running one step whose result is thrown away. Raises `ConfigError` if that fails."""
        row = plain_row([i % self.vocabulary_size for i in range(1, 9)]).to(self.device)
        try:
            self(row, 1.0).logprobs.sum().backward()
        except RuntimeError as error:  # dynamo and inductor raise many subclasses
            raise ConfigError(
                f"learner.compile = true: the model's layers cannot be compiled ({type(error).__name__}: "
                f"{str(error).strip().partition(chr(10))[0]}); install a C++ compiler such as g++, or set "
                f"learner.compile = false"
            ) from error
        self.zero_grad()

    def _states(self, row: PackedRow) -> layouts.States:
        choosing = partial(self._choosing, self.replay, row)
        if row.images:
            return vision.states(self.model, row, self.one_batch, choosing)
        more = {"output_router_logits": True} if self._scoring.routing else {}
        return layouts.states(self.tower, row, self.layout, self.attention, self.one_batch, choosing, **more)

    @staticmethod
    def _choosing(
        replay: RouterReplay | None, row: PackedRow, places: torch.Tensor | None
    ) -> AbstractContextManager[None]:
        if replay is None:
            return nullcontext()
        every = row.experts
        return replay.choosing(every if every is None or places is None else every.index_select(0, places))

    def _routing(self, row: PackedRow, states: layouts.States) -> Routing:
        top_k = _choices(self.model.config.get_text_config())
        return Routing.of(states.router_logits or [], top_k, row.copies)

    def lm_head(self, temperature: float) -> LmHead:
        """Return the output layer at a sampler's temperature."""
        output = self.model.get_output_embeddings()
        config = self.model.config.get_text_config()
        softcap = next((cap for name in _SOFT_CAPS if (cap := getattr(config, name, None))), None)
        return LmHead(
            output.weight,
            getattr(output, "bias", None),
            softcap,
            temperature,
            self._scoring.logits_mib << 20,
            self.logit_scale,
        )


def _scale(config: Any, ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the factor between two versions of the same logits: that of the config, if it has it, else as measured."""
    measured = float((ours * theirs).sum() / ours.square().sum())
    named = [value for value in vars(config).values() if isinstance(value, float) and value]
    near = [factor for value in named for factor in (value, 1 / value) if abs(factor / measured - 1) < _SAME_SCALE]
    return min(near, key=lambda factor: abs(factor - measured), default=measured)


def _choices(config: Any) -> int:
    """Return how many experts each token goes to; 0 where the config does not say."""
    return int(getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_top_k", None) or 0)


def expert_counts(config: Any) -> set[int]:
    """Return the numbers of experts that a config names."""
    given = {**config.to_dict(), **{name: getattr(config, name, None) for name in getattr(config, "attribute_map", {})}}
    every = {name: value for name, value in given.items() if "experts" in name and isinstance(value, int)}
    return {value for name, value in every.items() if not re.search("per_tok|shared|top_?k", name)}


def plain_row(token_ids: list[int]) -> PackedRow:
    """Make a row of one sequence, all of whose tokens but the first train."""
    ids = np.array(token_ids, dtype=np.int32)
    weights = np.ones(len(ids), dtype=np.float32)
    weights[0] = 0.0
    return pack_row([Sample(ids, np.zeros_like(weights), weights, np.zeros_like(ids), weights > 0, rollout=0)])
