"""Whether a vLLM server is one that a run can use: its flags, as it says them itself. Pure: who asks is elsewhere.

The probe of weight sync runs at temperature 1, so it is blind to log-probs of the wrong kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from protocol.config import RunConfig
from protocol.versions import SERVED_MODEL_NAME
from weight_sync.transports.registry import TRANSPORTS, backend

# The release whose routes and internals weight sync was built and tried with.
TRIED_VERSION = "0.32.0"

LOGPROBS_MODE = "processed_logprobs"


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


@dataclass(frozen=True)
class Wanted:
    """What a run wants of its servers; None: it is not known, as where there is no run file. quantised: whether its
    probe allows for a server that rounds its weights."""

    dtype: str | None = None
    max_model_len: int | None = None
    transport: str = "auto"
    quantised: bool = True

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        allows = config.weight_sync.probe_tolerance != "auto" or config.served_quantised
        return cls(config.served_dtype, config.vllm.max_model_len, config.weight_sync.transport, allows)


@dataclass(frozen=True)
class Mismatch:
    """`what` is wrong, and the `flag` of vLLM's command line that mends it."""

    what: str
    flag: str


def judge(facts: ServerFacts, wanted: Wanted) -> list[Mismatch]:
    """What keeps a run from using the server, or would make its data wrong."""
    transport, length, dtype = wanted.transport, wanted.max_model_len, wanted.dtype
    known = {backend(name) for name in TRANSPORTS} if transport == "auto" else {backend(transport)}
    faults = {
        Mismatch("it generates no tokens from tokens", "--enable-scale-out"): not facts.scale_out,
        Mismatch(
            f"its log-probs are {facts.logprobs_mode}, not those of the distribution that it samples from, which is "
            f"wrong at any temperature but 1",
            f"--logprobs-mode {LOGPROBS_MODE}",
        ): facts.logprobs_mode not in (LOGPROBS_MODE, None),
        Mismatch(
            f"its dtype is {facts.dtype}, and model.dtype = {dtype}: its weights would never equal the learner's",
            f"--dtype {dtype}",
        ): dtype is not None and facts.dtype not in (dtype, None),
        Mismatch(
            f"its context is {facts.max_model_len} tokens, less than vllm.max_model_len = {length}: it would refuse "
            f"long episodes",
            f"--max-model-len {length}",
        ): length is not None and facts.max_model_len is not None and facts.max_model_len < length,
        Mismatch(
            f"its weight transfer is {facts.transport or 'off'}, and weight_sync.transport = {transport}: it would "
            f"never get new weights",
            f'--weight-transfer-config \'{{"backend": "{backend("gloo" if transport == "auto" else transport)}"}}\'',
        ): facts.transport not in known,
        Mismatch(
            f"it is quantised ({facts.quantization}), so that its log-probs differ from the learner's by more than "
            f"weight_sync.probe_tolerance = auto allows: measure by how much, and set it, such as 1.0",
            "(without --quantization)",
        ): facts.quantization is not None and not wanted.quantised,
        Mismatch(
            f"it serves the model as {facts.served_name!r}, and requests name {SERVED_MODEL_NAME!r}",
            f"--served-model-name {SERVED_MODEL_NAME}",
        ): facts.served_name not in (SERVED_MODEL_NAME, None),
    }
    return [fault for fault, holds in faults.items() if holds]


def describe_mismatches(faults: Sequence[Mismatch]) -> str:
    """All of them, and the remedy."""
    return (
        f"{'; '.join(fault.what for fault in faults)}; start it with: slipstream vllm run.toml, or with: "
        f"{' '.join(fault.flag for fault in faults)}"
    )


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}
