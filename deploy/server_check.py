"""Whether a vLLM server that somebody else started is one that a run can use: its version and flags.

The probe of weight sync runs at temperature 1, so it is blind to log-probs of the wrong kind.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from protocol.config import ConfigError, RunConfig
from weight_sync.fleet.eligibility import TRIED_VERSION, Wanted, describe_mismatches, judge
from weight_sync.server.answers import ServerFacts

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
# vLLM collects what it knows of the machine first.
INFO_TIMEOUT_S = 60.0


def check(config: RunConfig) -> None:
    """Ask each of `vllm.servers`. Raises `ConfigError` with all faults of the first that has one; a version that was
    not tried is a warning."""
    for url in config.vllm.servers:
        facts = fetch(url, config.token_for("learner"))
        if faults := judge(facts, Wanted.of(config)):
            raise ConfigError(f"vllm.servers: {url}: {describe_mismatches(faults)}")
        if facts.version != TRIED_VERSION:
            logger.warning(
                "vllm.servers: %s runs vLLM %s; weight sync was tried with %s only: if a publication fails, install "
                "that one",
                *(url, facts.version or "of an unknown version", TRIED_VERSION),
            )


def fetch(url: str, token: str | None) -> ServerFacts:
    """Raises `ConfigError` where no vLLM server answers, or one without the routes of weight sync."""
    # A route of weight sync, which a server without VLLM_SERVER_DEV_MODE lacks, and which wants the token.
    try:
        _ask(url, "/weight_info", token)
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, HTTPError) and cause.code in (404, 405, 501) and not _is_vllm(url, token):
            raise ConfigError(
                f"vllm.servers: {url} is not a vLLM server: it answers HTTP {cause.code} to /weight_info, and no "
                f"version to /version; give the URL of one, or start one with: slipstream vllm run.toml"
            ) from None
        raise
    info = _ask(url, "/server_info?config_format=json", token, timeout_s=INFO_TIMEOUT_S)
    version = _ask(url, "/version", token).get("version")
    try:
        # No request at all: a server that has the route refuses it as such.
        _ask(url, "/inference/v1/generate", token, body=b"{}")
        scale_out = True
    except ConfigError as error:
        cause = error.__cause__
        scale_out = isinstance(cause, HTTPError) and cause.code not in (403, 404)
    return ServerFacts.parse(version, info, scale_out)


def _is_vllm(url: str, token: str | None) -> bool:
    """Whether it says its version, as every vLLM server does."""
    try:
        return isinstance(_ask(url, "/version", token).get("version"), str)
    except ConfigError:
        return False


def _ask(
    url: str, path: str, token: str | None, *, body: bytes | None = None, timeout_s: float = TIMEOUT_S
) -> Mapping[str, Any]:
    """The JSON object that the route answers with."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    headers |= {"Content-Type": "application/json"} if body else {}
    # As the worker asks: never by a proxy of the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url + path, data=body, headers=headers)
        with opener.open(request, timeout=timeout_s) as response:
            answer = json.loads(response.read())
    except HTTPError as error:
        unauthorized = "set SLIPSTREAM_TOKEN to the server's"
        hint = {401: unauthorized, 403: unauthorized, 404: "it needs VLLM_SERVER_DEV_MODE=1"}.get(error.code, "")
        raise ConfigError(
            f"vllm.servers: {url}{path} answers HTTP {error.code}; {hint or 'is it a vLLM server?'}; start it with: "
            f"slipstream vllm run.toml"
        ) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"vllm.servers: no vLLM server answers at {url} ({reason}); start it with: slipstream vllm run.toml, or "
            f"leave vllm.servers empty to have it launched"
        ) from None
    return answer if isinstance(answer, Mapping) else {}
