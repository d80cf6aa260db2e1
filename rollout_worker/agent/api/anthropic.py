"""Answers Anthropic's messages (`/v1/messages`), whole or as events, and writes errors in that API's form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from slipstream.protocol.versions import SERVED_MODEL_NAME
from slipstream.rollout_worker.agent.api.anthropic_request import BlockReader, input_of, read_message_parameters
from slipstream.rollout_worker.agent.api.base import Answered, Finish, ReplyChoice, Request, event
from slipstream.rollout_worker.agent.api.messages import ApiError
from slipstream.rollout_worker.agent.api.request import Reading, as_object

# Clients send it back with the thinking; some leave out thinking without one. Nothing is signed here.
_SIGNATURE = "unsigned"

_STOPS: Mapping[Finish, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_ERROR_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


class AnthropicApi:
    """Anthropic's messages; see `Api`."""

    def read(self, body: Any, reading: Reading) -> Request:
        given, reader = as_object(body), BlockReader()
        reader.read(given.get("messages"))
        system = reader.system(given.get("system"))
        asked = read_message_parameters(given, reading, reader.faults)
        return Request(asked, [*system, *reader.messages], given)

    def whole(self, request: Request, answered: Answered) -> bytes:
        (choice,) = answered.choices
        return msgspec.json.encode(
            {
                **_begun(answered),
                "content": list(_blocks(choice)),
                **_ended(choice),
                "usage": {"input_tokens": answered.prompt_tokens, "output_tokens": choice.tokens},
            }
        )

    def events(self, request: Request, answered: Answered) -> Iterator[bytes]:
        (choice,) = answered.choices
        usage = {"input_tokens": answered.prompt_tokens, "output_tokens": 0}
        begun = {**_begun(answered), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=begun)
        for index, block in enumerate(_blocks(choice)):
            empty, deltas = block, list[dict[str, Any]]()
            if block["type"] == "thinking":
                empty = {**block, "thinking": "", "signature": ""}
                deltas.append({"type": "thinking_delta", "thinking": block["thinking"]})
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            elif block["type"] == "text":
                empty = {**block, "text": ""}
                deltas.append({"type": "text_delta", "text": block["text"]})
            else:
                empty = {**block, "input": {}}
                arguments = msgspec.json.encode(block["input"]).decode()
                deltas.append({"type": "input_json_delta", "partial_json": arguments})
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_ended(choice), usage={"output_tokens": choice.tokens})
        yield _event("message_stop")


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form. Its code and places are those of OpenAI's."""
    kind = _ERROR_KINDS.get(error.status, "invalid_request_error")
    told = {"type": kind, "message": str(error), "code": error.code, "params": error.params}
    return {"type": "error", "error": told, "request_id": None}


def _begun(answered: Answered) -> dict[str, Any]:
    return {"id": f"msg_{answered.name}", "type": "message", "role": "assistant", "model": SERVED_MODEL_NAME}


def _ended(choice: ReplyChoice) -> dict[str, Any]:
    if choice.stopped_at is not None and choice.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stopped_at}
    return {"stop_reason": _STOPS[choice.finish_reason], "stop_sequence": None}


def _blocks(choice: ReplyChoice) -> Iterator[dict[str, Any]]:
    """Yield the blocks of an answer: its thinking, its text, and its tool use."""
    reply = choice.reply
    if reply.reasoning is not None:
        yield {"type": "thinking", "thinking": reply.reasoning, "signature": _SIGNATURE}
    if reply.content:
        yield {"type": "text", "text": reply.content}
    for call in reply.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": input_of(call.arguments)}


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, named=True)
