"""The served schema names every route with its messages, and the queue keeps to it, whatever is sent."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from slipstream.protocol import access, codec
from slipstream.protocol.client import MSGPACK, QueueClient
from slipstream.protocol.messages import BeginSession, TicketRequest, WorkerReport
from slipstream.rollout_queue.api.app import create_app
from slipstream.rollout_queue.api.requests import HTTP_STATUS
from slipstream.rollout_queue.api.schema import openapi
from slipstream.rollout_queue.store.memory import MemoryStore
from tests.kit import config
from tests.kit.queue import listening, serve_version, serving

SCHEMA: Any = codec.decode_json(codec.encode_json(openapi()), dict[str, Any])


def operation(route: access.Route) -> Any:
    return SCHEMA["paths"][route.path][route.method.lower()]


def check(kind: str, value: Any) -> None:
    """Raise `jsonschema.ValidationError` unless the value is of this type of the schema."""
    components = {"components": SCHEMA["components"], "$ref": f"#/components/schemas/{kind}"}
    jsonschema.Draft202012Validator(components).validate(value)


def test_every_route_is_in_the_schema_and_nothing_else() -> None:
    found = {(method.upper(), path) for path, methods in SCHEMA["paths"].items() for method in methods}
    assert found == {(route.method, route.path) for route in access.ROUTES}


def test_generators_of_clients_can_read_it() -> None:
    """Those for Python read neither a name with dots nor a schema that is false."""
    assert all(name.isidentifier() for name in SCHEMA["components"]["schemas"])
    assert {"StatusNotice", "MessagesNotice"} <= SCHEMA["components"]["schemas"].keys()
    assert b'"items":false' not in codec.encode_json(SCHEMA)


def test_every_operation_says_who_may_ask_what_it_takes_and_how_it_refuses() -> None:
    for route in access.ROUTES:
        found = operation(route)
        assert [needed["token"] for needed in found["security"]] == [[role] for role in route.roles or ()], route
        assert found["operationId"].isidentifier()
        named = {parameter["name"] for parameter in found["parameters"] if parameter["in"] == "path"}
        assert named == {part.strip("{}") for part in route.path.split("/") if part.startswith("{")}
        assert ("requestBody" in found) == (route.method in ("POST", "PUT"))
        assert ("401" in found["responses"]) == (route.roles is not None)
    assert operation(access.SUBMIT_GROUP)["requestBody"]["content"].keys() == {"application/msgpack"}
    answer = operation(access.READ_SERVERS)["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer == {"type": "array", "items": {"$ref": "#/components/schemas/Server"}}


def test_every_status_of_a_refusal_is_described_with_its_reasons() -> None:
    described = SCHEMA["components"]["responses"]
    for reason, status in HTTP_STATUS.items():
        assert reason in described[f"Refused{status}"]["description"]


def test_types_are_json_schemas_and_all_references_lead_somewhere() -> None:
    for kind in SCHEMA["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(kind)

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            value = list(value.values())
        for item in value if isinstance(value, list) else ():
            yield from references(item)

    found = set(references(SCHEMA))
    for reference in found:
        place = SCHEMA
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    assert len(found) > 30


async def test_what_the_queue_answers_is_what_the_schema_says() -> None:
    async with serving(config(queue={"token": "secret"})) as queue:
        viewer = {"Authorization": f"Bearer {access.derive_token('secret', 'viewer')}"}
        async with aiohttp.ClientSession(queue.url) as session:
            async with session.get(access.SCHEMA) as refused:
                assert refused.status == 401
                check("ErrorBody", await refused.json())
            async with session.get(access.SCHEMA, headers=viewer) as response:
                assert await response.json() == SCHEMA
            async with QueueClient(queue.url, "secret", patience_s=5.0) as client:
                await client.begin_session(BeginSession(0, 0, 100, resume=False))
                await serve_version(client, 0)
                await client.heartbeat(WorkerReport("w", []))
                await client.tickets(TicketRequest("w", 1, wait_s=0.0))
            async with session.get(access.STATUS, headers=viewer) as response:
                check("Status", await response.json())
            async with session.get(access.POLICY, headers=viewer) as response:
                check("RunPosition", await response.json())
    with pytest.raises(jsonschema.ValidationError):
        check("Status", {"run": 7})


@contextmanager
def live_queue() -> Iterator[str]:
    """Serve a queue in its own thread, behind the connections that the service has."""
    ended, up = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        app = create_app(config(), MemoryStore())
        async with listening(app) as url, QueueClient(url, patience_s=5.0) as client:
            await client.begin_session(BeginSession(0, 0, 100, resume=False))
            await serve_version(client, 0)
            urls.append(url)
            up.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="queue")
    thread.start()
    try:
        assert up.wait(30.0)
        yield urls[0]
    finally:
        ended.set()
        thread.join(30.0)


@pytest.mark.wide
@pytest.mark.timeout(300)
def test_whatever_the_schema_allows_or_forbids_is_answered_as_it_says() -> None:
    """One queue for all routes, since what one request leaves behind is what the next one meets."""
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis import checks as known

    known.load_all_checks()
    checks = known.CHECKS.get_by_names(
        ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
    )
    schemathesis.serializer(MSGPACK)(lambda _, value: msgspec.msgpack.encode(value))
    bounded = settings(
        max_examples=60,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    statuses: Counter[str] = Counter()
    with live_queue() as url:
        schema = schemathesis.openapi.from_url(url + access.SCHEMA)
        for found in schema.get_all_operations():
            tried = found.ok()
            if tried.path == access.FOLLOW_LIVE.path:
                continue  # an answer without an end
            for mode in schemathesis.GenerationMode:

                @bounded
                @given(case=tried.as_strategy(generation_mode=mode))
                def ask(case: Any) -> None:
                    fit(case)
                    response = case.call(timeout=30.0)
                    statuses[f"{case.operation.label} {response.status_code}"] += 1
                    case.validate_response(response, checks=checks)

                with suppress(Unsatisfiable):  # nothing that a request without parameters could do wrong
                    ask()
    assert statuses.total() > 1000
    for answered in ("POST /v1/tickets 200", "POST /v1/workers/{id} 200", "POST /v1/policy 200", "GET /v1/status 200"):
        assert statuses[answered], f"never: {answered}, but {statuses}"


def fit(case: Any) -> None:
    """Let a request not wait, and its path name the worker that its body names."""
    if isinstance(case.body, dict) and isinstance(case.body.get("wait_s", 0), int | float):
        case.body["wait_s"] = 0
    if isinstance(case.query, dict) and "wait_s" in case.query:
        case.query["wait_s"] = "0"
    if isinstance(case.body, dict) and "ticket_ids" in case.body and isinstance(case.body.get("worker_id"), str):
        case.body["worker_id"] = case.path_parameters["id"]
