"""Chat formats for the tools that requests name: built and proven once for each set of tools, and kept while used."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from jsonschema import SchemaError

from protocol.config import ConfigError
from rollout_worker import user_code
from rollout_worker.agent.messages import ApiError
from rollout_worker.agent.request import schemas_digest
from rollout_worker.chat.base import ChatFormat
from rollout_worker.chat.format_check import check_answer_format
from rollout_worker.chat.parsers.base import Message
from rollout_worker.tools.arguments import Parameters

# Sets of tools; one holds its schemas and what a template makes of them, as the tokenizer is shared.
MAX_KEPT = 64
# Prompts that are kept for each, as ids, and the tokens of one.
_KEPT_PROMPTS, _KEPT_TOKENS = 64, 16_384

Build = Callable[[Sequence[dict[str, Any]]], ChatFormat]


@dataclass(frozen=True, slots=True)
class Proven:
    """A chat format for one set of tools, and the tools' parameters by name. appends_users: what it would append after
    a turn that a user's message follows is what it would write in a whole conversation, as far as it knows it."""

    chat: ChatFormat
    parameters: Mapping[str, Parameters]
    appends_users: bool
    _prompts: OrderedDict[bytes, list[int]] = field(default_factory=OrderedDict)

    async def prompt_ids(self, conversation: Sequence[Message], comes_again: bool) -> list[int]:
        """See `ChatFormat`; comes_again: the same may be asked for again, and is kept. Raises `PromptError`."""
        if not comes_again:
            return await self.chat.prompt_ids(conversation)
        # Of all that is rendered: the prompts are those of every episode of the worker.
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
    """`plain`: the format without tools; `build` makes one for schemas, in a thread; it raises `ConfigError`."""

    def __init__(self, plain: ChatFormat, build: Build) -> None:
        self._plain = plain
        self._build = build
        self._one_at_a_time = asyncio.Lock()
        # What could not be built is kept too: the text says why.
        self._kept: OrderedDict[bytes, Proven | str] = OrderedDict()

    async def of(self, tools: Sequence[dict[str, Any]], key: bytes | None = None) -> Proven:
        """The format for these tools; `key`: their digest. Raises `ApiError` where the model cannot be shown them."""
        key = key or schemas_digest(tools)
        found = self._kept.get(key)
        if found is None:
            async with self._one_at_a_time:
                found = self._kept.get(key)
                if found is None:
                    found = self._kept[key] = await user_code.in_thread(self._built, tools=tools)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        if isinstance(found, str):
            raise ApiError(400, f"tools: the model cannot be shown these: {found}", "invalid_tools", ["tools"])
        return found

    def _built(self, tools: Sequence[dict[str, Any]]) -> Proven | str:
        try:
            functions = [tool["function"] for tool in tools]
            parameters = {each["name"]: Parameters(each["parameters"], strict=False) for each in functions}
            chat = self._build(tools) if tools else self._plain
            return Proven(chat, parameters, asyncio.run(check_answer_format(chat)).appended is not False)
        except SchemaError as error:
            return f"a tool's parameters are not a JSON schema: {error.message}"[:500]
        except ConfigError as error:
            return str(error)
        except Exception as error:  # of many types: schemas are the agent's, and templates meet them
            return f"{type(error).__name__}: {error}"[:500]
