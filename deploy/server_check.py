"""Whether a vLLM server that somebody else started is one that a run can use: its version and flags.

The probe of weight sync runs at temperature 1, so it is blind to log-probs of the wrong kind.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from protocol.config import ConfigError, RunConfig
from rollout_worker.inference.client import SERVED_MODEL_NAME
from weight_sync.transports import TRANSPORTS, backend

logger = logging.getLogger(__name__)

# The release whose routes and internals weight sync was built and tried with.
TRIED_VERSION = "0.32.0"
TIMEOUT_S = 10.0
# vLLM collects what it knows of the machine first.
INFO_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself; None: it does not say. dtype: without "torch."."""

    version: str | None
    served_name: str | None
    logprobs_mode: str | None
    dtype: str | None
    max_model_len: int | None
    transport: str | None
    scale_out: bool
    quantization: str | None = None

    @classmethod
    def parse(cls, version: str | None, info: Mapping[str, Any], scale_out: bool) -> ServerFacts:
        """info: the answer of `/server_info?config_format=json`."""
        vllm = _table(info, "vllm_config")
        model = _table(vllm, "model_config")
        dtype = model.get("dtype")
        return cls(
            version=version,
            served_name=model.get("served_model_name"),
            logprobs_mode=model.get("logprobs_mode"),
            dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
            max_model_len=model.get("max_model_len"),
            transport=_table(vllm, "weight_transfer_config").get("backend"),
            scale_out=scale_out,
            quantization=model.get("quantization"),
        )


@dataclass(frozen=True)
class Fault:
    """`what` is wrong, and the `flag` of vLLM's command line that mends it."""

    what: str
    flag: str


def judge(facts: ServerFacts, config: RunConfig) -> list[Fault]:
    """What keeps the run from using the server, or would make its data wrong."""
    transport, length, dtype = config.weight_sync.transport, config.vllm.max_model_len, config.model.dtype
    mode = "processed_logprobs"
    wanted = backend("gloo" if transport == "auto" else transport)
    faults = {
        Fault("it generates no tokens from tokens", "--enable-scale-out"): not facts.scale_out,
        Fault(
            f"its log-probs are {facts.logprobs_mode}, not those of the distribution that it samples from, which is "
            f"wrong at any temperature but 1",
            f"--logprobs-mode {mode}",
        ): facts.logprobs_mode not in (mode, None),
        Fault(
            f"its dtype is {facts.dtype}, and model.dtype = {dtype}: its weights would never equal the learner's",
            f"--dtype {dtype}",
        ): facts.dtype not in (dtype, None),
        Fault(
            f"its context is {facts.max_model_len} tokens, less than vllm.max_model_len = {length}: it would refuse "
            f"long episodes",
            f"--max-model-len {length}",
        ): facts.max_model_len is not None and facts.max_model_len < length,
        Fault(
            f"its weight transfer is {facts.transport or 'off'}, and weight_sync.transport = {transport}: it would "
            f"never get new weights",
            f'--weight-transfer-config \'{{"backend": "{wanted}"}}\'',
        ): facts.transport not in ({backend(name) for name in TRANSPORTS} if transport == "auto" else {wanted}),
        Fault(
            f"it is quantised ({facts.quantization}), so that its log-probs differ from the learner's by more than "
            f"weight_sync.probe_tolerance = auto allows: measure by how much, and set it, such as 1.0",
            "(without --quantization)",
        ): facts.quantization is not None and config.weight_sync.probe_tolerance == "auto",
        Fault(
            f"it serves the model as {facts.served_name!r}, and requests name {SERVED_MODEL_NAME!r}",
            f"--served-model-name {SERVED_MODEL_NAME}",
        ): facts.served_name not in (SERVED_MODEL_NAME, None),
    }
    return [fault for fault, holds in faults.items() if holds]


def check(config: RunConfig) -> None:
    """Ask each of `vllm.servers`. Raises `ConfigError` with all faults of the first that has one; a version that was
    not tried is a warning."""
    for url in config.vllm.servers:
        facts = fetch(url, config.token_for("learner"))
        if faults := judge(facts, config):
            raise ConfigError(
                f"vllm.servers: {url}: {'; '.join(fault.what for fault in faults)}; start it with: slipstream vllm "
                f"run.toml, or with: {' '.join(fault.flag for fault in faults)}"
            )
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


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}
