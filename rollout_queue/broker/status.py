"""Assembles the answer of `GET /v1/status`: every wait is in it (I7)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slipstream.protocol.messages import Server, ServerState
from slipstream.protocol.status import (
    Evaluation,
    GroupCounts,
    Limit,
    Notice,
    Scaling,
    ServerStatus,
    Stall,
    Status,
    Wait,
    WorkerStatus,
)
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.ledger.evaluations import MAX_OPEN
from slipstream.rollout_queue.ledger.records import TicketState
from slipstream.rollout_queue.observe import causes
from slipstream.rollout_queue.observe.limits import LimitInputs, limit_of, scaling_of, slowest_tool
from slipstream.rollout_queue.observe.progress import alarm_after_s
from slipstream.rollout_queue.observe.waits import LEARNER, group_alike
from slipstream.rollout_queue.store.base import MAX_SILENCE_S

_AWAITED = {
    ServerState.JOINING: "its first proof",
    ServerState.SYNCING: "its first proof",
    ServerState.STALE: "newer weights",
    ServerState.QUARANTINED: "a proof that holds",
    ServerState.DOWN: "an answer that the run can use, or a restart",
    ServerState.DRAINING: "the end of its requests",
}

_AWAY = (ServerState.JOINING, ServerState.DOWN, ServerState.QUARANTINED)

_VERDICT = "the learner to verify the version that is on its way to it"

# Workers that are named where one server waits for many.
_MAX_NAMED = 8

# More than can be open, so that the newest result is always among them.
_MAX_EVALUATIONS = 2 * MAX_OPEN


def assemble(broker: Broker) -> Status:
    """Return the status as of now."""
    now, ledger, seen = broker.now, broker.ledger, broker.observations
    run, groups, evaluations = ledger.run, _groups(broker), broker.evaluation_views()
    workers = seen.workers.statuses(now, seen.waits.what)
    servers = [_server(broker, server) for server in broker.fleet.servers]
    inputs = _limit_inputs(broker, workers, servers)
    notices = seen.notices.list(now)
    found = causes.diagnose(seen.symptoms, notices, workers, broker.config, broker.history.changes)
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
        staleness=seen.staleness.summary(run.staleness_max),
        rates=seen.rates.rates(now),
        learner=seen.learner(run, now),
        workers=workers,
        servers=servers,
        waits=_waits(broker, servers, evaluations),
        stall=_stall(broker, groups, workers, notices),
        ledger=ledger.summary(),
        tokens_sampled=ledger.tokens_sampled,
        learner_wait_share=seen.learner_wait_share,
        worker_wait_share=seen.workers.wait_share(),
        worker_cpu_ms_per_episode=seen.workers.cpu_ms_per_episode(),
        drops=dict(ledger.drops),
        rejections=dict(seen.rejections),
        notices=notices,
        gave_up=broker.early_failures.gave_up,
        diagnosis=seen.cause_times.timed(found, now),
        limit=None if inputs is None else _limit(broker, inputs, servers),
        scaling=None if inputs is None else _scaling(broker, inputs, workers, servers),
        evaluations=evaluations[-_MAX_EVALUATIONS:],
        connections=seen.connections.status(now),
        tokens_dropped=dict(ledger.tokens_dropped),
        rows=None if ledger.rows is None else ledger.rows.status(),
    )


def _server(broker: Broker, server: Server) -> ServerStatus:
    lag = None if server.version is None else max(0, broker.ledger.run.version - server.version)
    return ServerStatus(
        **msgspec.structs.asdict(server),
        lag=lag,
        since_s=max(0.0, broker.clock.wall() - server.changed_at),
        waits_for=_awaited(broker, server),
    )


def _awaited(broker: Broker, server: Server) -> str | None:
    """Say what a server that does not serve waits for."""
    if server.state is ServerState.SERVING:
        return None
    if server.state is ServerState.DRAINING:
        count = broker.observations.workers.count_on_server(server.name, broker.now)
        if not count:
            return _VERDICT if broker.to_be_judged(server.name) else _AWAITED[server.state]
        named = broker.observations.workers.on_server(server.name, broker.now, _MAX_NAMED)
        others = f" and {count - len(named):,} others" if count > len(named) else ""
        return f"{_AWAITED[server.state]} of {', '.join(named)}{others}"
    if server.state is ServerState.SYNCING and server.version is not None:
        return "the proof of the version that is swapped in"
    return _AWAITED[server.state]


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


def _limit_inputs(broker: Broker, workers: Sequence[WorkerStatus], servers: Sequence[Server]) -> LimitInputs | None:
    if broker.ledger.run.finished:
        return None
    slots = sum(worker.capacity for worker in workers if not worker.is_gone)
    return broker.observations.limits.inputs(slots, broker.config.vllm.max_num_seqs * len(servers), broker.now)


def _limit(broker: Broker, inputs: LimitInputs, servers: Sequence[Server]) -> Limit:
    if servers and all(server.state in _AWAY for server in servers):
        states = ", ".join(f"{server.name} is {server.state}" for server in servers[:_MAX_NAMED])
        return Limit("servers", f"No vLLM server serves, so no episode continues: {states}.")
    slowest = slowest_tool(broker.observations.symptoms.newest.tools)
    return limit_of(msgspec.structs.replace(inputs, slowest_tool=slowest), broker.config)


def _scaling(
    broker: Broker, inputs: LimitInputs, workers: Sequence[WorkerStatus], servers: Sequence[Server]
) -> Scaling | None:
    """Say what one more would bring; None while no server or no worker is there to go by."""
    there = [server for server in servers if server.state not in (ServerState.DOWN, ServerState.DRAINING)]
    serving = sum(server.state is ServerState.SERVING for server in there)
    count = sum(not worker.is_gone for worker in workers)
    if not serving or not count or not inputs.slots:
        return None
    requests = broker.config.vllm.max_num_seqs * serving
    serves = msgspec.structs.replace(inputs, requests=requests)
    found = scaling_of(serves, broker.config, serving, count, broker.config.learner.ranks)
    # What was measured does not hold once those that are on their way serve.
    return found if serving == len(there) else msgspec.structs.replace(found, servers_wanted=len(there))


def _waits(broker: Broker, servers: Sequence[ServerStatus], evaluations: Sequence[Evaluation]) -> list[Wait]:
    """List the waits that workers and learner reported, those of the store, of servers and of evaluations, and
    who never came."""
    now, seen, ledger, run = broker.now, broker.observations, broker.ledger, broker.ledger.run
    waits = seen.waits.list(now)
    if (silent_s := broker.writer.silent_s) > MAX_SILENCE_S:
        waits.append(Wait("the queue", f"its store to answer: {broker.config.queue.store}", silent_s))
    if run.finished:
        return waits
    up_s = now - seen.started
    if seen.learner_seen_s_ago(now) is None:
        waits.append(Wait("the queue", "a learner", up_s))
    if seen.workers.seen_s_ago(now) is None:
        waits.append(Wait("the queue", "a worker", up_s))
    waits += group_alike(
        (_wait(server) for server in servers if server.waits_for and not _is_proven(server)), "servers"
    )
    if names := ", ".join(ledger.ready.awaited(broker.fleet)):
        waits.append(Wait("groups in the queue", f"the proof of the weights that {names} sampled them with", 0.0))
    for evaluation in evaluations:
        if evaluation.waits_for is not None:
            waits.append(Wait(f"evaluation of step {evaluation.step}", evaluation.waits_for, evaluation.seconds))
    return waits


def _is_proven(server: Server) -> bool:
    return server.state is ServerState.SYNCING and server.version is not None and server.reason is None


def _wait(server: ServerStatus) -> Wait:
    reason = f" ({server.reason})" if server.reason else ""
    return Wait(f"server {server.name}", f"{server.waits_for}: {server.state}{reason}", server.since_s)


def _stall(broker: Broker, groups: GroupCounts, workers: Sequence[WorkerStatus], notices: Sequence[Notice]) -> Stall:
    now, ledger, seen = broker.now, broker.ledger, broker.observations
    settings, waits_for = broker.config.queue, seen.waits.what(LEARNER)
    # A learner that died holds no groups once its lease has expired.
    trains = groups.leased >= broker.config.learner.groups_per_step and waits_for is None
    return causes.judge(
        causes.StallInputs(
            quiet_s=seen.progress.quiet_s(now),
            alarm_after_s=alarm_after_s(settings.stall_after_s, seen.median_step_s, trains),
            stall_after_s=settings.stall_after_s,
            # After the last step no other is expected: the learner waits for what is still evaluated.
            finished=ledger.run.finished or (ledger.run.all_steps_made and bool(ledger.evaluations.open)),
            session=ledger.run.session,
            servers=broker.fleet.servers,
            groups=groups,
            groups_per_step=broker.config.learner.groups_per_step,
            found_full=seen.progress.full,
            ended=seen.progress.ended,
            why_equal=causes.why_equal(seen.symptoms, notices, broker.config, broker.history.changes),
            blocked_by=broker.grant().blocked_by,
            learner_seen_s_ago=seen.learner_seen_s_ago(now),
            learner_waits_for=waits_for,
            worker_seen_s_ago=seen.workers.seen_s_ago(now),
            waiting_for_servers=sum(worker.waiting_for_servers for worker in workers),
            gave_up=broker.early_failures.gave_up,
        )
    )
