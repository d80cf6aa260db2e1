"""The schema of the queue's routes (OpenAPI 3.1), made from their declarations and the types of their messages.

Sizes that are bounded after decoding, such as the length of a name, are not in it: a longer one gets 413 or 422.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter, Response

from slipstream.protocol import access, codec
from slipstream.protocol.client import JSON, MSGPACK
from slipstream.protocol.messages import ErrorBody, Group, LeaseReply
from slipstream.rollout_queue.api.requests import ENDPOINTS, HTTP_STATUS, Endpoint, handles

_REFERENCE = "#/components/schemas/{name}"

# Types with arrays of numbers, which JSON has not.
_BINARY = (Group, LeaseReply)

# What is refused whatever the route is, before its handler is called or where there is no room for it.
_OF_ANY = (400, 403, 408, 431, 503)

_OF_BODIES = (409, 410, 413, 422, 429)

router = APIRouter()


@handles(router, access.READ_SCHEMA, answers={200: dict[str, Any]})
async def read_schema() -> Response:
    return Response(codec.encode_json(openapi()), media_type=JSON)


@cache
def openapi() -> Mapping[str, Any]:
    """Return the schema of all declared routes."""
    endpoints = [ENDPOINTS[route] for route in access.ROUTES]
    types = _types(endpoints)
    made, components = _for_generators(msgspec.json.schema_components(types, ref_template=_REFERENCE))
    schemas = dict(zip(map(repr, types), made, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.route.path, {})[endpoint.route.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream rollout queue", "version": version("slipstream-rl")},
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {
                f"Refused{status}": _refused(status, schemas) for status in {*_OF_ANY, *_OF_BODIES, 401, 404}
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _for_generators(found: Any) -> Any:
    """Return a schema as generators of clients read it: without dots in the names of types, and without `items: false`,
    which says of a tuple what `maxItems` says."""
    if isinstance(found, dict):
        return {_plain(key): _for_generators(value) for key, value in found.items() if (key, value) != ("items", False)}
    if isinstance(found, list | tuple):
        return [_for_generators(value) for value in found]
    return _plain(found) if isinstance(found, str) and found.startswith(_REFERENCE.format(name="")) else found


def _plain(name: str) -> str:
    """Return `StatusNotice` for `slipstream.protocol.status.Notice`, msgspec's name where two types have one name."""
    return re.sub(r"slipstream\.protocol\.(\w+)\.(\w+)", lambda match: match[1].capitalize() + match[2], name)


def _types(endpoints: list[Endpoint]) -> list[Any]:
    """Return the types of JSON in requests and answers, each once."""
    found: dict[str, Any] = {repr(ErrorBody): ErrorBody}
    for endpoint in endpoints:
        for kind in (endpoint.takes, *endpoint.answers.values(), *endpoint.query.values()):
            if kind not in (None, bytes, str, *_BINARY):
                found[repr(kind)] = kind
    return [*found.values()]


def _operation(endpoint: Endpoint, schemas: Mapping[str, Any]) -> dict[str, Any]:
    route = endpoint.route
    refusals = {*_OF_ANY, *(_OF_BODIES if endpoint.takes is not None or route.method == "DELETE" else ())}
    if endpoint.query:
        refusals.add(422)
    if route.roles is not None:
        refusals.add(401)
    if route.method == "GET" and "{" in route.path:
        refusals.update((404, 410))
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,
        # Any one of these: the run's secret and the token of each role that may ask.
        "security": [{"token": [role]} for role in route.roles or ()],
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in re.findall(r"\{(\w+)\}", route.path)
            ),
            *({"name": name, "in": "query", "schema": schemas[repr(kind)]} for name, kind in endpoint.query.items()),
        ],
        "responses": {
            **{str(status): _answer(endpoint, kind, schemas) for status, kind in endpoint.answers.items()},
            **{str(status): {"$ref": f"#/components/responses/Refused{status}"} for status in sorted(refusals)},
        },
    }
    if (text := inspect.getdoc(endpoint.handler)) is not None:
        operation["description"] = text
    if endpoint.takes is not None:
        operation["requestBody"] = {"required": True, "content": _content(endpoint, endpoint.takes, schemas)}
    return operation


def _answer(endpoint: Endpoint, kind: Any, schemas: Mapping[str, Any]) -> dict[str, Any]:
    if kind is None:
        return {"description": "done, without a body"}
    if kind is bytes:  # a word that no client needs to parse
        return {"description": "done"}
    return {"description": "the answer", "content": _content(endpoint, kind, schemas)}


def _content(endpoint: Endpoint, kind: Any, schemas: Mapping[str, Any]) -> dict[str, Any]:
    if kind is str:
        return {media: {"schema": {"type": "string"}} for media in endpoint.texts}
    if kind in _BINARY:
        return {MSGPACK: {"schema": {"description": f"{kind.__name__} in msgpack: see protocol/messages.py"}}}
    return {JSON: {"schema": schemas[repr(kind)]}}


def _refused(status: int, schemas: Mapping[str, Any]) -> dict[str, Any]:
    named = sorted(reason for reason, given in HTTP_STATUS.items() if given == status)
    described = f"refused: {', '.join(named)}" if named else "not a request that the queue reads"
    return {"description": described, "content": {JSON: {"schema": schemas[repr(ErrorBody)]}}}
