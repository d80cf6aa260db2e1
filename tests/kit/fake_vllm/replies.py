"""The JSON that vLLM 0.32 answers with (`entrypoints/scale_out/token_in_token_out/protocol.py`)."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from tests.kit.fake_vllm.engine import Sample
from tests.kit.fake_vllm.faults import Fault


def error(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def choice(sample: Sample, index: int, version: str, fault: Fault | None, masks: bool = False) -> dict[str, Any]:
    """A finished choice of the plain answer, broken as the fault says. `masks`: with the likeliest tokens, of which
    there are two in each place."""
    kind = fault.kind if fault else None
    token_ids, logprobs, finish_reason = sample.token_ids, sample.logprobs, sample.finish_reason
    if fault and kind == "abort":
        token_ids, logprobs, finish_reason = token_ids[: fault.after], logprobs[: fault.after], "abort"
    size = len(token_ids)
    spans = [{"version": version, "start": 0, "end": size}]
    if fault and kind == "version_label":
        spans[0]["version"] = fault.label
    if fault and kind == "version_change" and fault.after < size:
        spans = [
            {"version": version, "start": 0, "end": fault.after},
            {"version": fault.label, "start": fault.after, "end": size},
        ]
    if kind in ("nan_logprobs", "null_logprobs"):
        logprobs = [-9999.0 if kind == "nan_logprobs" else None] * size  # type: ignore[list-item]
    return {
        "index": index,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "token_ids": token_ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None if kind == "no_versions" else spans if size else [],
        "logprobs": None if kind == "no_logprobs" else {"content": _content(token_ids, logprobs, masks)},
    }


def answer(
    request_id: str,
    choices: list[dict[str, Any]],
    prompt_size: int,
    prompt_logprobs: list[dict[str, Any] | None] | None = None,
) -> dict[str, Any]:
    sampled = sum(len(choice["token_ids"]) for choice in choices)
    return {
        "request_id": f"generate-tokens-{request_id}",
        "model": "policy",
        "created": int(time.time()),
        "usage": {"prompt_tokens": prompt_size, "total_tokens": prompt_size + sampled, "completion_tokens": sampled},
        "prompt_logprobs": prompt_logprobs,
        "prompt_token_ids": None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "output_mode": "tokens",
        "choices": choices,
    }


def chunks(request_id: str, whole: dict[str, Any], interval: int) -> list[bytes]:
    """The events that stream a choice: its first token, then every `interval` tokens, versions with the last."""
    size = len(whole["token_ids"])
    ends = [*range(1, size, interval), size]
    content = whole["logprobs"]["content"] if whole["logprobs"] else None
    events = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        last = end == size
        part = {
            **whole,
            "token_ids": whole["token_ids"][start:end],
            "logprobs": None if content is None else {"content": content[start:end]},
            "finish_reason": whole["finish_reason"] if last else None,
            "weight_versions": whole["weight_versions"] if last else None,
        }
        events.append(event({"request_id": f"generate-tokens-{request_id}", "usage": None, "choices": [part]}))
    return events


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def completion(
    prompt: list[int], prompt_logprobs: list[dict[str, Any] | None] | None, sample: Sample | None = None
) -> dict[str, Any]:
    """`/v1/completions`, with what a teacher-forced scoring reads, or a client that asks for the sampled ids."""
    return {
        "id": "cmpl-fake",
        "object": "text_completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "text": "",
                "logprobs": None if sample is None else {"token_logprobs": sample.logprobs},
                "finish_reason": "length" if sample is None else sample.finish_reason,
                "stop_reason": None,
                "token_ids": None if sample is None else sample.token_ids,
                "prompt_logprobs": prompt_logprobs,
                "prompt_token_ids": None,
            }
        ],
        "usage": {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + 1, "completion_tokens": 1},
    }


def _content(token_ids: list[int], logprobs: list[float], masks: bool) -> list[dict[str, Any]]:
    return [
        {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": _likely(token, logprob, masks)}
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]


def _likely(token: int, logprob: float, masks: bool) -> list[dict[str, Any]]:
    likely = [(token, logprob)]
    if masks:  # vLLM writes -9999 for what cannot be sampled
        likely += [(token + 1, math.log1p(-math.exp(logprob))), (token + 2, -9999.0)]
    return [{"token_id": token, "logprob": logprob, "rank": rank} for rank, (token, logprob) in enumerate(likely, 1)]
