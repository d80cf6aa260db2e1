"""Puts `GET /v1/status` together."""

from __future__ import annotations

from protocol import reasons
from protocol.status import GroupCounts, Stall, Status
from rollout_queue.broker import Broker
from rollout_queue.ledger.records import TicketState
from rollout_queue.observe import stall
from rollout_queue.observe.observations import LEARNER


def assemble(broker: Broker) -> Status:
    now, ledger, seen = broker.now, broker.ledger, broker.observations
    run, groups = ledger.run, _groups(broker)
    return Status(
        run=broker.config.run.name,
        uptime_s=now - seen.started,
        version=run.version,
        served_version=broker.fleet.served_version,
        step=run.step,
        total_steps=run.total_steps,
        checkpoint_step=run.checkpoint_step,
        finished=run.finished,
        max_staleness=broker.config.queue.max_staleness,
        depth=ledger.outstanding / broker.config.learner.groups_per_step,
        depth_target=broker.admission.depth,
        groups=groups,
        staleness=seen.staleness.figures(run.staleness_max),
        rates=seen.rates.rates(now),
        learner=seen.learner(run, now),
        workers=seen.workers(now),
        servers=broker.fleet.servers,
        waits=seen.waits.list(now),
        stall=_stall(broker, groups),
        ledger=ledger.summary(),
        tokens_sampled=ledger.tokens_sampled,
        learner_wait_share=seen.learner_wait_share,
        worker_wait_share=seen.worker_wait_share,
        worker_cpu_ms_per_episode=seen.worker_cpu_ms_per_episode,
        drops=dict(ledger.drops),
        rejections=dict(seen.rejections),
    )


def _groups(broker: Broker) -> GroupCounts:
    ledger, queue = broker.ledger, broker.config.queue
    return GroupCounts(
        tickets=ledger.count(TicketState.ISSUED),
        ready=ledger.count(TicketState.READY),
        leased=ledger.count(TicketState.LEASED),
        outstanding=ledger.outstanding,
        bytes=ledger.bytes,
        kept_bytes=ledger.kept_bytes,
        capacity_groups=queue.capacity_groups,
        capacity_bytes=queue.capacity_bytes,
        limit=broker.admission.limit(ledger.run.version, broker.fleet.served_version),
    )


def _stall(broker: Broker, groups: GroupCounts) -> Stall:
    now, ledger, seen = broker.now, broker.ledger, broker.observations
    return stall.judge(
        stall.Scene(
            quiet_s=now - seen.progress_at,
            stall_after_s=broker.config.queue.stall_after_s,
            finished=ledger.run.finished,
            session=ledger.run.session,
            servers=broker.fleet.servers,
            groups=groups,
            groups_per_step=broker.config.learner.groups_per_step,
            bytes_refused=seen.rejections[reasons.FULL] > 0,
            blocked_by=broker.grant().blocked_by,
            learner_seen_s_ago=seen.learner_seen_s_ago(now),
            learner_waits_for=seen.waits.what(LEARNER),
            worker_seen_s_ago=seen.worker_seen_s_ago(now),
        )
    )
