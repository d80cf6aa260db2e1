"""Stands in for openai_harmony's encoder, which fetches its vocabulary.

It writes the same message frames over any tokenizer: https://cookbook.openai.com/articles/openai-harmony. The real
encoder has its own notation for a tool's schema; here it is JSON.
"""

from __future__ import annotations

import json
from typing import Any

from openai_harmony import Conversation, Message, Role, TextContent


class StandInHarmony:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, message: Message) -> list[int]:
        author = message.author
        header = author.name or author.role.value
        if message.recipient is not None:
            header += f" to={message.recipient}"
        if message.channel is not None:
            header += f"<|channel|>{message.channel}"
        body = "".join(
            part.text if isinstance(part, TextContent) else json.dumps(part.to_dict()) for part in message.content
        )
        calls = author.role is Role.ASSISTANT and message.recipient is not None
        return self._encode(f"<|start|>{header}<|message|>{body}{'<|call|>' if calls else '<|end|>'}")

    def render_conversation(self, conversation: Conversation) -> list[int]:
        return [token for message in conversation.messages for token in self.render(message)]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]
