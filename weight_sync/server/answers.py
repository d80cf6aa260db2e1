"""What a server answers at our routes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from protocol import access


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
    def said(cls, answer: Mapping[str, Any]) -> ServerFacts:
        """answer: of our own `/slipstream/facts`."""
        names = [of.name for of in fields(cls) if of.name not in ("version", "scale_out")]
        return cls(version=None, scale_out=bool(answer.get("scale_out")), **{name: answer.get(name) for name in names})

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

    @classmethod
    def of_command(cls, command: Sequence[str]) -> ServerFacts:
        """Of a command line that starts a server; what cannot be read there is not said. The last of several counts."""
        given: dict[str, str] = {}
        for place, word in enumerate(command):
            flag, equals, value = word.partition("=")
            if flag.startswith("--"):
                following = command[place + 1] if place + 1 < len(command) else ""
                given[flag.replace("_", "-")] = value if equals else "" if following.startswith("--") else following
        dtype, length = given.get("--dtype"), given.get("--max-model-len", "")
        try:
            transfer = json.loads(given.get("--weight-transfer-config", "{}"))
        except ValueError:
            transfer = {}  # vLLM refuses it, and says why
        return cls(
            version=None,
            served_name=given.get("--served-model-name"),
            logprobs_mode=given.get("--logprobs-mode"),
            dtype={"float": "float32", "half": "float16"}.get(dtype or "", dtype) if dtype != "auto" else None,
            max_model_len=int(length) if length.isdecimal() else None,
            transport=transfer.get("backend") if isinstance(transfer, dict) else None,
            scale_out="--enable-scale-out" in given and "--no-enable-scale-out" not in given,
            quantization=given.get("--quantization") or given.get("-q"),
        )


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}


def serves_another_run(server: str, run: str, silent_s: float) -> str:
    """Why a run may not use `server`: it is that of `run`, an id, whose learner called `silent_s` seconds ago."""
    return (
        f"{server} serves run {run}, whose learner looked {silent_s:.0f} s ago: one server serves one run; stop that "
        f"run, or give this one a server of its own"
    )


@dataclass(frozen=True)
class EngineState:
    """What a server says of itself at `/slipstream/state`.

    boot: another after each start. label: of the weights that serve, "" where the engine does not answer. whole: the
    live model is not half loaded. alive: the engine answered, not only the server in front of it. pause_owner: "none",
    "person" or "publication". reason: why it does not generate any more. owner: the id of the run whose learner
    controls it, "" without one; owner_silent_s: seconds since that one called.
    """

    boot: str
    label: str
    paused: bool
    whole: bool
    alive: bool
    pause_owner: str
    workers: int
    transport: str
    reason: str | None = None
    owner: str = ""
    owner_silent_s: float = 0.0


@dataclass(frozen=True)
class Staged:
    """stage: "receiving", "building", "ready" or "failed", of the slowest worker; `seconds` by stage."""

    stage: str
    error: str | None
    seconds: dict[str, float]


@dataclass(frozen=True)
class Swap:
    """Seconds: `pause_s` without generation, of which `exchange_s` changed the model."""

    pause_s: float
    exchange_s: float


def hint(path: str, status: int, text: str) -> str:
    """What to do about a refusal, after its text; "" where that says it all."""
    if status == 403 and access.TOKEN_VARIABLE in text:
        return ""  # the guard's
    if status == 401:
        return "; set SLIPSTREAM_TOKEN to the server's"
    if status == 404:
        return "; the server needs VLLM_SERVER_DEV_MODE=1: start it with slipstream vllm run.toml"
    if status == 403 and path.startswith("/inference"):
        return "; the server needs --enable-scale-out: start it with slipstream vllm run.toml"
    return ""
