"""I8: which role's token opens which of the queue's routes."""

from __future__ import annotations

import aiohttp
import pytest

from slipstream.protocol import access, codec
from slipstream.protocol.client import QueueClient, QueueRefused
from slipstream.protocol.config import ConfigError
from slipstream.protocol.messages import ErrorBody
from slipstream.rollout_queue import service
from slipstream.rollout_queue.api.app import create_app
from slipstream.rollout_queue.store.memory import MemoryStore
from tests.kit import config
from tests.kit.queue import serving

SECRET = "0123456789abcdef"
ANYONE, WORKER, LEARNER = access.ROLES, ("worker",), ("learner",)
ROUTES = {
    ("POST", access.TICKETS): WORKER,
    ("POST", access.TICKET_FAIL_OF): WORKER,
    ("POST", access.WORKER_OF): WORKER,
    ("DELETE", access.WORKER_OF): WORKER,
    ("PUT", access.GROUP_OF): WORKER,
    ("GET", access.POLICY): ANYONE,
    ("POST", access.POLICY): LEARNER,
    ("GET", access.EVALUATIONS): LEARNER,
    ("POST", access.EVALUATIONS): LEARNER,
    ("POST", access.LEASES): LEARNER,
    ("POST", access.LEASE_ACK_OF): LEARNER,
    ("POST", access.LEASE_RENEW_OF): LEARNER,
    ("POST", access.LEASE_RELEASE_OF): LEARNER,
    ("GET", access.SERVERS): ANYONE,
    ("PUT", access.SERVER_OF): LEARNER,
    ("DELETE", access.SERVER_OF): LEARNER,
    ("POST", access.SERVERS): LEARNER,
    ("POST", access.FINISH): LEARNER,
    ("GET", access.STATUS): ANYONE,
    ("GET", access.METRICS): ANYONE,
    ("GET", access.ROLLOUTS): ANYONE,
    ("GET", access.READY): ANYONE,
    ("GET", access.SCHEMA): ANYONE,
    ("GET", access.PAGE): None,
    ("GET", access.PAGE_FILE_OF): None,
    ("GET", access.PAGE_DATA): ANYONE,
    ("GET", access.TICKET_OF): ANYONE,
    ("GET", access.LIVE): ANYONE,
    ("POST", access.SIGN_IN): None,
    ("GET", "/page/a/b"): LEARNER,
    ("GET", "/nowhere"): LEARNER,
    ("GET", "/v1/ticketsx"): LEARNER,
    ("POST", access.STATUS): LEARNER,
    ("HEAD", access.STATUS): ANYONE,
    ("GET", "/v1/workers//x"): LEARNER,
    ("POST", "/v1/workers/"): LEARNER,
    ("POST", "/v1/workers/a/b"): LEARNER,
}


def written(path: str) -> str:
    return path.format(id="x", name="x")


def test_every_route_of_the_queue_is_declared_once_and_has_its_roles_in_the_table() -> None:
    app = create_app(config(), MemoryStore())
    registered = sorted((method, route.path) for route in app.routes for method in route.methods)  # type: ignore[attr-defined]
    declared = sorted((route.method, route.path) for route in access.ROUTES)
    assert registered == declared
    assert len(set(declared)) == len(declared)
    assert {*declared} - {("GET", access.HEALTH)} <= {*ROUTES}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_i8_the_table_of_roles(method: str, path: str) -> None:
    routes, _ = access.find(written(path))
    assert access.roles_of(access.route_for(method, routes)) == ROUTES[method, path]


async def test_i8_a_role_s_token_is_refused_where_another_s_is_needed_and_nothing_is_changed() -> None:
    async with serving(config(queue={"token": SECRET})) as queue, aiohttp.ClientSession() as session:
        for (method, path), roles in ROUTES.items():
            if path == access.LIVE or roles is None:  # it never ends; they need no token: test_page_routes.py
                continue
            for role in access.ROLES:
                headers = {"Authorization": f"Bearer {access.derive_token(SECRET, role)}"}
                async with session.request(method, queue.url + written(path), headers=headers) as response:
                    body = await response.read()
                if role in roles:
                    assert response.status not in (401, 403), (method, path, role)
                    continue
                assert response.status == 403, (method, path, role)
                problem = codec.decode_json(body, ErrorBody)
                assert problem.reason == "wrong_role"
                assert f"needs the token of a {roles[0]}, and this is a {role}'s" in problem.message
                assert SECRET not in problem.message


async def test_i8_the_secret_and_every_role_read_status_and_a_worker_may_not_lease() -> None:
    async with serving(config(queue={"token": SECRET})) as queue:
        for token in (SECRET, *(access.derive_token(SECRET, role) for role in access.ROLES)):
            async with QueueClient(queue.url, token) as client:
                assert (await client.status()).step == 0
        async with QueueClient(queue.url, access.derive_token(SECRET, "worker"), patience_s=0.0) as client:
            with pytest.raises(QueueRefused, match="`slipstream token learner`"):
                await client.finish(0)


async def test_i8_what_another_run_derived_opens_nothing() -> None:
    another = access.derive_token("another run's secret", "learner")
    async with serving(config(queue={"token": SECRET})) as queue, QueueClient(queue.url, another) as client:
        with pytest.raises(
            QueueRefused, match="the token is not one of the queue's: set SLIPSTREAM_TOKEN to the run's secret, or"
        ):
            await client.status()


def test_i8_a_queue_that_has_a_role_s_token_only_does_not_start() -> None:
    held = access.derive_token(SECRET, "learner")
    with pytest.raises(ConfigError, match="holds a learner's token, but a process that checks the tokens of others"):
        service.serve(config(queue={"token": held, "port": 1}))
