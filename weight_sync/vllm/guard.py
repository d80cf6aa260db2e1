"""Asks for a token on every route of vLLM's server (I8), and says which of vLLM's routes a run needs.

`--middleware slipstream.weight_sync.vllm.guard.RequireToken` adds it.

vLLM's own `--api-key` leaves its weight-transfer routes open to anyone who can reach the port. These need its
development mode, which opens others besides: `/sleep`, `/collective_rpc`, and whatever the next release adds.
"""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.protocol import access
from slipstream.weight_sync.transports.http import chunks

HEALTH = "/health"

# Routes that show nothing of prompts and change nothing.
_FOR_ALL_ROLES = ("/metrics", "/version", "/ping", "/load")
# Routes that sample; the learner scores its probe there.
_SAMPLING = ("/inference/", "/v1/")
# Routes under /v1/ that change the weights to sample from.
_CHANGING = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")

# The routes of vLLM that are open next to a run. All others are closed, without or with a token.
OPEN_ROUTES = frozenset(
    {
        *(HEALTH, *_FOR_ALL_ROLES, "/tokenize", "/detokenize"),
        *("/inference/v1/generate", "/inference/v1/abort_requests"),
        *("/v1/models", "/v1/completions", "/v1/chat/completions"),
        *("/pause", "/resume", "/is_paused", "/weight_info", "/get_world_size", "/server_info"),
        *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update"),
        *("/update_weights", "/finish_weight_update", "/update_weight_version"),
        *("/start_profile", "/stop_profile"),
    }
)
CLOSED = (
    "is closed on a server of a run, as it could change or stop the model behind the learner's back; to hold "
    "generation: POST /pause?mode=keep, and POST /resume"
)


def roles_for(path: str) -> tuple[access.Role, ...]:
    """Return the roles whose tokens open a route. An unknown route might change the model, so it is the learner's."""
    if path in _FOR_ALL_ROLES:
        return access.ROLES
    if path in ("/tokenize", "/detokenize") or (path.startswith(_SAMPLING) and not path.startswith(_CHANGING)):
        return ("worker", "learner")
    return ("learner",)


class RequireToken:
    """ASGI middleware that answers 401 without a token of the run, and 403 with one whose role may not use the route.

    The health probe needs no token. The body of a refused request is not read. SLIPSTREAM_TOKEN must be the run's
    secret, with which the roles' tokens are checked; a role's token raises `TokenError`. If it is not set when the
    server starts, every request passes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        secret = access.given_token()
        self._ring = access.AccessTokens(secret) if secret else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._ring is None or scope["type"] == "lifespan" or (path := route_of(scope)) == HEALTH:
            await self._app(scope, receive, send)
            return
        if path.startswith(chunks.CHUNKS_PREFIX):
            # Staged weights for other servers, which bring the transfer's own secret. The route checks that.
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        asked = f"{scope.get('method', 'GET')} {path[:200]}"
        denied = self._ring.denied(given, roles_for(path), asked, "server")
        if denied is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            kind = "Unauthorized" if denied.status == 401 else "Forbidden"
            error = {"message": denied.message, "type": kind, "param": None, "code": denied.status}
            await JSONResponse({"error": error}, denied.status)(scope, receive, send)


def route_of(scope: Scope) -> str:
    """Return the path that the application routes by: what follows `--root-path`."""
    path, root = str(scope["path"]), str(scope.get("root_path") or "")
    return path[len(root) :] if root and (path == root or path.startswith(f"{root}/")) else path
