"""The learner's routes: each reads its request, calls the operation in `broker.learner`, and encodes the answer."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from slipstream.protocol import access, codec, reasons
from slipstream.protocol.client import MSGPACK
from slipstream.protocol.messages import (
    FinishRun,
    LeaseAck,
    LeaseRenewal,
    LeaseRenewed,
    LeaseReply,
    LeaseRequest,
    PolicyCommand,
    RunPosition,
    Server,
    ServerChange,
)
from slipstream.protocol.status import Evaluation, EvaluationRequest
from slipstream.rollout_queue.api.requests import ReadyBroker, handles, has_left, read_json, reply_json
from slipstream.rollout_queue.broker import learner
from slipstream.rollout_queue.ledger.records import Refusal

router = APIRouter()


@handles(router, access.READ_POSITION, answers={200: RunPosition})
async def read_position(broker: ReadyBroker) -> Response:
    return reply_json(await learner.read_position(broker))


@handles(router, access.COMMAND, PolicyCommand, {200: RunPosition})
async def command(request: Request, broker: ReadyBroker) -> Response:
    message: PolicyCommand = await read_json(request, PolicyCommand)
    return reply_json(await learner.command(broker, message))


@handles(router, access.ASK_FOR_EVALUATION, EvaluationRequest, {200: list[Evaluation]})
async def ask_for_evaluation(request: Request, broker: ReadyBroker) -> Response:
    message: EvaluationRequest = await read_json(request, EvaluationRequest)
    return reply_json(await learner.ask_for_evaluation(broker, message))


@handles(router, access.READ_EVALUATIONS, answers={200: list[Evaluation]}, query={"wait_s": float})
async def read_evaluations(request: Request, broker: ReadyBroker) -> Response:
    """Answer the evaluations. Query: `wait_s`, seconds to wait for the end of one while any is open."""
    given = request.query_params.get("wait_s", "0")
    try:
        wait_s = float(given)
    except ValueError:
        raise Refusal(reasons.UNDECODABLE, f"wait_s = {given[:20]}: give seconds") from None
    return reply_json(await learner.read_evaluations(broker, wait_s))


@handles(router, access.LEASE, LeaseRequest, {200: LeaseReply})
async def lease(request: Request, broker: ReadyBroker) -> Response:
    message: LeaseRequest = await read_json(request, LeaseRequest)
    reply = await learner.lease(broker, message, has_left(request))
    return Response(codec.encode(reply), media_type=MSGPACK)


@handles(router, access.ACKNOWLEDGE, LeaseAck, {200: RunPosition})
async def acknowledge(request: Request, broker: ReadyBroker, id: str) -> Response:
    message: LeaseAck = await read_json(request, LeaseAck)
    return reply_json(await learner.acknowledge(broker, id, message))


@handles(router, access.RENEW_LEASE, LeaseRenewal, {200: LeaseRenewed})
async def renew_lease(request: Request, broker: ReadyBroker, id: str) -> Response:
    message: LeaseRenewal = await read_json(request, LeaseRenewal)
    return reply_json(await learner.renew_lease(broker, id, message))


@handles(router, access.RELEASE_LEASE, LeaseRenewal, {204: None})
async def release_lease(request: Request, broker: ReadyBroker, id: str) -> Response:
    message: LeaseRenewal = await read_json(request, LeaseRenewal)
    await learner.release_lease(broker, id, message)
    return Response(status_code=204)


@handles(router, access.READ_SERVERS, answers={200: list[Server]})
async def read_servers(broker: ReadyBroker) -> Response:
    return reply_json(await learner.read_servers(broker))


@handles(router, access.PUT_SERVER, ServerChange, {200: Server | None})
async def put_server(request: Request, broker: ReadyBroker, name: str) -> Response:
    change: ServerChange = await read_json(request, ServerChange)
    if change.server.name != name:
        raise Refusal(reasons.SERVER_MISMATCH, f"the path names server {name!r}, the body {change.server.name!r}")
    return reply_json(await learner.put_server(broker, change))


@handles(router, access.REMOVE_SERVER, answers={200: list[Server]}, query={"now": bool})
async def remove_server(request: Request, broker: ReadyBroker, name: str) -> Response:
    """Answer the servers that are registered then. Query: `now=true` ends the server without a drain."""
    return reply_json(await learner.remove_server(broker, name, request.query_params.get("now") == "true"))


@handles(router, access.FINISH_RUN, FinishRun, {200: RunPosition})
async def finish(request: Request, broker: ReadyBroker) -> Response:
    message: FinishRun = await read_json(request, FinishRun)
    return reply_json(await learner.finish(broker, message))
