"""The tokenizer's own chat template, with Hermes tool calls.

Only two things are tokenised: a prompt, and the suffix that the template puts between the end of a turn and the next
one. The suffix is found by rendering a dummy conversation, so that no sampled token is rendered or tokenised again.
That is sound only if the template leaves what came before as it is, which is checked at the start.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file

from protocol.config import ConfigError, RunConfig
from rollout_worker import user_code
from rollout_worker.chat.base import Message, ParsedTurn, PromptError
from rollout_worker.chat.parsers import hermes

_USER = {"role": "user", "content": "dummy question"}
_TURN = {"role": "assistant", "content": "dummy turn"}
_TOOL = {"role": "tool", "name": "dummy", "content": "dummy result"}

_NO_TEMPLATE = (
    "the tokenizer has no chat template, which messages and tools need; save one with it (tokenizer.chat_template), "
    "or use a model that is made for chat"
)

# Longer texts are tokenised in a thread; one of this length takes about 1 ms.
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
            f"model.path = {path}: neither the tokenizer nor generation_config.json has an eos token; set one"
        )
    return sorted(ids)


class TemplateFormat:
    """One model's chat template and tokenizer. Raises `ConfigError` for a template that cannot be appended to.

    tools: JSON schemas; origin: where the template is from, for messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        stop_token_ids: list[int],
        tools: Sequence[dict[str, Any]],
        origin: str,
    ) -> None:
        self.stop_token_ids = stop_token_ids
        self._stops = frozenset(stop_token_ids)
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer  # __call__ would set truncation on it, which no two threads may
        self._backend.no_truncation()
        self._backend.no_padding()
        self._tools = list(tools) or None
        self._origin = origin
        if tools and not tokenizer.chat_template:
            raise ConfigError(f"{origin}: {_NO_TEMPLATE}")
        self._end_of_turn = self._checked_end_of_turn() if tools else ""

    @classmethod
    def load(cls, config: RunConfig, tools: Sequence[dict[str, Any]]) -> TemplateFormat:
        """That of the run's model, for tools with these schemas; raises `ConfigError`."""
        path = config.model.path
        tokenizer = load_tokenizer(path)
        return cls(tokenizer, stop_ids(path, tokenizer), tools, f"model.path = {path}")

    async def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """Messages through the template; text as it is, with the tokenizer's special tokens."""
        try:
            if isinstance(prompt, str):
                return await self._encode(prompt, add_special_tokens=True)
            if not self.tokenizer.chat_template:
                raise PromptError(_NO_TEMPLATE)
            return await self._encode(self._render(prompt))
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise PromptError(repr(error)) from error

    async def render_ids(self, messages: Sequence[Message], generation_prompt: bool) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=self._tools, tokenize=False, add_generation_prompt=generation_prompt
        )
        return await self._encode(text)

    async def suffix_ids(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message]
    ) -> list[int]:
        """What the template makes of the messages. After a turn that a stop string ended, it begins with the end of
        turn that was not sampled."""
        text = self._render([_USER, _TURN, *messages])
        said = text.index(_TURN["content"]) + len(_TURN["content"])
        ended = bool(turn_ids) and turn_ids[-1] in self._stops
        return await self._encode(text[said + len(self._end_of_turn) if ended else said :])

    def parse(self, prompt_ids: Sequence[int], turn_ids: Sequence[int]) -> ParsedTurn:
        """Special tokens stay in the text, apart from the one that ended the turn: calls may be made of them."""
        ended = bool(turn_ids) and turn_ids[-1] in self._stops
        text: str = self._backend.decode(turn_ids[:-1] if ended else turn_ids, skip_special_tokens=False)
        return hermes.parse(text) if self._tools else ParsedTurn(text, text, [])

    def _render(self, messages: Sequence[Message]) -> str:
        return self.tokenizer.apply_chat_template(  # type: ignore[no-any-return]
            list(messages), tools=self._tools, tokenize=False, add_generation_prompt=True
        )

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
        more = [{**_TURN, "content": "other turn"}, {**_TOOL, "content": "other result"}]
        try:
            prompt, once, twice = (
                self._render(messages) for messages in ([_USER], [_USER, _TURN, _TOOL], [_USER, _TURN, _TOOL, *more])
            )
        except TemplateError as error:
            raise self._unfit(f"it refuses a tool message ({error})") from None
        if not once.startswith(prompt + _TURN["content"]):
            raise self._unfit("it renders a turn differently from what it asks for")
        rest = once[len(prompt) + len(_TURN["content"]) :]
        stops = [self.tokenizer.convert_ids_to_tokens(stop) for stop in self.stop_token_ids]
        ends = [rest.index(stop) + len(stop) for stop in stops if stop and stop in rest]
        if not ends:
            raise self._unfit(f"it ends a turn with none of the stop tokens {stops}")
        if _TOOL["content"] not in rest[min(ends) :]:
            raise self._unfit("it leaves out tool messages")
        if not twice.startswith(once):
            raise self._unfit("it changes the earlier conversation when messages are added")
        return rest[: min(ends)]

    def _unfit(self, why: str) -> ConfigError:
        return ConfigError(
            f"the chat template of {self._origin} cannot be used with tools: {why}; use a template that only ever "
            f"appends, or a task without tools"
        )
