"""A plan in words for people, and as the page that draws it: the loop with its predicted rates and waits."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.deploy.planning.advice import MIN_GAIN, Change, Plan
from slipstream.deploy.planning.rates import Measured, Record
from slipstream.deploy.planning.simulation import Prediction
from slipstream.protocol.config import RunConfig
from slipstream.protocol.history import PageData, PlannedChange, PlanNode, PlanView
from slipstream.protocol.messages import ServerState
from slipstream.protocol.status import (
    GroupCounts,
    LearnerStatus,
    Rates,
    ServerStatus,
    Staleness,
    Stall,
    Status,
    TicketCounts,
    Wait,
)

_FIGURES = (
    ("steps a second", "steps_per_s", ".3f"),
    ("tokens sampled a second", "tokens_per_s", ",.0f"),
    ("tokens trained a second", "trained_tokens_per_s", ",.0f"),
    ("staleness, mean", "staleness_mean", ".2f"),
    ("staleness, greatest", "staleness_max", "d"),
    ("the learner waits for groups", "learner_wait", ".0%"),
    ("workers' slots wait for tickets", "worker_wait", ".0%"),
    ("servers without a request", "server_idle", ".0%"),
    ("requests on a server", "running", ".0f"),
)

# Shares of time below this are no wait to speak of.
_MIN_SHOWN_SHARE = 0.01


def view(plan: Plan, config: RunConfig, record: Record, source: str) -> PlanView:
    """Put a plan into words.

    Args:
        config: The settings that were planned.
        source: Where its rates are from.
    """
    found = plan.prediction
    servers, workers = _plural(plan.servers, "vLLM server"), _plural(plan.workers, "worker")
    where = " on this machine's cores" if plan.shares_cores and plan.servers > 1 else ""
    return PlanView(
        title=f"{servers}{where}, {workers}: {plan.steps} steps simulated on the rates of {source} "
        f"({record.measured.steps} steps)",
        advice=plan.advice,
        weights=f"new weights: {found.steps_per_s / config.weight_sync.every:.2f} / s",
        nodes=_nodes(plan, config),
        figures=list(_figures(found, record.measured)),
        changes=[_change(change) for change in plan.changes],
        notes=plan.notes,
    )


def page_data(plan: Plan, config: RunConfig, shown: PlanView) -> PageData:
    """Make what the page shows of a plan. Arguments as of `view`, and what that returned."""
    return PageData(
        run=config.run.name,
        live=False,
        now=0.0,
        max_staleness=config.queue.max_staleness,
        group_size=config.rollout.group_size,
        groups_per_step=config.learner.groups_per_step,
        status=_status(plan, config),
        plan=shown,
    )


def _figures(found: Prediction, measured: Measured) -> Iterator[tuple[str, str, str]]:
    for text, name, form in _FIGURES:
        yield text, _shown(found, name, form), _shown(measured, name, form)
    for reason, count in found.drops.items():
        yield f"groups dropped: {reason}", f"{count:,}", ""


def _shown(of: Prediction | Measured, name: str, form: str) -> str:
    value = getattr(of, name, None)
    return "" if value is None else format(value, form)


def _change(change: Change) -> PlannedChange:
    made = change.prediction
    gain = change.gain if abs(change.gain) >= MIN_GAIN else 0.0
    shown = f"{gain:+.0%}" if gain else "none"
    return PlannedChange(change.text, gain, shown, f"{made.steps_per_s:.3f}", f"{made.staleness_mean:.2f}")


def _nodes(plan: Plan, config: RunConfig) -> dict[str, PlanNode]:
    found = plan.prediction
    slots = plan.workers * config.worker.episodes
    busy = max(0.0, 1 - found.worker_wait - found.worker_full)
    dropped = sum(found.drops.values())
    return {
        "servers": PlanNode(
            _plural(plan.servers, "server"),
            [
                f"{found.running:.0f} of {config.vllm.max_num_seqs} requests on each",
                f"{found.tokens_per_s:,.0f} tokens sampled a second",
            ],
            [("with requests", 1 - found.server_idle), ("without one", found.server_idle)],
        ),
        "workers": PlanNode(
            f"{busy:.0%} of {slots:,} slots",
            [_plural(plan.workers, "worker"), f"{found.worker_full:.0%} idle by worker.open_episodes"],
            [("taken", busy), ("idle", 1 - busy)],
        ),
        "queue": PlanNode(
            f"{found.depth:.2f} steps ahead",
            [
                f"at most {config.queue.max_staleness + 1} (max_staleness + 1)",
                f"{_plural(dropped, 'group')} dropped" if dropped else "no group is dropped",
            ],
            [("aimed at", found.depth / (config.queue.max_staleness + 1))],
        ),
        "learner": PlanNode(
            f"{found.steps_per_s:.3f} steps/s",
            [
                f"{(1 - found.learner_wait) / found.steps_per_s:.2f} s of work for a step",
                f"{found.trained_tokens_per_s:,.0f} tokens trained a second",
            ],
            [("training", 1 - found.learner_wait), ("waiting", found.learner_wait)],
        ),
    }


def _status(plan: Plan, config: RunConfig) -> Status:
    """Return the rates, the staleness and the waits of a plan, as of a run at its last step."""
    found, steps = plan.prediction, plan.steps
    limit = round(found.depth * config.learner.groups_per_step)
    waits = [
        Wait(who, f"waits {share:.0%} of its time for {what}", 0.0)
        for who, what, share in (
            ("learner", "groups", found.learner_wait),
            ("each slot", "tickets", found.worker_wait),
            ("server (each)", "requests", found.server_idle),
        )
        if share >= _MIN_SHOWN_SHARE
    ]
    return Status(
        run=config.run.name,
        uptime_s=steps / found.steps_per_s,
        version=steps,
        served_version=None,
        step=steps,
        total_steps=steps,
        checkpoint_step=None,
        finished=False,
        max_staleness=config.queue.max_staleness,
        depth=found.depth,
        depth_target=found.depth,
        groups=GroupCounts(0, 0, 0, found.outstanding, 0, config.queue.capacity_groups, 0, limit),
        staleness=Staleness(found.staleness_mean, found.staleness_max, found.staleness_max),
        rates=Rates(
            groups=found.steps_per_s * (found.trained + found.dropped) / steps,
            tokens_sampled=found.tokens_per_s,
            tokens_trained=found.trained_tokens_per_s,
            steps=found.steps_per_s,
        ),
        learner=LearnerStatus(step=steps, version=steps, wait_share=found.learner_wait),
        workers=[],
        servers=[
            ServerStatus(f"server {number}", "", ServerState.SERVING, None) for number in range(1, plan.servers + 1)
        ],
        waits=waits,
        stall=Stall(False, 0.0),
        ledger=TicketCounts(found.issued, found.trained, found.dropped, 0, found.outstanding),
        learner_wait_share=found.learner_wait,
        worker_wait_share=found.worker_wait,
        drops=found.drops,
        limit=plan.limit,
    )


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
