"""Answers OpenAI's responses (`/v1/responses`), whole or as events, and keeps an episode's to continue from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from slipstream.protocol.versions import SERVED_MODEL_NAME
from slipstream.rollout_worker.agent.api.base import (
    Answered,
    ReplyChoice,
    Request,
    event,
    logprobs_of,
)
from slipstream.rollout_worker.agent.api.messages import ChatMessage, Faults
from slipstream.rollout_worker.agent.api.request import Reading, as_object
from slipstream.rollout_worker.agent.api.responses_request import InputReader, instructions_of, read_response_parameters
from slipstream.rollout_worker.tools.argument_text import short

# Fields of a request that its answer repeats, and their defaults.
_REPEATED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "text": {"format": {"type": "text"}},
    "tools": [],
    "truncation": "disabled",
    "user": None,
}


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the conversation of a response adds to that of the response before it; instructions are not kept."""

    before: _Kept | None
    added: tuple[ChatMessage, ...]

    def conversation(self) -> list[ChatMessage]:
        found: list[tuple[ChatMessage, ...]] = []
        kept: _Kept | None = self
        while kept is not None:
            found.append(kept.added)
            kept = kept.before
        return [message for added in reversed(found) for message in added]


class ResponsesApi:
    """The responses of one episode; see `Api`. Those that a request stores are kept until the episode ends."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        # Items of the kept responses, by their ids.
        self._items: dict[str, Mapping[str, Any]] = {}

    def read(self, body: Any, reading: Reading) -> Request:
        given = as_object(body)
        reader = InputReader(self._items)
        earlier = self._before(given, reader.faults)
        reader.read(given.get("input"))
        system = instructions_of(given, reader.faults)
        reader.check_order("call_id", earlier)
        asked = read_response_parameters(given, reading, reader.faults)
        return Request(asked, [*system, *earlier, *reader.messages], given)

    def whole(self, request: Request, answered: Answered) -> bytes:
        return msgspec.json.encode(self._response(request, answered))

    def events(self, request: Request, answered: Answered) -> Iterator[bytes]:
        response = self._response(request, answered)
        begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        numbers = itertools.count()

        def told(kind: str, **fields: Any) -> bytes:
            return event({"type": f"response.{kind}", "sequence_number": next(numbers), **fields}, named=True)

        yield told("created", response=begun)
        yield told("in_progress", response=begun)
        for place, item in enumerate(response["output"]):
            for kind, fields in _item_events(item):
                yield told(kind, output_index=place, **fields)
        yield told(response["status"], response=response)

    def _before(self, given: Mapping[str, Any], faults: Faults) -> list[ChatMessage]:
        """Return the conversation that a request continues from."""
        id = given.get("previous_response_id")
        if id is None:
            return []
        found = self._kept.get(id) if isinstance(id, str) else None
        if found is None:
            text = f"{short(id)}: this episode has stored no such response; give the whole input, or store = true"
            faults.add("previous_response_id", text, "previous_response_not_found")
            return []
        return found.conversation()

    def _response(self, request: Request, answered: Answered) -> dict[str, Any]:
        """Return the body of an answer, and keep it where the request stores it."""
        given, (choice,) = request.given, answered.choices
        is_cut = choice.finish_reason == "length"
        prompt, sampled = answered.prompt_tokens, choice.tokens
        response = {
            "id": f"resp_{answered.name}",
            "object": "response",
            "created_at": answered.created,
            "status": "incomplete" if is_cut else "completed",
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": SERVED_MODEL_NAME,
            "output": list(_items(choice, answered.name)),
            **{name: given.get(name, default) for name, default in _REPEATED.items()},
            "temperature": answered.temperature,
            "tool_choice": "auto" if "tool_choice" in request.asked.unenforced else given.get("tool_choice", "auto"),
            "top_p": answered.top_p,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
        }
        if given.get("store", True):
            self._keep(request, choice, response)
        return response

    def _keep(self, request: Request, choice: ReplyChoice, response: dict[str, Any]) -> None:
        given = request.given
        before = self._kept.get(given.get("previous_response_id", ""))
        earlier = 0 if before is None else len(before.conversation())
        begins = earlier + (given.get("instructions") is not None)
        added = (*request.messages[begins:], choice.reply)
        self._kept[response["id"]] = _Kept(before, added)
        self._items |= {item["id"]: item for item in response["output"]}


def _items(choice: ReplyChoice, name: str) -> Iterator[dict[str, Any]]:
    """Yield the items of an answer: its reasoning, its text, and its calls."""
    reply, status = choice.reply, "incomplete" if choice.finish_reason == "length" else "completed"
    if reply.reasoning is not None:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        yield {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content, "status": status}
    if reply.content is not None:
        text: dict[str, Any] = {"type": "output_text", "text": reply.content, "annotations": []}
        if choice.logprobs is not None:
            text["logprobs"] = logprobs_of(choice)
        yield {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [text]}
    for number, call in enumerate(reply.calls):
        yield {
            "id": f"fc_{name}_{number}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": status,
        }


def _item_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kinds and the fields of the events of one item."""
    of: dict[str, Any] = {"item_id": item["id"]}
    if item["type"] == "function_call":
        yield "output_item.added", {"item": {**item, "status": "in_progress", "arguments": ""}}
        yield "function_call_arguments.delta", {**of, "delta": item["arguments"]}
        yield "function_call_arguments.done", {**of, "arguments": item["arguments"]}
    else:
        yield "output_item.added", {"item": {**item, "status": "in_progress", "content": []}}
        kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        for place, part in enumerate(item["content"]):
            at = {**of, "content_index": place}
            of_tokens = [{**each} for each in part.get("logprobs", [])]
            for each in of_tokens:
                del each["bytes"]  # which events do not have
            logprobs = {} if kind == "reasoning_text" else {"logprobs": of_tokens}
            yield "content_part.added", {**at, "part": {**part, "text": ""}}
            if part["text"]:
                yield f"{kind}.delta", {**at, "delta": part["text"], **logprobs}
            yield f"{kind}.done", {**at, "text": part["text"], **logprobs}
            yield "content_part.done", {**at, "part": part}
    yield "output_item.done", {"item": item}
