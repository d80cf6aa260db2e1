"""Answers as OpenAI's API has them: whole, or in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rollout_worker.agent.messages import Call, Said

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a request: `said` to the agent; tokens: how many were sampled; logprobs: the text of each with its
    log-prob, None where they were not asked for."""

    said: Said
    finish_reason: Finish
    tokens: int
    logprobs: Sequence[tuple[str, float]] | None = None

    def message(self) -> dict[str, Any]:
        said = self.said
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.reasoning is not None:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [_call(call) for call in said.calls]
        return message


@dataclass(frozen=True, slots=True)
class Completion:
    """The answers to a request. `created`: seconds since the epoch; `prompt_tokens`: of the longest prompt."""

    id: str
    created: int
    model: str
    choices: Sequence[Choice]
    prompt_tokens: int

    def whole(self) -> bytes:
        choices = [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": _logprobs(choice),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self.choices)
        ]
        return msgspec.json.encode(self._object("chat.completion", choices=choices, usage=self._usage()))

    def chunks(self, usage: bool) -> Iterator[bytes]:
        """Server-sent events; `usage`: with one that tells of it before the end."""
        for index, choice in enumerate(self.choices):
            for delta in _deltas(choice):
                yield self._event(usage, [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            last = {"index": index, "delta": {}, "logprobs": _logprobs(choice), "finish_reason": choice.finish_reason}
            yield self._event(usage, [last])
        if usage:
            yield _event(self._object("chat.completion.chunk", choices=[], usage=self._usage()))
        yield b"data: [DONE]\n\n"

    def _event(self, usage: bool, choices: list[dict[str, Any]]) -> bytes:
        return _event(self._object("chat.completion.chunk", choices=choices, **({"usage": None} if usage else {})))

    def _object(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **fields}

    def _usage(self) -> dict[str, int]:
        sampled = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }


def _deltas(choice: Choice) -> Iterator[dict[str, Any]]:
    said = choice.said
    yield {"role": "assistant", "content": "" if said.content is not None else None}
    if said.reasoning is not None:
        yield {"reasoning_content": said.reasoning}
    if said.content:
        yield {"content": said.content}
    for place, call in enumerate(said.calls):
        begun = {"index": place, **_call(Call(call.id, call.name, ""))}
        yield {"tool_calls": [begun]}
        yield {"tool_calls": [{"index": place, "function": {"arguments": call.arguments}}]}


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    content = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace")), "top_logprobs": []}
        for token, logprob in choice.logprobs
    ]
    return {"content": content, "refusal": None}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
