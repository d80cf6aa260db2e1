"""The policy: a transformers causal language model that scores packed rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers.utils import SAFE_WEIGHTS_NAME

from learner.algorithm.loss_terms import Routing
from learner.attention import packed
from learner.feed.packing import PackedRow, Sample, pack_row
from learner.model import export
from learner.model.adapter import Adapter
from learner.model.loading import text_tower
from learner.model.logprobs import LmHead, TokenScores, token_scores
from learner.model.precision import Precision
from protocol.config import ConfigError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Scoring:
    """How rows are scored.

    Attributes:
        temperature: That of the sampler.
        logits_mib: MiB that logits, and everything computed from them, may take.
        routing: Whether scores of a row say how its tokens were routed to experts.
    """

    temperature: float
    logits_mib: int
    routing: bool = False


class Policy(torch.nn.Module):
    """Scores the sampled tokens of a packed row; this is what `Accelerator.prepare` wraps.

    It stays in evaluation mode: dropout would make its log-probs differ from the sampler's.

    Args:
        model: The transformers model.
        implementation: `model.attention`.

    Attributes:
        adapter: The adapter that trains; None if the model's own weights train.
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
        self.implementation = implementation
        self.adapter: Adapter | None = None
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
            output = self._output(row)
            hidden = output.last_hidden_state[0, row.positions]
            scores = token_scores(self.lm_head(temperature), hidden, row.targets)
            routing = self._routing(row, output) if self._scoring.routing else None
        return TokenScores(scores.logprobs[row.scored], scores.entropy[row.scored], routing)

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
            scores = token_scores(self.lm_head(1.0), self._hidden(row)[row.positions], row.targets)
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

    def save(self, folder: Path, state: dict[str, torch.Tensor] | None = None) -> None:
        """Write a model folder with the weights as they are, an adapter merged, or with those in `state`.

        Its config.json names the servers' type: vLLM and `from_pretrained` use that one unless they are told another.
        """
        if self.adapter is None:
            self.model.save_pretrained(folder, state_dict=state)
        else:
            self.adapter.save_merged(folder)
        self._name_served_type(folder / "config.json")

    def save_without_weights(self, folder: Path) -> None:
        """Write the files of a model folder beside the weights."""
        self.save(folder, {})
        (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)  # some releases write an empty one

    def _name_served_type(self, path: Path) -> None:
        facts = json.loads(path.read_text(encoding="utf-8"))
        facts.pop("quantization_config", None)
        served = str(self.precision.servers).removeprefix("torch.")
        for part in (facts, *(value for value in facts.values() if isinstance(value, dict))):
            if "dtype" in part:
                part["dtype"] = served
        path.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @property
    def skips_weights(self) -> bool:
        """Whether a row may leave out some of the weights: those of experts without a token, unless a layer has all of
        its experts in one tensor, as transformers' own models do."""
        fused = any("expert" in name and parameter.ndim == 3 for name, parameter in self.model.named_parameters())
        return _choices(self.model.config.get_text_config()) > 0 and not fused

    @property
    def device(self) -> torch.device:
        parameter: torch.Tensor = next(self.model.parameters())
        return parameter.device

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)

    @torch.no_grad()
    def check_logits(self) -> None:
        """Raise `ConfigError` if the model computes its logits otherwise than `LmHead` (scaling, further layers).

        Ours must agree with the model's own on a short sequence: a model that scales its logits would otherwise train
        on wrong log-probs, silently.
        """
        row = plain_row([i % self.vocabulary_size for i in range(1, 9)]).to(self.device)
        with self.precision.autocast(self.device):
            ours = self.lm_head(1.0).logits(self._hidden(row))
            theirs = self.model(**self._model_inputs(row)).logits[0].float()
        if not torch.allclose(ours, theirs, rtol=0.02, atol=0.02):
            raise ConfigError(
                f"model.path: {type(self.model).__name__} computes its logits in a way that the learner does not know "
                f"(they differ by {float((ours - theirs).abs().max()):.3g}): choose a model whose logits are "
                f"lm_head(hidden), with or without final_logit_softcapping"
            )

    @torch.no_grad()
    def check_routing(self) -> None:
        """Raise `ConfigError` if the routers' decisions are needed and the model does not return them."""
        if not self._scoring.routing:
            return
        config, row = self.model.config.get_text_config(), plain_row([0, 1]).to(self.device)
        router_logits = getattr(self._output(row), "router_logits", None) or ()
        if not router_logits or not _choices(config) or not hasattr(config, "router_aux_loss_coef"):
            raise ConfigError(
                f"learner.router_aux_loss_coef: {type(self.model).__name__} is not a mixture of experts whose routers "
                f"transformers shows: set it to 0"
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

    def _output(self, row: PackedRow) -> Any:
        more = {"output_router_logits": True} if self._scoring.routing else {}
        return self.text(**self._model_inputs(row), **more)

    def _hidden(self, row: PackedRow) -> torch.Tensor:
        """Return the hidden states, [T, h]."""
        return cast(torch.Tensor, self._output(row).last_hidden_state[0])

    def _routing(self, row: PackedRow, output: Any) -> Routing:
        top_k = _choices(self.model.config.get_text_config())
        return Routing.of([layer.flatten(0, -2) for layer in output.router_logits], top_k, row.copies)

    def _model_inputs(self, row: PackedRow) -> dict[str, Any]:
        return {
            "input_ids": row.input_ids,
            "position_ids": row.position_ids,
            "use_cache": False,
            **packed.model_arguments(self.implementation, row),
        }

    def lm_head(self, temperature: float) -> LmHead:
        """Return the output layer at a sampler's temperature."""
        output = self.model.get_output_embeddings()
        softcap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return LmHead(
            output.weight, getattr(output, "bias", None), softcap, temperature, self._scoring.logits_mib << 20
        )


def _choices(config: Any) -> int:
    """Return how many experts each token goes to; 0 where the config does not say."""
    return int(getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_top_k", None) or 0)


def plain_row(token_ids: list[int]) -> PackedRow:
    """Make a row of one sequence, all of whose tokens but the first train."""
    ids = np.array(token_ids, dtype=np.int32)
    weights = np.ones(len(ids), dtype=np.float32)
    weights[0] = 0.0
    return pack_row([Sample(ids, np.zeros_like(weights), weights, np.zeros_like(ids), weights > 0, rollout=0)])
