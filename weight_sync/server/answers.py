"""Reads vLLM's own description of a server, and explains refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.protocol import access
from slipstream.protocol.engine import ServerFacts


def facts_of_description(version: str | None, info: Mapping[str, Any], scale_out: bool) -> ServerFacts:
    """Read `info`, the answer of vLLM's `/server_info?config_format=json`."""
    vllm = _table(info, "vllm_config")
    model = _table(vllm, "model_config")
    dtype = model.get("dtype")
    return ServerFacts(
        version=version,
        served_name=model.get("served_model_name"),
        logprobs_mode=model.get("logprobs_mode"),
        dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        max_model_len=model.get("max_model_len"),
        transport=_table(vllm, "weight_transfer_config").get("backend"),
        scale_out=scale_out,
        quantization=model.get("quantization"),
        max_logprobs=model.get("max_logprobs"),
    )


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}


def serves_another_run(server: str, run: str, silent_s: float) -> str:
    """Explain that `server` belongs to the run with the id `run`, whose learner called `silent_s` seconds ago."""
    return (
        f"{server} serves run {run}, whose learner looked {silent_s:.0f} s ago: one server serves one run; stop that "
        f"run, or give this one its own server"
    )


def hint(path: str, status: int, text: str) -> str:
    """Return what to do about a refusal, to follow its text; "" where the text says it all."""
    if status == 403 and access.TOKEN_VARIABLE in text:
        return ""  # the text of our token check, which has the remedy
    if status == 401:
        return "; set SLIPSTREAM_TOKEN to the server's"
    if status == 404:
        return "; the server needs VLLM_SERVER_DEV_MODE=1: start it with slipstream vllm run.toml"
    if status == 403 and path.startswith("/inference"):
        return "; the server needs --enable-scale-out: start it with slipstream vllm run.toml"
    return ""
