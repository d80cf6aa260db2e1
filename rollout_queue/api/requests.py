"""Refusals on the wire: the HTTP status of each reason, and one body, `Problem`, for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from protocol import codec, reasons
from protocol.client import JSON
from protocol.messages import ErrorBody
from rollout_queue.ledger.refusal import Refusal

# 409: the request does not fit the state of the run. 410: the ticket is over. 422: the message breaks a rule. 503:
# clients try again.
HTTP_STATUS: Mapping[str, int] = {
    reasons.UNAUTHORIZED: 401,
    reasons.WRONG_ROLE: 403,
    reasons.FINGERPRINT: 403,
    reasons.ORIGIN: 403,
    reasons.RUN_FINISHED: 409,
    reasons.RUN_EXISTS: 409,
    reasons.SESSION_SUPERSEDED: 409,
    reasons.LEASE_LAPSED: 409,
    reasons.NOT_LEASED: 409,
    reasons.ACK_AMBIGUOUS: 409,
    reasons.STEP_MISSING: 409,
    reasons.STEP_UNKNOWN: 409,
    reasons.VERSION_CONFLICT: 409,
    reasons.VERSION_MISSING: 409,
    reasons.SERVER_UNKNOWN: 409,
    reasons.TRANSITION_FORBIDDEN: 409,
    reasons.UNREGISTERED: 409,
    reasons.SESSION_AWAITED: 409,
    reasons.GAVE_UP: 409,
    reasons.EVALUATIONS_OPEN: 409,
    reasons.TICKET_UNKNOWN: 410,
    reasons.TICKET_ENDED: 410,
    reasons.TOO_LARGE: 413,
    reasons.UNDECODABLE: 422,
    reasons.OUT_OF_RANGE: 422,
    reasons.MAX_TICKETS: 422,
    reasons.WORKER_MISMATCH: 422,
    reasons.SERVER_MISMATCH: 422,
    reasons.SCHEMA_VERSION: 422,
    reasons.TICKET_MISMATCH: 422,
    reasons.GROUP_SIZE: 422,
    reasons.NO_SAMPLED_TOKENS: 422,
    reasons.REWARD_NOT_FINITE: 422,
    reasons.METRIC_NOT_FINITE: 422,
    reasons.LENGTH_MISMATCH: 422,
    reasons.TOKEN_ID_NEGATIVE: 422,
    reasons.TOKEN_ID_UNKNOWN: 422,
    reasons.TOO_DEEP: 422,
    reasons.SEGMENT_TOO_LONG: 422,
    reasons.TOO_MANY: 422,
    reasons.LOGPROB_MISSING: 422,
    reasons.LOGPROB_NOT_FINITE: 422,
    reasons.LOGPROB_POSITIVE: 422,
    reasons.SPAN_COVER: 422,
    reasons.SPAN_VERSION_UNKNOWN: 422,
    reasons.SPAN_SERVER_UNKNOWN: 422,
    reasons.VERSION_FROM_FUTURE: 422,
    reasons.UNVERIFIED_SERVER: 422,
    reasons.FULL: 429,
    reasons.STORE_FAILED: 503,
    reasons.NOT_READY: 503,
}


def error_response(refusal: Refusal) -> Response:
    """The HTTP answer to a refused request."""
    headers = {}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = f"{refusal.retry_after_s:g}"
    if refusal.reason == reasons.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return _problem(HTTP_STATUS[refusal.reason], ErrorBody(refusal.reason, refusal.message), headers)


def install_error_bodies(app: FastAPI) -> None:
    """Give every refusal of `app` a `Problem` body, those of HTTP itself too, such as an unknown route."""

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return _problem(error.status_code, ErrorBody(reasons.http(error.status_code), message))

    @app.exception_handler(ClientDisconnect)
    async def hung_up(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # which nobody hears


def _problem(status: int, problem: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    return Response(codec.encode_json(problem), status, headers=headers, media_type=JSON)
