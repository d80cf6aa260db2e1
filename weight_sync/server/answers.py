"""Parses a vLLM server's answers at Slipstream's routes, and vLLM's own description of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from slipstream.protocol import access


@dataclass(frozen=True)
class ServerFacts:
    """The flags of a server that decide whether a run can use it. A field is None if it is not known.

    Attributes:
        version: vLLM's release.
        served_name: Name of the model that requests must use.
        logprobs_mode: Which log-probs it answers, such as "processed_logprobs".
        dtype: Type that it computes in, such as "bfloat16", without "torch.".
        max_model_len: Longest sequence, in tokens.
        transport: vLLM's name of its weight transfer engine.
        scale_out: Whether it generates from token ids.
        quantization: vLLM's name of the method, None without one.
        engines: Number of data-parallel engines.
        max_logprobs: How many log-probs of a token it tells at most; -1 for any number.
    """

    version: str | None
    served_name: str | None
    logprobs_mode: str | None
    dtype: str | None
    max_model_len: int | None
    transport: str | None
    scale_out: bool
    quantization: str | None = None
    engines: int | None = 1
    max_logprobs: int | None = None

    @classmethod
    def from_route(cls, answer: Mapping[str, Any]) -> ServerFacts:
        """Read the answer of `/slipstream/facts`."""
        names = [of.name for of in fields(cls) if of.name not in ("version", "scale_out")]
        return cls(version=None, scale_out=bool(answer.get("scale_out")), **{name: answer.get(name) for name in names})

    @classmethod
    def parse(cls, version: str | None, info: Mapping[str, Any], scale_out: bool) -> ServerFacts:
        """Read `info`, the answer of vLLM's `/server_info?config_format=json`."""
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
            max_logprobs=model.get("max_logprobs"),
        )

    @classmethod
    def of_command(cls, command: Sequence[str]) -> ServerFacts:
        """Parse a command line that starts a server. Unknown flags are None; the last of several counts."""
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
            max_logprobs=int(most) if (most := given.get("--max-logprobs", "")).lstrip("-").isdecimal() else None,
        )


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}


def serves_another_run(server: str, run: str, silent_s: float) -> str:
    """Explain that `server` belongs to the run with the id `run`, whose learner called `silent_s` seconds ago."""
    return (
        f"{server} serves run {run}, whose learner looked {silent_s:.0f} s ago: one server serves one run; stop that "
        f"run, or give this one a server of its own"
    )


@dataclass(frozen=True)
class EngineState:
    """The answer of `/slipstream/state`.

    Attributes:
        boot: Id of this start of the engine; another text after each start.
        label: Label of the weights that serve, "" if the engine does not answer.
        paused: Whether generation stands still.
        whole: Whether the live model is loaded whole.
        alive: Whether the engine answered, not only the API process in front of it.
        pause_owner: "none", "person" or "publication".
        workers: Number of the server's workers, over all kinds of parallelism.
        transport: vLLM's name of its weight transfer engine, "none" without one.
        reason: Why it will not generate again, None while it may.
        owner: Id of the run whose learner controls it, "" without one.
        owner_silent_s: Seconds since that learner called.
        stuck: Why it generates nothing now though nobody who may has paused it, None where it may generate.
        step_s: Seconds of the engine's longest step lately, as of its newest answer to the API process.
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
    stuck: str | None = None
    step_s: float = 0.0


@dataclass(frozen=True)
class Staged:
    """How far an update is, on the slowest worker.

    Attributes:
        stage: "receiving", "building", "ready" or "failed".
        error: Why it failed.
        seconds: Seconds that each finished stage took.
    """

    stage: str
    error: str | None
    seconds: dict[str, float]


@dataclass(frozen=True)
class Swap:
    """Times of a swap: `pause_s` seconds without generation, of which `exchange_s` changed the model."""

    pause_s: float
    exchange_s: float


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
