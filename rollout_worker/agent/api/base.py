"""The interface of an API that agents' endpoints answer: one kind of request, and one kind of answer.

Each API reads its requests as messages and parameters of one conversation, so that what is sampled and recorded does
not depend on the API that asked for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from slipstream.rollout_worker.agent.api.messages import ChatMessage
from slipstream.rollout_worker.agent.api.request import Asked, Reading


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request.

    Attributes:
        asked: Its parameters.
        messages: The whole conversation.
        given: Its body, for an answer that repeats parts of it.
    """

    asked: Asked
    messages: Sequence[ChatMessage]
    given: Mapping[str, Any] = field(default_factory=dict)


Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ReplyChoice:
    """One answer to a request.

    Attributes:
        reply: The message.
        tokens: Number of sampled tokens.
        logprobs: Text and log-prob of each token; None where they were not asked for.
        stopped_at: The stop text of the request that ended it; None if none did.
    """

    reply: ChatMessage
    finish_reason: Finish
    tokens: int
    logprobs: Sequence[tuple[str, float]] | None = None
    stopped_at: str | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """The answers to a request.

    Attributes:
        name: Unique among all answers.
        created: Seconds since the epoch.
        temperature: The temperature that it was sampled at; `top_p` likewise.
        prompt_tokens: Tokens of the prompt.
    """

    name: str
    created: int
    temperature: float
    top_p: float
    choices: Sequence[ReplyChoice]
    prompt_tokens: int

    @property
    def sampled_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)


class Api(Protocol):
    """Reads requests and writes answers, for one episode."""

    def read(self, body: Any, reading: Reading) -> Request:
        """Read a body, decoded from JSON. It may run in a thread. Raises `ApiError`, which names all faults."""

    def whole(self, request: Request, answered: Answered) -> bytes:
        """Return the body of an answer."""

    def events(self, request: Request, answered: Answered) -> Iterator[bytes]:
        """Yield the server-sent events of a streamed answer, which is already whole."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that can be written in the API of its request."""

    api: Api
    request: Request
    answered: Answered

    @property
    def is_streamed(self) -> bool:
        return self.request.asked.stream

    def whole(self) -> bytes:
        return self.api.whole(self.request, self.answered)

    def events(self) -> bytes:
        return b"".join(self.api.events(self.request, self.answered))


def event(value: Mapping[str, Any], named: bool = False) -> bytes:
    """Return a server-sent event. `named`: whether its type stands before its data, too."""
    name = f"event: {value['type']}\n".encode() if named else b""
    return name + b"data: " + msgspec.json.encode(value) + b"\n\n"


def logprobs_of(choice: ReplyChoice) -> list[dict[str, Any]]:
    """Return the log-probs of a choice, as OpenAI's APIs write them."""
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace")), "top_logprobs": []}
        for token, logprob in choice.logprobs or ()
    ]
