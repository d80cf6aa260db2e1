"""`chat.system_prompt`: a system message before conversations that have none, for any chat format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_worker.chat.base import ChatFormat, Message, ParsedTurn

_SYSTEM_ROLES = ("system", "developer")


class WithSystemPrompt:
    """A chat format whose conversations begin with a system message of this text; a prompt that is text is left as it
    is."""

    def __init__(self, chat: ChatFormat, text: str) -> None:
        self._chat = chat
        self._message = {"role": "system", "content": text}

    @property
    def tokenizer(self) -> Any:
        return self._chat.tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        return self._chat.stop_token_ids

    @property
    def parses_by_user_code(self) -> bool:
        return self._chat.parses_by_user_code

    async def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        return await self._chat.prompt_ids(self.shown(prompt))

    def shown(self, prompt: str | Sequence[Message]) -> str | Sequence[Message]:
        return self._chat.shown(prompt if isinstance(prompt, str) else self._whole(prompt))

    async def render_ids(self, messages: Sequence[Message], generation_prompt: bool) -> list[int]:
        return await self._chat.render_ids(self._whole(messages), generation_prompt)

    async def suffix_ids(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        return await self._chat.suffix_ids(prompt_ids, turn_ids, messages)

    def parse(self, prompt_ids: Sequence[int], turn_ids: Sequence[int]) -> ParsedTurn:
        return self._chat.parse(prompt_ids, turn_ids)

    def _whole(self, messages: Sequence[Message]) -> Sequence[Message]:
        first = messages[0] if messages else None
        has_one = isinstance(first, Mapping) and first.get("role") in _SYSTEM_ROLES
        return messages if has_one else [self._message, *messages]
