"""Chat formats for the tools that requests name: built and checked once for each set of tools, and kept while used."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from jsonschema import SchemaError

from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.agent.api.messages import ApiError
from slipstream.rollout_worker.agent.api.request import schemas_digest
from slipstream.rollout_worker.agent.forced_calls import Frame, frame_of
from slipstream.rollout_worker.chat.base import ChatFormat
from slipstream.rollout_worker.chat.format_check import check_answer_format
from slipstream.rollout_worker.chat.parsers.base import Message
from slipstream.rollout_worker.tools.arguments import Parameters

# Maximum sets of tools. Each holds its schemas and their rendering; the tokenizer is shared.
MAX_KEPT = 64
# Maximum prompts that are kept for each set, as ids, and maximum tokens of one.
_KEPT_PROMPTS, _KEPT_TOKENS = 64, 16_384

Build = Callable[[Sequence[dict[str, Any]]], ChatFormat]


@dataclass(frozen=True, slots=True)
class Proven:
    """A checked chat format for one set of tools.

    Attributes:
        parameters: The tools' parameters, by name.
        frames: The texts around a call's arguments, by the tool's name; without those whose format has none.
        appends_users: Whether a user's message may be appended to a turn: as far as the check can tell, the format
            writes the same there as in a whole conversation.
    """

    chat: ChatFormat
    parameters: Mapping[str, Parameters]
    appends_users: bool
    frames: Mapping[str, Frame]
    _prompts: OrderedDict[bytes, list[int]] = field(default_factory=OrderedDict)

    async def prompt_ids(self, conversation: Sequence[Message], comes_again: bool) -> list[int]:
        """Render a prompt, as a `ChatFormat` does. `comes_again`: keep it, as it may be asked for again. Raises
        `PromptError`."""
        if not comes_again:
            return await self.chat.prompt_ids(conversation)
        # The key covers all that is rendered: prompts of every episode of the worker are kept here.
        key = hashlib.blake2b(msgspec.json.encode(conversation), digest_size=16).digest()
        found = self._prompts.get(key)
        if found is None:
            found = await self.chat.prompt_ids(conversation)
            if len(found) <= _KEPT_TOKENS:
                self._prompts[key] = found
            while len(self._prompts) > _KEPT_PROMPTS:
                self._prompts.popitem(last=False)
        return list(found)


class ChatFormats:
    """Builds and keeps chat formats.

    Args:
        plain: The format without tools.
        build: Builds a format for schemas; it is called in a thread and may raise `ConfigError`.
        forces_calls: Whether answers may be held to calls (`rollout.top_k`).
    """

    def __init__(self, plain: ChatFormat, build: Build, forces_calls: bool = False) -> None:
        self._forces_calls = forces_calls
        self._plain = plain
        self._build = build
        self._one_at_a_time = asyncio.Lock()
        self._appends: dict[bool, bool] = {}
        # If no format can be built for a set of tools, the text of the error is kept in its place.
        self._kept: OrderedDict[bytes, Proven | str] = OrderedDict()

    async def of(self, tools: Sequence[dict[str, Any]], key: bytes | None = None) -> Proven:
        """Return the format for these tools. `key`: their digest. Raises `ApiError` where the model cannot be shown
        them."""
        key = key or schemas_digest(tools)
        found = self._kept.get(key)
        if found is None:
            async with self._one_at_a_time:
                found = self._kept.get(key)
                if found is None:
                    found = self._kept[key] = await asyncio.to_thread(self._built, tools=tools)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        if isinstance(found, str):
            raise ApiError(400, f"tools: the model cannot be shown these: {found}", "invalid_tools", ["tools"])
        return found

    async def _frames(self, chat: ChatFormat, names: Sequence[str]) -> dict[str, Frame]:
        if not self._forces_calls or chat.parses_by_user_code:
            return {}
        found = {name: await frame_of(chat, name) for name in names}
        return {name: frame for name, frame in found.items() if frame is not None}

    def _built(self, tools: Sequence[dict[str, Any]]) -> Proven | str:
        try:
            functions = [tool["function"] for tool in tools]
            parameters = {each["name"]: Parameters(each["parameters"], strict=False) for each in functions}
            chat = self._build(tools) if tools else self._plain
            if bool(tools) not in self._appends:  # the same for all tools
                self._appends[bool(tools)] = asyncio.run(check_answer_format(chat)).appended is not False
            appends = self._appends[bool(tools)]
            return Proven(chat, parameters, appends, asyncio.run(self._frames(chat, list(parameters))))
        except SchemaError as error:
            return f"a tool's parameters are not a JSON schema: {error.message}"[:500]
        except ConfigError as error:
            return str(error)
        except Exception as error:  # of many types: schemas are the agent's, and templates meet them
            return f"{type(error).__name__}: {error}"[:500]
