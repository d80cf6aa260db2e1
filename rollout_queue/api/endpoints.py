"""The routes of `protocol.routes`, each a line or two over the broker and its desks."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from protocol import codec, routes
from protocol.client import MSGPACK
from protocol.messages import (
    BeginSession,
    Checkpointed,
    LeaseAck,
    LeaseRenewal,
    LeaseRequest,
    PolicyCommand,
    Server,
    TicketFailure,
    TicketRequest,
    WorkerReport,
)
from rollout_queue.api.learner_desk import LearnerDesk
from rollout_queue.api.web import TooLarge, read_body, read_json, reply_json
from rollout_queue.api.worker_desk import WorkerDesk
from rollout_queue.broker import Broker
from rollout_queue.ledger.refusal import Refusal
from rollout_queue.observe import prometheus, status

_NOTHING = 204


def add_observer_routes(app: FastAPI, broker: Broker) -> None:
    """Health, status and metrics: for people, monitors and the command line."""

    @app.get(routes.HEALTH)
    async def health() -> Response:
        return Response("ok")

    @app.get(routes.READY)
    async def ready() -> Response:
        broker.check_ready()
        return Response("ok")

    @app.get(routes.STATUS)
    async def read_status() -> Response:
        broker.check_ready()
        return reply_json(status.assemble(broker))

    @app.get(routes.METRICS)
    async def read_metrics() -> Response:
        broker.check_ready()
        return Response(prometheus.render(status.assemble(broker)), media_type=prometheus.CONTENT_TYPE)


def add_worker_routes(app: FastAPI, broker: Broker) -> None:
    """Tickets and groups."""
    desk = WorkerDesk(broker)

    @app.post(routes.TICKETS)
    async def tickets(request: Request) -> Response:
        broker.check_ready()
        reply = await desk.tickets(await read_json(request, TicketRequest), request.is_disconnected)
        return reply_json(reply) if reply.tickets else Response(status_code=_NOTHING)

    @app.post(routes.TICKET_FAIL_OF)
    async def fail_ticket(id: str, request: Request) -> Response:
        broker.check_ready()
        await desk.fail(id, await read_json(request, TicketFailure))
        return Response(status_code=_NOTHING)

    @app.post(routes.WORKER_OF)
    async def heartbeat(id: str, request: Request) -> Response:
        broker.check_ready()
        report = await read_json(request, WorkerReport)
        if report.worker_id != id:
            raise Refusal(422, "worker_mismatch", f"the path names worker {id!r}, the body {report.worker_id!r}")
        return reply_json(await desk.heartbeat(report))

    @app.put(routes.GROUP_OF)
    async def submit(id: str, request: Request) -> Response:
        broker.check_ready()
        try:
            body = await read_body(request, broker.config.queue.max_group_bytes)
        except TooLarge as error:
            message = f"{error}: raise queue.max_group_bytes or shorten the episodes"
            raise await desk.reject(id, 413, "too_large", message) from error
        is_new = await desk.submit(id, body)
        return Response(b"new" if is_new else b"had", 201 if is_new else 200)


def add_learner_routes(app: FastAPI, broker: Broker) -> None:
    """Policy, leases, servers, and the run's end."""
    desk = LearnerDesk(broker)

    @app.get(routes.POLICY)
    async def read_policy() -> Response:
        broker.check_ready()
        return reply_json(broker.policy())

    @app.post(routes.POLICY)
    async def command(request: Request) -> Response:
        broker.check_ready()
        message = await read_json(request, PolicyCommand)
        match message:
            case BeginSession():
                return reply_json(await desk.begin(message))
            case Checkpointed():
                return reply_json(await desk.checkpointed(message))
            case _:
                return reply_json(await desk.waiting(message))

    @app.post(routes.LEASES)
    async def lease(request: Request) -> Response:
        broker.check_ready()
        reply = await desk.lease(await read_json(request, LeaseRequest), request.is_disconnected)
        return Response(codec.encode(reply), media_type=MSGPACK)

    @app.post(routes.LEASE_ACK_OF)
    async def ack(id: str, request: Request) -> Response:
        broker.check_ready()
        return reply_json(await desk.ack(id, await read_json(request, LeaseAck)))

    @app.post(routes.LEASE_RENEW_OF)
    async def renew(id: str, request: Request) -> Response:
        broker.check_ready()
        await desk.renew(id, (await read_json(request, LeaseRenewal)).session)
        return Response(status_code=_NOTHING)

    @app.post(routes.LEASE_RELEASE_OF)
    async def release(id: str, request: Request) -> Response:
        broker.check_ready()
        await desk.release(id, (await read_json(request, LeaseRenewal)).session)
        return Response(status_code=_NOTHING)

    @app.get(routes.SERVERS)
    async def read_servers() -> Response:
        broker.check_ready()
        return reply_json(broker.fleet.servers)

    @app.put(routes.SERVER_OF)
    async def put_server(name: str, request: Request) -> Response:
        broker.check_ready()
        server = await read_json(request, Server)
        if server.name != name:
            raise Refusal(422, "server_mismatch", f"the path names server {name!r}, the body {server.name!r}")
        return reply_json(await broker.put_server(server))

    @app.post(routes.FINISH)
    async def finish() -> Response:
        broker.check_ready()
        return reply_json(await desk.finish())
