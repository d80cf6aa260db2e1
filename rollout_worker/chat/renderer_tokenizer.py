"""A transformers tokenizer as the `renderers` library wants one, without the detours of transformers' own calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Longer texts go through the one function of the backend that lets go of the interpreter lock; one of this length takes
# about 1 ms.
INLINE_CHARACTERS = 2048


class RendererTokenizer:
    """`renderers.base.Tokenizer` over a fast tokenizer's backend: a third of the time, and safe in several threads. A
    slow tokenizer is used as it is.

    name: the model's, by which some renderers tell variants of a family apart.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.name_or_path = name
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.chat_template = tokenizer.chat_template
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        if self._backend is None:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)  # type: ignore[no-any-return]
        if len(text) < INLINE_CHARACTERS:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids  # type: ignore[no-any-return]
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids  # type: ignore[no-any-return]

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        decoder = self._tokenizer if self._backend is None else self._backend
        return decoder.decode(ids, skip_special_tokens=skip_special_tokens)  # type: ignore[no-any-return]
