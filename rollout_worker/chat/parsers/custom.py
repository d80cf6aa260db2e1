"""Runs parsers from outside this package: the user's own function, or the tokenizer's own `response_template`.

Neither parser raises an ordinary exception. A turn that fails to parse becomes a turn with a malformed call.

The user names a function with `chat.parser = "path/to/file.py:function"`. It takes a turn's text, without the token
that ended it, and returns a `ParsedTurn` or a list of (name, arguments). It runs for each turn behind the boundary
around user code, with `worker.tool_timeout_s` as its time-out.

A `response_template` says how to read the turns of its model:
https://huggingface.co/docs/transformers/main/en/chat_response_parsing
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.parsers.base import (
    MAX_CALLS,
    REASONING_FIELDS,
    Before,
    Call,
    MalformedCall,
    ParsedTurn,
    ToolCall,
    call_of,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OwnParser:
    """Parses turns with the user's function.

    If the function raises, or returns something wrong, the policy gets a turn with a malformed call. The first failure
    is logged.

    Attributes:
        function: The user's function.
        origin: The value of `chat.parser`, for the log.
    """

    function: Callable[[str], Any]
    origin: str
    _told: bool = False

    def __call__(self, text: str, before: Before) -> ParsedTurn:
        try:
            return _turn_of_user_parser(text, self.function(text))
        except BaseException as error:  # SystemExit and the like in user code must not end the worker (I9)
            if not self._told:
                self._told = True
                logger.exception("chat.parser = %s failed on a turn; turns that it fails on are malformed", self.origin)
            return ParsedTurn(text, text, [MalformedCall(f"the turn cannot be read: {type(error).__name__}")])


def load_own(setting: str) -> OwnParser:
    """Load the function that `path/to/file.py:function` names.

    Returns:
        The parser around the function.

    Raises:
        ConfigError: There is no such file, it cannot be imported, or it defines no such function.
    """
    path, _, name = setting.rpartition(":")
    file = Path(path).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(f"slipstream_parser_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"chat.parser = {setting}: there is no Python file {file}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"chat.parser = {setting}: {file} cannot be imported: {type(error).__name__}: {error}; run it with python "
            f"to see where"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"chat.parser = {setting}: {file} defines no function {name!r}; define it there")
    return OwnParser(function, setting)


def plain_turn(turn: ParsedTurn) -> ParsedTurn:
    """Copy a turn into plain data, because the user's function may return objects of any kind.

    Exceptions of those objects propagate.
    """
    calls: list[ToolCall | MalformedCall] = []
    for call in turn.calls[:MAX_CALLS]:
        if isinstance(call, MalformedCall):
            calls.append(MalformedCall(_text(call.reason)))
            continue
        arguments = call.arguments
        if not isinstance(arguments, str):
            arguments = json.loads(json.dumps(arguments, default=str))
        calls.append(ToolCall(_text(call.name), arguments, None if call.id is None else _text(call.id)))
    reasoning = None if turn.reasoning is None else _text(turn.reasoning)
    return ParsedTurn(_text(turn.text), _text(turn.content), calls, reasoning)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a turn and its calls are of text, not {type(value).__name__}")
    return str.__str__(value)


def _turn_of_user_parser(text: str, found: Any) -> ParsedTurn:
    if isinstance(found, ParsedTurn):
        return found
    calls: list[ToolCall | MalformedCall] = []
    for name, arguments in found:
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            raise TypeError(f"a call is (name, arguments), not {(name, arguments)!r:.80}")
        calls.append(ToolCall(name, arguments))
    return ParsedTurn(text, "" if calls else text, calls)


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """Parses turns with the tokenizer's own response template.

    Attributes:
        tokenizer: A transformers tokenizer with a `response_template`.
        tools: JSON schemas of the tools. The template reads values by them.
        end: Text of the token that ends a turn. The template may ask for it.
    """

    tokenizer: Any
    tools: Sequence[dict[str, Any]]
    end: str

    def __call__(self, text: str, before: Before) -> ParsedTurn:
        try:
            parsed = self.tokenizer.parse_response(text + self.end, prefix=before.tail, tools=list(self.tools))
            turn = _turn_of_template(text, parsed)
        except Exception as error:  # the template's expressions may raise anything on sampled text
            first = str(error).strip().partition("\n")[0]
            return ParsedTurn(text, text, [MalformedCall(f"the turn cannot be read: {first[:200]}")])
        return turn


def _turn_of_template(text: str, parsed: Any) -> ParsedTurn:
    if not isinstance(parsed, Mapping):
        return ParsedTurn(text, text, [])
    calls = [_call(call) for call in parsed.get("tool_calls") or []]
    reasoning = next((parsed[name] for name in REASONING_FIELDS if parsed.get(name)), None)
    if not calls and reasoning is None:
        return ParsedTurn(text, text, [])
    content = parsed.get("content") or ""
    return ParsedTurn(text, content if isinstance(content, str) else str(content), calls, reasoning)


def _call(call: Any) -> Call:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    return call_of(function)
