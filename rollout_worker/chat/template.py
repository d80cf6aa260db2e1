"""Between messages and token ids: the first prompt, what is appended after a turn, and a turn's text.

Only two things are ever tokenised: a prompt, and the suffix that a template puts between the end of a turn and the
next one (tool messages and the generation prompt). The suffix is found by rendering a dummy conversation, so that no
sampled token is rendered or tokenised again. That is sound only if a template leaves what came before as it is,
which is checked at the start.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file

from protocol.config import ConfigError
from rollout_worker import user_code

_USER = {"role": "user", "content": "dummy question"}
_TURN = "dummy turn"
_TOOL = "dummy result"

# Longer texts are tokenised in a thread; this much takes about 1 ms.
_INLINE_CHARACTERS = 2048


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder or hub name; raises `ConfigError`.

    Not AutoTokenizer: importing it imports torch, which costs a worker seconds and memory for nothing.
    """
    try:
        return PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:  # of many types, by what is missing or broken
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"model.path = {path}: no tokenizer.json could be loaded from it ({type(error).__name__}: {first}); save "
            f"the tokenizer there with tokenizer.save_pretrained"
        ) from error


def stop_ids(path: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids that end a turn: the tokenizer's and those of the model's generation_config.json. Raises `ConfigError`."""
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    found = cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    if found is not None:
        given = json.loads(Path(found).read_text(encoding="utf-8")).get("eos_token_id")
        ids.update(given if isinstance(given, list) else [] if given is None else [given])
    if not ids:
        raise ConfigError(
            f"model.path = {path}: neither tokenizer nor generation_config.json has an eos token; set one"
        )
    return sorted(ids)


class ChatFormat:
    """One model's chat template and tokenizer. Raises `ConfigError` for a template that cannot be appended to.

    tools: JSON schemas; name: where the template is from, for messages.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, stop_token_ids: list[int], tools: Sequence[dict[str, Any]], name: str
    ) -> None:
        self.stop_token_ids = stop_token_ids
        self._stops = frozenset(stop_token_ids)
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer  # __call__ would set truncation on it, which no two threads may
        self._backend.no_truncation()
        self._backend.no_padding()
        self._tools = list(tools) or None
        self._name = name
        self._end_of_turn = self._checked_end_of_turn() if tools else ""

    @classmethod
    def load(cls, path: str, tools: Sequence[dict[str, Any]]) -> ChatFormat:
        """That of a model folder or hub name, for a task with these tools; raises `ConfigError`."""
        tokenizer = load_tokenizer(path)
        return cls(tokenizer, stop_ids(path, tokenizer), tools, f"model.path = {path}")

    async def prompt_ids(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Ids of a first prompt: messages through the template, text as it is with the tokenizer's special tokens."""
        if isinstance(prompt, str):
            return await self._encode(prompt, add_special_tokens=True)
        return await self._encode(self._render(prompt))

    async def suffix_ids(self, tool_messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids between the end of a turn and the next: what the template makes of the tool messages."""
        return await self._encode(self._after_turn([_USER, _turn(_TURN), *tool_messages]))

    def text(self, token_ids: list[int]) -> str:
        """A turn's text without the token that ended it; other special tokens stay, as calls may be made of them."""
        ended = bool(token_ids) and token_ids[-1] in self._stops
        return self._backend.decode(  # type: ignore[no-any-return]
            token_ids[:-1] if ended else token_ids, skip_special_tokens=False
        )

    def _render(self, messages: Sequence[dict[str, Any]]) -> str:
        return self._tokenizer.apply_chat_template(  # type: ignore[no-any-return]
            list(messages), tools=self._tools, tokenize=False, add_generation_prompt=True
        )

    def _after_turn(self, messages: Sequence[dict[str, Any]]) -> str:
        text = self._render(messages)
        end = text.index(_TURN) + len(_TURN) + len(self._end_of_turn)
        return text[end:]

    async def _encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        if len(text) < _INLINE_CHARACTERS:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids  # type: ignore[no-any-return]
        # Of the backend's functions this one lets go of the interpreter lock; `encode` would stop the loop (F19).
        (encoding,) = await user_code.in_thread(
            self._backend.encode_batch_fast, input=[text], add_special_tokens=add_special_tokens
        )
        return encoding.ids  # type: ignore[no-any-return]

    def _checked_end_of_turn(self) -> str:
        """The template's text from the end of a turn's content to its stop token, found while checking that every
        rendering starts with the rendering of the conversation so far."""
        first, second = [_USER, _turn(_TURN), _tool(_TOOL)], [_turn("other turn"), _tool("other result")]
        try:
            prompt, once, twice = (self._render(m) for m in ([_USER], first, [*first, *second]))
        except TemplateError as error:
            raise self._unfit(f"it refuses a tool message ({error})") from None
        if not once.startswith(prompt + _TURN):
            raise self._unfit("it renders a turn otherwise than where it asks for one")
        rest = once[len(prompt) + len(_TURN) :]
        stops = [self._tokenizer.convert_ids_to_tokens(stop) for stop in self.stop_token_ids]
        ends = [rest.index(stop) + len(stop) for stop in stops if stop and stop in rest]
        if not ends:
            raise self._unfit(f"it ends a turn with none of the stop tokens {stops}")
        if _TOOL not in rest[min(ends) :]:
            raise self._unfit("it leaves out tool messages")
        if not twice.startswith(once):
            raise self._unfit("it changes the earlier conversation when messages are added")
        return rest[: min(ends)]

    def _unfit(self, why: str) -> ConfigError:
        return ConfigError(
            f"the chat template of {self._name} cannot be used with tools: {why}; use a template that only ever "
            f"appends, or a task without tools"
        )


def _turn(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _tool(content: str) -> dict[str, str]:
    return {"role": "tool", "name": "dummy", "content": content}
