"""Turns a sampled turn into the message that an agent gets, and counts its calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from slipstream.protocol import reasons
from slipstream.rollout_worker.agent.api.messages import Call, ChatMessage
from slipstream.rollout_worker.agent.tree import GivenCall
from slipstream.rollout_worker.chat.parsers.base import MalformedCall, ParsedTurn, ToolCall
from slipstream.rollout_worker.tools.arguments import Parameters
from slipstream.rollout_worker.tools.base import NAME_CHARACTERS, UNKNOWN, ArgumentsError, count_call, counted_as
from slipstream.rollout_worker.user_code.values import encodable


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A call, and its arguments as the text that agents read.

    Attributes:
        coerced: Whether the arguments were converted to fit the tool's schema, as some notations write every value as
            text.
    """

    call: ToolCall | MalformedCall
    arguments: str = ""
    coerced: bool = False


async def read_calls(parsed: ParsedTurn, parameters: Mapping[str, Parameters]) -> list[ReadCall]:
    """Read the calls of a turn. Arguments that do not fit stay as the policy wrote them, for the agent to check.

    Args:
        parameters: Parameters of the known tools, by name.
    """
    return [
        await _read(call, parameters.get(call.name)) if isinstance(call, ToolCall) else ReadCall(call)
        for call in parsed.calls
    ]


async def _read(call: ToolCall, parameters: Parameters | None) -> ReadCall:
    given, coerced = call.arguments, False
    if parameters is not None:
        try:
            found = await parameters.fitted(given, call.as_text)
            given, coerced = (found.values, True) if found.repairs else (given, False)
        except ArgumentsError:
            given = call.arguments
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return ReadCall(call, encodable(text), coerced)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first of the texts that end an answer."""
    end = first_stop(text, stop)
    return text if end is None else text[: text.find(end)]


def first_stop(text: str, stop: Sequence[str]) -> str | None:
    """Return the text that ended an answer; None if none did."""
    return min((end for end in stop if end in text), key=text.find, default=None)


class Outgoing:
    """Makes one episode's answers and counts their calls. Only the agent knows whether a tool did its work.

    Attributes:
        calls: Number of tool calls that the policy wrote.
        failures: Number of those that cannot be read or name no tool.
        metrics: The same by tool and reason, as in a `Rollout`.
    """

    def __init__(self) -> None:
        self.calls = self.failures = 0
        self.metrics: dict[str, float] = {}

    def given(
        self, parsed: ParsedTurn, read: Sequence[ReadCall], stop: Sequence[str]
    ) -> tuple[ChatMessage, tuple[GivenCall, ...]]:
        """Return the turn as its agent gets it: each call has an id, and the stop text that ended it is left out."""
        calls, given = [], []
        for each in read:
            if isinstance(call := each.call, ToolCall):
                own = None if call.id is None else encodable(call.id)
                name = encodable(call.name)
                # As OpenAI's, since some clients rewrite any other. Where templates show ids, notations have their own.
                id = own or f"call_{secrets.token_hex(12)}"
                calls.append(Call(id, name, each.arguments))
                given.append(GivenCall(id, name, own))
        content = before_stop(encodable(parsed.content), stop)
        reasoning = None if parsed.reasoning is None else encodable(parsed.reasoning)
        reply = ChatMessage("assistant", None if calls and not content else content, tuple(calls), reasoning=reasoning)
        return reply, tuple(given)

    def count(self, read: Sequence[ReadCall], known: Collection[str]) -> None:
        """Count the calls of a turn. `known`: names of the tools."""
        for each in read:
            call, reason = each.call, None
            if isinstance(call, MalformedCall):
                name, reason = UNKNOWN, reasons.TOOL_MALFORMED
            elif call.name not in known:
                name, reason = UNKNOWN, reasons.TOOL_UNKNOWN
            else:
                name = self.counted_as(call.name)
            self.calls += 1
            self.failures += reason is not None
            count_call(self.metrics, name, reason, each.coerced)

    def counted_as(self, name: str) -> str:
        """Return the name that a tool is counted under: its own for the first tools, then a common one."""
        known = f"tools/{name[:NAME_CHARACTERS]}/calls" in self.metrics
        return counted_as(name, 0 if known else sum(metric.endswith("/calls") for metric in self.metrics))
