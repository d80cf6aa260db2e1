"""The page for people in a browser: its files, what it shows, its live stream, and the sign-in."""

from __future__ import annotations

from typing import cast

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from slipstream.protocol import access
from slipstream.protocol.history import PageData
from slipstream.protocol.rollouts import RolloutView, TicketLife
from slipstream.rollout_queue import page
from slipstream.rollout_queue.api.access import COOKIE, Gate
from slipstream.rollout_queue.api.requests import ReadyBroker, handles, read_json, reply_json
from slipstream.rollout_queue.broker import status, ticket_life
from slipstream.rollout_queue.broker.broker import Broker

router = APIRouter()

# What a policy, a tool or a task says may be HTML or a script: none that does not lie next to the page is run.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_COOKIE_S = 30 * 24 * 3600


class _Key(msgspec.Struct):
    """Says which rollout a view is of."""

    ticket_id: str
    number: int


class SignIn(msgspec.Struct):
    """Lets a browser look: a viewer's token, or any other of the run."""

    token: str


@handles(router, access.READ_PAGE, answers={200: str}, texts=[page.TYPES[".html"]])
async def read_page() -> Response:
    return _file(page.INDEX)


@handles(router, access.READ_PAGE_FILE, answers={200: str}, texts=[*page.TYPES.values()])
async def read_page_file(name: str) -> Response:
    return _file(name)


@handles(router, access.READ_PAGE_DATA, answers={200: PageData})
async def read_page_data(broker: ReadyBroker) -> Response:
    return reply_json(page_data(broker))


def page_data(broker: Broker) -> PageData:
    """Return what the page shows as of now."""
    config, now = broker.config, status.assemble(broker)
    return PageData(
        run=config.run.name,
        live=True,
        now=broker.clock.wall(),
        max_staleness=config.queue.max_staleness,
        group_size=config.rollout.group_size,
        groups_per_step=config.learner.groups_per_step,
        status=now,
        time=broker.history.columns.time.json(),
        steps=broker.history.columns.steps.json(),
        events=list(broker.history.events),
        rollouts=_rollouts(broker),
        evaluations=now.evaluations,
    )


def _rollouts(broker: Broker) -> list[RolloutView]:
    """Return the newest rollouts: of trained groups as the learner wrote them, others as they came to the queue."""
    seen, trained = broker.observations, list(broker.trained.newest)
    known = {(view.ticket_id, view.number) for view in trained}
    came = [*seen.recent.newer(0)[1], *seen.recent_evals.newer(0)[1]]
    others = [raw for raw in came if _key(raw) not in known]
    return [*trained, *cast(list[RolloutView], others)]  # the others are in JSON


def _key(raw: msgspec.Raw) -> tuple[str, int]:
    key = msgspec.json.decode(raw, type=_Key)
    return key.ticket_id, key.number


@handles(router, access.READ_TICKET, answers={200: list[TicketLife]})
async def read_ticket(broker: ReadyBroker, id: str) -> Response:
    """Answer what became of a ticket and of the other attempts at its row, oldest first."""
    return reply_json(await ticket_life.read(broker, id))


@handles(router, access.FOLLOW_LIVE, answers={200: str}, texts=["text/event-stream; charset=utf-8"])
async def follow_live(broker: ReadyBroker) -> Response:
    """Stream what is new: server-sent events named status, time, step, event and rollouts."""
    broker.viewers.check_room()
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(broker.viewers.listen(), media_type="text/event-stream", headers=headers)


@handles(router, access.SIGN_IN_TO_PAGE, SignIn, {204: None})
async def sign_in(request: Request) -> Response:
    """Give a browser a cookie with a viewer's token: it can look, and nothing else."""
    message: SignIn = await read_json(request, SignIn)
    gate: Gate = request.app.state.gate
    response = Response(status_code=204)
    if (value := gate.sign_in(message.token)) is not None:
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, value, _COOKIE_S, httponly=True, samesite="strict", secure=secure)
    return response


def _file(name: str) -> Response:
    body = page.files().get(name)
    if body is None:
        raise HTTPException(404, f"the page has no file {name[:100]!r}")
    # The library changes only with the package.
    caching = {"Cache-Control": "max-age=86400"} if name == page.CHARTS else {}
    return Response(body, media_type=page.TYPES[f".{name.rpartition('.')[2]}"], headers={**_HEADERS, **caching})
