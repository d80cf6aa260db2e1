"""Answers chat completions (`/v1/chat/completions`), whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from slipstream.protocol.versions import SERVED_MODEL_NAME
from slipstream.rollout_worker.agent.api.base import Answered, ReplyChoice, Request, event, logprobs_of
from slipstream.rollout_worker.agent.api.messages import Call, ChatReader
from slipstream.rollout_worker.agent.api.request import Reading, as_object, read_parameters


class ChatApi:
    """OpenAI's chat completions; see `Api`."""

    def read(self, body: Any, reading: Reading) -> Request:
        given, reader = as_object(body), ChatReader()
        reader.read(given.get("messages"))
        return Request(read_parameters(given, reading, reader.faults), reader.messages)

    def whole(self, request: Request, answered: Answered) -> bytes:
        choices = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": _logprobs(choice),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(answered.choices)
        ]
        return msgspec.json.encode(_object("chat.completion", answered, choices=choices, usage=_usage(answered)))

    def events(self, request: Request, answered: Answered) -> Iterator[bytes]:
        usage = {"usage": None} if request.asked.usage else {}
        chunk = "chat.completion.chunk"
        for index, choice in enumerate(answered.choices):
            for delta in _deltas(choice):
                part = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield event(_object(chunk, answered, choices=[part], **usage))
            last = {"index": index, "delta": {}, "logprobs": _logprobs(choice), "finish_reason": choice.finish_reason}
            yield event(_object(chunk, answered, choices=[last], **usage))
        if usage:
            yield event(_object(chunk, answered, choices=[], usage=_usage(answered)))
        yield b"data: [DONE]\n\n"


def _object(kind: str, answered: Answered, **fields: Any) -> dict[str, Any]:
    name = f"chatcmpl-{answered.name}"
    return {"id": name, "object": kind, "created": answered.created, "model": SERVED_MODEL_NAME, **fields}


def _usage(answered: Answered) -> dict[str, int]:
    prompt, sampled = answered.prompt_tokens, answered.sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _message(choice: ReplyChoice) -> dict[str, Any]:
    reply = choice.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    return message


def _deltas(choice: ReplyChoice) -> Iterator[dict[str, Any]]:
    reply = choice.reply
    yield {"role": "assistant", "content": "" if reply.content is not None else None}
    if reply.reasoning is not None:
        yield {"reasoning_content": reply.reasoning}
    if reply.content:
        yield {"content": reply.content}
    for place, call in enumerate(reply.calls):
        begun = {"index": place, **_call(Call(call.id, call.name, ""))}
        yield {"tool_calls": [begun]}
        yield {"tool_calls": [{"index": place, "function": {"arguments": call.arguments}}]}


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(choice: ReplyChoice) -> dict[str, Any] | None:
    return None if choice.logprobs is None else {"content": logprobs_of(choice), "refusal": None}
