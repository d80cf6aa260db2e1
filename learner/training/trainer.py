"""One step over a batch of packed rows, shared by the ranks: an update of the weights, or several."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from slipstream.learner.algorithm import drift
from slipstream.learner.algorithm.algorithm import Algorithm
from slipstream.learner.algorithm.loss_terms import RouterLoss, cross_entropy, nothing_taught, taught_metrics
from slipstream.learner.algorithm.step_data import StepRollouts
from slipstream.learner.feed.packing import PackedRow, RankRows, deal
from slipstream.learner.model import export
from slipstream.learner.model.adapter import Adapter
from slipstream.learner.model.logprobs import TokenScores
from slipstream.learner.model.policy import Policy, plain_row
from slipstream.learner.model.reference import Reference
from slipstream.learner.model.share import BUCKET_BYTES, Share
from slipstream.learner.model.tensor_files import save_policy
from slipstream.learner.ranks import environment, wrapping
from slipstream.learner.ranks.figures import RankFigures
from slipstream.learner.ranks.liveness import RankLost
from slipstream.learner.ranks.team import END, Guard, PartFailed, Team
from slipstream.learner.training import optimiser, replay_effect, state_files, step_sums
from slipstream.learner.training.base import BatchForm, DivergedError, RanksOutOfMemory, Scores, StepMetrics, Trainer
from slipstream.learner.training.flops import Meter
from slipstream.learner.training.passes import (
    Known,
    Preparation,
    PreviousWeights,
    consult,
    in_several_rows,
    survey,
    with_previous,
)
from slipstream.protocol.config import LearnerSection
from slipstream.protocol.messages import RankReport

if TYPE_CHECKING:
    from slipstream.learner.training.base import HandOverShares

# Keys of `PolicyTrainer.state`.
STATE = ("optim", "optimiser", "schedule", "reference")


class PolicyTrainer(Trainer):
    """Owns policy, reference, optimiser and schedule.

    With several ranks each has a trainer. Every call on rank 0's is made on the others' as well (`take_part`).

    Args:
        longest: The most tokens that a rollout may sample.
        teacher_coef: Weight of the teacher's advantage.
        reference: The reference model; needed where `learner.kl_coef` is above 0.

    Attributes:
        optim: Name of the optimiser.
        mixed_in: Makes the rows of demonstrations that rank 0 adds to those of an optimiser step, by its number.
    """

    def __init__(
        self,
        policy: Policy,
        section: LearnerSection,
        longest: int,
        reference: Reference | None = None,
        team: Team | None = None,
        teacher_coef: float = 1.0,
    ) -> None:
        self.team = team or Team()
        self.accelerator = environment.accelerator(wrapping.ddp_arguments(policy.skips_weights))
        self.algorithm = Algorithm(section, longest, teacher_coef)
        if self.algorithm.needs_reference and reference is None:
            raise ValueError(f"learner.kl_coef = {section.kl_coef:g} needs a reference: give one to the trainer")
        self.reference = reference if self.algorithm.needs_reference else None
        self._sync_steps, self._mixup = section.reference_sync_steps, section.reference_mixup
        self._max_grad_norm = section.max_grad_norm
        self._updates = section.num_iterations
        self._router_coef = section.router_aux_loss_coef
        self._replay_check = section.router_replay_check_every
        self._meter = Meter(policy, self.device)
        self._figures = RankFigures(self.team, self.device)
        self._ranks: list[RankReport] = []
        self._policy = wrapping.wrapped(policy, self.accelerator, self.team)
        stepper, self.schedule = optimiser.build_optimiser(policy, section)
        self.optimiser = self.accelerator.prepare(stepper)
        self.optim = section.optim
        self.mixed_in: Callable[[int], Sequence[PackedRow]] = lambda step: ()
        self._share: Share | None = None
        # Of this rank's rows in the newest step: the rollout, the sampler's and the learner's log-prob of each token.
        self._scored: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        # Called on each rank but 0 with what `shares` is told, and the rank's share.
        self.on_share: Callable[[Mapping[str, Any], Share], None] = lambda told, share: None
        self.previous_weights = PreviousWeights(self._policy.parameters()) if self.algorithm.needs_previous else None
        if self.reference is not None:
            self.reference.prepare(self.accelerator, self.team)

    @property
    def policy(self) -> Policy:
        policy: Policy = self.accelerator.unwrap_model(self._policy)
        return policy

    @property
    def device(self) -> torch.device:
        return torch.device(self.accelerator.device)

    @property
    def batch_form(self) -> BatchForm:
        return BatchForm(self.on_gpu, self.policy.layout == "trie", self.policy.routed_layers)

    @property
    def vocabulary_size(self) -> int:
        return self.policy.vocabulary_size

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def adapter(self) -> Adapter | None:
        return self.policy.adapter

    @property
    def ranks(self) -> list[RankReport]:
        return self._ranks

    def before_change(self, hear: Callable[[], None]) -> Callable[[], None]:
        return self.optimiser.optimizer.register_step_pre_hook(lambda *_: hear()).remove  # type: ignore[no-any-return]

    def guard(self, guard: Guard) -> None:
        self.team.guard(guard)

    def on_rank_lost(self, hear: Callable[[RankLost], None]) -> None:
        self.team.on_lost(hear)

    def on_rank_silent(self, hear: Callable[[str | None], None]) -> None:
        self.team.on_silent(hear)

    def for_callbacks(self) -> dict[str, Any]:
        return {"model": self.policy.model, "optimizer": self.optimiser, "lr_scheduler": self.schedule}

    def step(self, rows: Sequence[PackedRow], rollouts: StepRollouts) -> StepMetrics:
        """Train on `rows`, which the ranks share, and on demonstrations. Raises what `Trainer.step` does."""
        rows = [*rows, *self.mixed_in(self.schedule.last_epoch + 1)]
        surveyed = self._to_be_surveyed(rows)
        try:
            with self.team.together("step", change=True):
                if self.team.count == 1:
                    return self._step(RankRows(rows, rollouts, surveyed))
                started = time.perf_counter()
                shares = [RankRows(own, rollouts, surveyed) for own in deal(rows, self.team.count)]
                self.team.deal([share.plain() for share in shares])
                metrics = self._step(shares[0])
                return replace(metrics, train_s=time.perf_counter() - started)
        except torch.OutOfMemoryError as error:
            if self.team.count == 1:
                raise
            raise RanksOutOfMemory(str(error)) from None
        except RuntimeError:  # rank 0 gets this in a collective with a rank that is gone
            if (memory_error := self.team.out_of_memory()) is None:
                raise
            raise RanksOutOfMemory(memory_error) from None

    def discard(self) -> None:
        self.optimiser.zero_grad()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _step(self, share: RankRows) -> StepMetrics:
        """Do this rank's part of a step: `learner.num_iterations` updates on the same rows."""
        started = time.perf_counter()
        self._figures.begin()
        self._scored.clear()
        flops = self._meter.flops(share.rows)
        rows = [row.to(self.device) for row in share.rows]
        made: list[StepMetrics] = []
        before: list[Known] | None = None
        while len(made) < self._updates:
            try:
                metrics, known = self._update(rows, share, before)
            except DivergedError:
                if not made:
                    raise
                break  # the weights have moved, so the step counts, with fewer updates
            made.append(metrics)
            before = before or known
        self._ranks = self._figures.gather(sum(row.tokens for row in share.rows if not row.is_padding))
        learning_rate = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        if self.reference is not None and self._sync_steps and self.schedule.last_epoch % self._sync_steps == 0:
            self.reference.follow(self.policy, self._mixup)
        train_s = time.perf_counter() - started
        beside = dict(made[0].beside) | self._meter.metrics(flops * len(made), train_s)
        if self._updates > 1:
            beside["updates"] = len(made)
        return replace(_mean(made), learning_rate=learning_rate, train_s=train_s, beside=beside)

    def _update(
        self, rows: Sequence[PackedRow], share: RankRows, before: Sequence[Known] | None
    ) -> tuple[StepMetrics, list[Known]]:
        """Update the weights once.

        Args:
            rows: The share's rows, on the device.
            before: What is known of the rows from before the step's first update; None in that one.

        Returns:
            The metrics, without learning rate and seconds; and what is known of the rows from before this update.

        Raises:
            DivergedError: Before any weight is changed.
        """
        rollouts = share.rollouts
        own = nothing_taught(self.device)
        sums: dict[str, torch.Tensor] = {}
        peaks: dict[str, torch.Tensor] = {}
        spread = drift.zero_sums(self.device)
        farthest = torch.zeros((), device=self.device)
        preparation = self._prepare(rows, rollouts, share.surveyed, before)
        logprobs: list[torch.Tensor] = []
        routing = [known.routing for known in preparation.known if known.routing is not None]
        routers = RouterLoss(self._router_coef, routing, self.team.add_up) if routing else None
        replays = self.policy.replay is not None
        own |= replay_effect.nothing(self.device) if replays else {}
        measured = (
            before is None and replays and self._replay_check > 0 and self.schedule.last_epoch % self._replay_check == 0
        )
        for number, (row, known) in enumerate(zip(rows, preparation.known, strict=True), start=1):
            shows_replay = measured and number == 1 and row.supervised is None
            if shows_replay:
                step_sums.add(own, replay_effect.without(self._policy, row))
            with wrapping.synchronising(self._policy, last=number == len(rows)):
                scores: TokenScores = self._policy(row, None if row.supervised is None else 1.0)
                logprobs.append(scores.logprobs.detach())
                if number == len(rows):
                    self._figures.last_pass()
                if row.is_padding:
                    self.accelerator.backward(0 * scores.logprobs.sum())
                    continue
                if row.supervised is None:
                    result = self.algorithm(preparation.tokens(row, scores, known))
                else:
                    assert scores.best is not None
                    result = cross_entropy(scores.logprobs, scores.best, row.supervised)
                row_loss = result.losses.sum()
                if scores.routing is not None:
                    routers = routers or RouterLoss(self._router_coef, [scores.routing])
                    step_sums.add(own, {"router": routers.share(scores.routing).detach()})
                    row_loss = row_loss + routers(scores.routing)
                # Ranks average their gradients, but the loss is a sum.
                self.accelerator.backward(row_loss * self.team.count)
            step_sums.add(own, {"loss": row_loss.detach()})
            if row.supervised is not None:
                step_sums.add(own, result.sums)
                continue
            distance = logprobs[-1] - row.behaviour
            if before is None:
                self._scored.append((row.rollout, row.behaviour, logprobs[-1]))
            if replays:
                step_sums.add(own, replay_effect.recorded(row))
            if shows_replay:
                step_sums.add(own, replay_effect.with_replay(distance))
            step_sums.add(own, {"entropy": scores.entropy.detach().sum()})
            step_sums.add(own, step_sums.sampler_kl(distance, row.fresh))
            step_sums.add(spread, drift.drift_sums(distance, row.staleness))
            step_sums.add(spread, drift.server_drift_sums(distance, row.fresh, row.server))
            step_sums.add(sums, result.sums)
            step_sums.raise_to(peaks, result.peaks)
            farthest = torch.maximum(farthest, distance.abs().amax())

        tokens = int(rollouts.tokens.sum())
        norm = self.accelerator.clip_grad_norm_(self._policy.parameters(), self._max_grad_norm)
        grad_norm = float(wrapping.whole(norm))
        own, peaks = self.team.reduced({**sums, **own}, {**peaks, "farthest": farthest}, self.device)
        spread = {name: self.team.add_up(value) for name, value in spread.items()}
        loss, log_ratio_max = float(own["loss"]), float(peaks["farthest"])
        entropy = float(own["entropy"]) / tokens if tokens else None
        named = {name: float(value) for name, value in {**own, **peaks}.items()}
        objective = self.algorithm.metrics(named) if tokens else {}
        if "router" in own:
            objective["aux_loss"] = float(own["router"])
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            seen = {name: value for name, value in objective.items() if value is not None}
            shown = {"entropy": entropy or 0.0, "log_ratio_max": log_ratio_max, **seen}
            self.optimiser.zero_grad()
            raise DivergedError(step_sums.why_diverged(loss, grad_norm, shown))
        fresh = int(own.get("fresh", 0))
        if self.previous_weights is not None and before is None:
            self.previous_weights.keep()
        self.optimiser.step()
        self.optimiser.zero_grad()
        metrics = StepMetrics(
            loss=loss,
            entropy=entropy,
            log_ratio_max=log_ratio_max,
            grad_norm=grad_norm,
            learning_rate=0.0,
            train_s=0.0,
            objective=objective,
            sampler_kl_staleness_0=float(own["kl"]) / fresh if fresh else None,
            sampler_tokens_staleness_0=fresh,
            beside={
                **drift.drift_metrics(spread, rollouts.servers),
                **replay_effect.metrics(own),
                **taught_metrics(own),
            },
        )
        before_it = zip(preparation.known, logprobs, strict=True)
        return metrics, [replace(of, before=scored) for of, scored in before_it]

    def scores_of(self, rollouts: Collection[int]) -> dict[int, Scores]:
        """Return log-probs as `Trainer.scores_of` does. With several ranks, only those that this rank trained."""
        found: dict[int, list[Scores]] = {}
        for of, sampled, learner in self._scored:
            for number in rollouts:
                chosen = of == number
                if bool(chosen.any()):
                    pair = Scores(sampled[chosen].float().cpu().numpy(), learner[chosen].float().cpu().numpy())
                    found.setdefault(number, []).append(pair)
        return {
            number: Scores(*(np.concatenate(column) for column in zip(*parts, strict=True)))
            for number, parts in found.items()
        }

    def _to_be_surveyed(self, rows: Sequence[PackedRow]) -> bool:
        """Say whether the policy must score all rows before the first one trains. The rows must be on the host, or
        this would wait for the GPU."""
        of_step = self.algorithm.top_entropy is not None or self._router_coef > 0
        return (of_step and len(rows) * self.team.count > 1) or (self.algorithm.by_rollout and in_several_rows(rows))

    def _prepare(
        self, rows: Sequence[PackedRow], rollouts: StepRollouts, surveyed: bool, before: Sequence[Known] | None
    ) -> Preparation:
        """Run the passes without a gradient that the algorithm needs. The policy before the step and the reference are
        asked once a step."""
        known = survey(self._policy, rows) if surveyed else [Known()] * len(rows)
        if before is not None:
            known = [of.after(first) for of, first in zip(known, before, strict=True)]
        else:
            if self.previous_weights is not None:
                known = with_previous(known, self._policy, rows, self.previous_weights)
                wrapping.resharded(self._policy)
            if self.reference is not None:
                known = consult(self.reference, rows, known)
        return Preparation(self.algorithm, rollouts, rows, known, self.device, self.team)

    def score(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        with self._by_all("score"), torch.no_grad():
            ids = self.team.spread(token_ids) if self.team.sharded else token_ids
            scores: TokenScores = self._policy(plain_row(ids).to(self.device), 1.0)
            wrapping.resharded(self._policy)
            return scores.logprobs.cpu().numpy()

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield what `Policy.named_weights` does. Where ranks hold parts, rank 0 gathers whole weights on its host
        first."""
        if not self.team.sharded:
            return self.policy.named_weights()
        with self._by_all("weights"):
            return export.gathered(self.policy.model, keep=self.team.leads)

    def share(self, bucket_bytes: int = BUCKET_BYTES) -> Share:
        """Return this rank's share of what `weights` yields, in the servers' type. With sharded weights all ranks must
        ask for theirs and iterate over them together, before the next step."""
        wrapping.resharded(self._policy)
        if self._share is None or self._share.bucket_bytes != bucket_bytes:
            policy = self.policy
            view = None if policy.adapter is None else policy.adapter.published
            self._share = Share(policy.model, self.team, policy.precision.servers, bucket_bytes, view)
        return self._share

    @property
    def shares(self) -> HandOverShares | None:
        return self._hand_over_share if self.team.count > 1 else None

    def _hand_over_share(self, told: Mapping[str, Any], hand_over: Callable[[Share], float]) -> float:
        """Call `hand_over` with this rank's share, while each other rank calls `on_share` with `told` and its own."""
        with self.team.together("share"):
            self.team.spread(dict(told))
            return hand_over(self.share())

    def save_model(self, folder: Path) -> None:
        """Save the policy as `Policy.save` does. Where ranks hold parts, each writes a file with its share; unless they
        do not all see rank 0's folder, who then gathers the weights.

        Raises:
            OSError: A rank cannot write.
        """
        with self._by_all("save_model"):
            wrapping.resharded(self._policy)
            save_policy(folder, self.policy, self.team)

    def save_without_weights(self, folder: Path) -> None:
        self.policy.save_without_weights(folder)

    def take_part(self) -> None:
        """Take part in rank 0's work, on any other rank, until none is left. Raises `RankLost`."""
        while (name := self.team.next_command().name) != END:
            match name:
                case "step":
                    try:
                        with suppress(DivergedError):  # rank 0 has it too, and reports it
                            self._step(RankRows.of(self.team.deal()))
                    except torch.OutOfMemoryError as error:
                        self.team.tell_out_of_memory(str(error))
                        raise
                case "score":
                    self.score([])
                case "weights":
                    self.weights()
                case "share":
                    self.on_share(self.team.spread(), self.share())
                case "save_model":
                    with suppress(PartFailed):  # rank 0 has it too, and reports it
                        self.save_model(Path())
                case "state":
                    with suppress(PartFailed):
                        self.state()
                case "restore":
                    self.restore({})
                case _:
                    raise ValueError(f"rank 0 asks for {name}, which this rank does not know")

    def _by_all(self, name: str) -> AbstractContextManager[None]:
        """Wrap work that all ranks must do together if each holds a part of the weights, and rank 0 alone
        otherwise."""
        return self.team.together(name) if self.team.sharded else nullcontext()

    def state(self, parts: Path | None = None) -> dict[str, Any]:
        """Return optimiser, schedule and what the reference has to keep, as tensors and plain values.

        Args:
            parts: Folder to which ranks that hold parts write theirs; `restore` needs it. None to gather all of it.

        Raises:
            OSError: A rank cannot write.
        """
        state = {"optim": self.optim, "optimiser": self.optimiser.state_dict(), "schedule": self.schedule.state_dict()}
        kept = self.reference.state() if self.reference is not None else None
        state = state if kept is None else {**state, "reference": kept}
        with self._by_all("state"):
            return state_files.written(state, parts, self.team) if self.team.sharded else state

    def saved_bytes(self) -> int:
        remembered = [value for of in self.optimiser.state.values() for value in of.values()]
        kept = (self.reference.state() if self.reference is not None else None) or {}
        found = [*self._policy.parameters(), *remembered, *kept.values()]
        return sum(of.numel() * of.element_size() for of in found if isinstance(of, torch.Tensor))

    def restore(self, state: dict[str, Any], parts: Path | None = None) -> None:
        """Load what `state` returned. Any other rank than 0 gives {}.

        Args:
            parts: Folder with the parts that ranks wrote.
        """
        if state:
            state = optimiser.resumed(state, self.optimiser, self.schedule, self.optim)
        with self.team.together("restore"):
            picked = {name: state[name] for name in STATE if name in state}
            parts = parts if "parts" in state else None
            self._restore(state_files.read_back(picked, parts, self.team, self._mesh, self.device))

    @property
    def _mesh(self) -> Any:
        """The ranks over which weights are sharded; None where each holds all."""
        return next((of.device_mesh for of in self._policy.parameters() if isinstance(of, DTensor)), None)

    def _restore(self, state: dict[str, Any]) -> None:
        memory = state["optimiser"]
        if memory["state"] is None:  # the optimiser starts without a memory
            memory = {**memory, "state": self.optimiser.state_dict()["state"]}
        elif self.team.sharded:
            memory = wrapping.shared_out(memory, self.optimiser.param_groups)
        self.optimiser.load_state_dict(memory)
        self.schedule.load_state_dict(state["schedule"])
        if self.reference is not None and "reference" in state:
            self.reference.restore(state["reference"])


def _mean(updates: Sequence[StepMetrics]) -> StepMetrics:
    """Return the metrics of a step of several updates: means of loss, gradient and objective, and the rest of the first
    update, before which the policy is the one that samples."""
    first = updates[0]
    if len(updates) == 1:
        return first
    return replace(
        first,
        loss=_known_mean([each.loss for each in updates]),
        grad_norm=_known_mean([each.grad_norm for each in updates]),
        objective={name: _known_mean([each.objective.get(name) for each in updates]) for name in first.objective},
    )


def _known_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
