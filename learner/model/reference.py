"""The reference model: the model that a run began with, near which the KL keeps the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator

from slipstream.learner.feed.packing import PackedRow
from slipstream.learner.model.adapter import Adapter
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.logprobs import TokenScores
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.ranks import wrapping
from slipstream.learner.ranks.team import Team
from slipstream.protocol.config import RunConfig


class Reference(ABC):
    """The interface of a reference: it gives log-probs that no step trains."""

    @abstractmethod
    def prepare(self, accelerator: Accelerator, team: Team) -> None:
        """Put it where the policy is, in the types that the policy computes in; over the ranks' parts if the policy is
        shared out."""

    @abstractmethod
    def logprobs(self, row: PackedRow) -> torch.Tensor:
        """Score the row's N tokens that train at the sampler's temperature, float32 [N], without a gradient."""

    @abstractmethod
    def follow(self, policy: Policy, mixup: float) -> None:
        """Move it towards the policy by the share `mixup` of the weights (TR-DPO, arXiv:2404.09656, eq. 2)."""

    @abstractmethod
    def state(self) -> dict[str, torch.Tensor] | None:
        """Return the state that a checkpoint must hold; None if the reference is as it was loaded."""

    @abstractmethod
    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what `state` returned."""


class ReferenceModel(Reference):
    """A model of its own next to the policy: one more copy of the weights."""

    def __init__(self, model: Policy) -> None:
        self._own = model.requires_grad_(False)
        self._prepared: Any = model
        self._moved = False

    def prepare(self, accelerator: Accelerator, team: Team) -> None:
        if team.sharded:
            self._prepared = wrapping.sharded(self._own, accelerator.device, self._own.precision.of_layers)
        else:
            self._prepared = accelerator.prepare_model(self._own, evaluation_mode=True)

    @torch.no_grad()
    def logprobs(self, row: PackedRow) -> torch.Tensor:
        scores: TokenScores = self._prepared(row)
        wrapping.resharded(self._own)
        return scores.logprobs

    @torch.no_grad()
    def follow(self, policy: Policy, mixup: float) -> None:
        for ours, theirs in zip(self._own.parameters(), policy.parameters(), strict=True):
            wrapping.local(ours).lerp_(wrapping.local(theirs).to(ours.dtype), mixup)
        self._moved = True

    def state(self) -> dict[str, torch.Tensor] | None:
        return {name: weight.detach() for name, weight in self._own.named_parameters()} if self._moved else None

    @torch.no_grad()
    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, weight in self._own.named_parameters():
            weight.copy_(wrapping.like(state[name], weight))
        self._moved = True


class AdapterOff(Reference):
    """The policy without its adapter, which is the model that the run began with. It takes no memory."""

    def __init__(self, policy: Policy, adapter: Adapter) -> None:
        self._policy, self._adapter = policy, adapter

    def prepare(self, accelerator: Accelerator, team: Team) -> None:
        """Do nothing: the reference is the policy's own network."""

    @torch.no_grad()
    def logprobs(self, row: PackedRow) -> torch.Tensor:
        with self._adapter.off():
            scores: TokenScores = self._policy(row)
        return scores.logprobs

    def follow(self, policy: Policy, mixup: float) -> None:
        """Raise `ValueError`: the base has no weights of its own that could move."""
        raise ValueError("learner.reference_sync_steps: the base beneath an adapter cannot follow it; set it to 0")

    def state(self) -> None:
        return None

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: a checkpoint keeps nothing of it."""


def load_reference(config: RunConfig, scoring: Scoring, policy: Policy, team: Team | None = None) -> Reference | None:
    """Load the model of `model.path`, whatever checkpoint the policy is from; beneath an adapter it is there already.

    Returns:
        None where `learner.kl_coef` is 0.

    Raises:
        ConfigError: As `load_policy` does.
    """
    if not config.learner.kl_coef:
        return None
    if policy.adapter is not None:
        return AdapterOff(policy, policy.adapter)
    # It is never trained, so the servers' type is exact enough and takes the least memory.
    plain = {"weights_dtype": "model", "compile": False, "gradient_checkpointing": False}
    learner, longest = config.learner.model_copy(update=plain), config.vllm.max_model_len
    of_logprobs = replace(scoring, routing=False)
    return ReferenceModel(
        load_policy(
            *(config.model.path, config.model, of_logprobs, learner, longest),
            team=team,
            images=config.images.enabled,
        )
    )
