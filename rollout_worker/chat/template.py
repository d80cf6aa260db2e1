"""Uses the tokenizer's own chat template, or a file's, as a chat format, with a parser of tool calls.

It tokenises only two things: a prompt, and the text that the template puts between the end of a turn and the next
turn. It finds that text in a made-up conversation, so it never renders or tokenises a sampled token again. Templates
that drop reasoning would change earlier text. Then there is no such suffix, and a new segment opens.

`check_variables` finds the variables that a template reads, so that a misspelt key of `chat.chat_template_kwargs` is
an error and not ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser as JinjaParser

from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.config.checks import RESERVED
from slipstream.rollout_worker.chat import template_analysis
from slipstream.rollout_worker.chat.base import PromptError, checked, text_of
from slipstream.rollout_worker.chat.parser_choice import choose_parser
from slipstream.rollout_worker.chat.parsers import Before, Parser, Scan
from slipstream.rollout_worker.chat.parsers.base import Message, ParsedTurn, ToolCall
from slipstream.rollout_worker.chat.prompt_tools import NOTATION, PromptTools
from slipstream.rollout_worker.chat.shown_messages import TRIED_TOOL, ShownMessages
from slipstream.rollout_worker.chat.shown_tools import shown_tools
from slipstream.rollout_worker.chat.template_analysis import Rendering, call_id
from slipstream.rollout_worker.chat.tokenizer import Codec, load_tokenizer, stop_ids
from slipstream.rollout_worker.vision.messages import expanded, images_of, placeholder_text
from slipstream.rollout_worker.vision.processor import ImageProcessor, processor_of
from slipstream.rollout_worker.vision.sources import ImageError

# Functions that transformers gives to templates.
_FUNCTIONS = {"raise_exception", "strftime_now"}

_NO_TEMPLATE = (
    "the tokenizer has no chat template, which messages and tools need; name a file with chat.template, save one with "
    "the tokenizer (tokenizer.chat_template), or use a model that is made for chat"
)

_IN_PROMPT = 'set chat.tools = "prompt", which describes them in the system message, '

# A prompt may have written the start of a turn. The search looks at this many ids at its end first, to save decoding.
_TAIL_IDS = 32


def check_variables(variables: dict[str, Any], source: str | None, given: Iterable[str] = ()) -> None:
    """Check that the template reads every variable that the run file sets.

    Args:
        variables: `chat.chat_template_kwargs`.
        source: The template's source, or None if there is no template.
        given: Other names that rendering gives to a template, such as the special tokens. The error does not list
            them.

    Raises:
        ConfigError: The template does not read one of the variables.
    """
    if not variables or source is None:
        return
    try:
        read = read_by(source)
    except jinja2.TemplateSyntaxError:  # reported where the template is used
        return
    if unread := sorted(set(variables) - read):
        others = sorted(read - RESERVED - _FUNCTIONS - {"documents"} - set(given))
        raise ConfigError(
            f"chat.chat_template_kwargs: the template reads no variable {unread[0]!r}, so that setting it changes "
            f"nothing; it reads {', '.join(others) or 'none'}: correct the name, or leave it out"
        )


def read_by(source: str) -> set[str]:
    """Return the names that a template reads and may get from outside.

    Raises:
        jinja2.TemplateSyntaxError: The template has a syntax error.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _GenerationBlock])
    return find_undeclared_variables(environment.parse(source))


class _GenerationBlock(Extension):
    """Parses `{% generation %}`, with which transformers marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: JinjaParser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateFormat:
    """Combines one model's chat template, tokenizer and notation of calls.

    Args:
        tokenizer: A transformers tokenizer, with its chat template if it has one.
        stop_token_ids: Ids that end a turn.
        tools: JSON schemas of the tools.
        origin: The setting that the template is from, for error messages.
        in_prompt: Describe the tools in the system message (`chat.tools = "prompt"`).
        parser: `chat.parser`.
        variables: `chat.chat_template_kwargs`.
        images: Opens images; None for text alone.

    Raises:
        ConfigError: The template cannot be used with tools, it has a syntax error, or there is no such parser.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: list[int],
        tools: Sequence[dict[str, Any]],
        origin: str,
        *,
        in_prompt: bool = False,
        parser: str = "auto",
        variables: dict[str, Any] | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.images = images
        self.stop_token_ids = stop_token_ids
        self._codec = Codec(tokenizer)
        self._stops = frozenset(stop_token_ids)
        self._stop_texts = [text for text in map(tokenizer.convert_ids_to_tokens, stop_token_ids) if text]
        self._parser: Parser | None = None
        self.parses_by_user_code = bool(tools) and ".py:" in parser
        self._places: list[str] = []
        self._asks_for_ids = False
        self._around: re.Pattern[str] | None = None
        self.parser_name: str | None = None
        self._rendering = Rendering(tokenizer, list(tools) or None, variables or {})
        self._shown_messages = ShownMessages(self._tried)
        if not tokenizer.chat_template:
            if tools:
                raise ConfigError(f"{origin}: {_NO_TEMPLATE}")
            return
        _check_syntax(self._rendering, origin)
        self._rendering = template_analysis.taking_text(self._rendering)
        if in_prompt:
            way = PromptTools.of(partial(template_analysis.rendered, self._rendering.but(tools=None)))
            self._rendering = self._rendering.but(tools_as_text=way)
        if tools and in_prompt:
            parser = NOTATION if parser == "auto" else parser
        elif tools:
            self._rendering = self._rendering.but(tools=shown_tools(tools, self._tried_tools))
        try:
            if tools:
                self._rendering = template_analysis.checked_rendering(self._rendering, self._stop_texts)
            else:
                with suppress(template_analysis.Unfit):  # a conversation may hold calls of tools that the task has not
                    self._rendering = template_analysis.checked_rendering(self._rendering, self._stop_texts)
            self.reasoning = template_analysis.reasoning_of(self._rendering, with_calls=bool(tools))
            self._rendering = self._rendering.but(reasoning_field=self.reasoning.field)
            self._places = template_analysis.places_to_speak(self._rendering, self.reasoning.thought.opening)
            if tools:
                self._choose_parser(parser)
        except template_analysis.Unfit as unfit:
            raise ConfigError(
                f"the chat template of {origin} cannot be used with tools: {unfit}; "
                f"{'' if in_prompt else _IN_PROMPT}name one that can with chat.template = file.jinja, a renderer with "
                f"chat.renderer, or give a task without tools"
            ) from None
        self._following = self._rendering
        if tools and self._same_without_tools():
            self._following = self._rendering.but(tools=None)

    @classmethod
    def load(cls, config: RunConfig, tools: Sequence[dict[str, Any]], tokenizer: Any = None) -> TemplateFormat:
        """Build the format of the run's model.

        Args:
            config: The run's config.
            tools: JSON schemas of the tools.
            tokenizer: The run's tokenizer. It is loaded if not given.

        Returns:
            The format.

        Raises:
            ConfigError: A setting is wrong, or tokenizer or template cannot be loaded or used.
        """
        tokenizer = tokenizer or load_tokenizer(config.model)
        origin = f"model.path = {config.model.path}"
        if config.chat.template is not None:
            tokenizer.chat_template = _read(config.chat.template)
            origin = f"chat.template = {config.chat.template}"
        source = tokenizer.get_chat_template(tools=list(tools) or None) if tokenizer.chat_template else None
        check_variables(config.chat.chat_template_kwargs, source, tokenizer.special_tokens_map)
        return cls(
            tokenizer,
            stop_ids(config.model, tokenizer),
            tools,
            origin,
            in_prompt=config.chat.tools == "prompt",
            parser=config.chat.parser,
            variables=config.chat.chat_template_kwargs,
            images=processor_of(config),
        )

    async def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """Render messages with the template, or encode text as it is, with the tokenizer's special tokens."""
        if isinstance(prompt, str):
            return await self._codec.encode(prompt, special_tokens=True)
        messages = self._checked(prompt)
        if messages and messages[-1]["role"] == "assistant":
            if messages[-1].get("tool_calls"):
                raise PromptError("the conversation ends in tool calls that no tool message answers; add the answers")
            content = messages[-1].get("content")
            if images_of(messages[-1:]):
                raise PromptError(
                    "the conversation ends in an assistant's message with an image, and what the policy continues with "
                    "is text; show the image in a user's message"
                )
            if content if isinstance(content, str | None) else text_of(content):
                return await self._encoded(self._text(messages, continue_final_message=True), messages)
            messages.pop()  # nothing to continue
        return await self.render_ids(messages, generation_prompt=True)

    def shown(self, prompt: str | Sequence[Message]) -> str | Sequence[Message]:
        return prompt

    def changes(self) -> list[str]:
        return self._shown_messages.changes() if self.tokenizer.chat_template else []

    def shows_system(self) -> bool:
        return not self.tokenizer.chat_template or bool(self._shown_messages.shows_system())

    async def render_ids(self, messages: Sequence[Message], generation_prompt: bool) -> list[int]:
        return await self._encoded(self._text(self._checked(messages), generation_prompt), messages)

    async def suffix_ids(
        self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        """Return the ids that the template writes after a turn.

        They begin with the token that ends the turn if the turn was cut off before it.
        """
        if not self.tokenizer.chat_template or self._drops_reasoning(prompt_ids, turn_ids, messages):
            return None
        try:
            shown = self._shown_messages(messages, previous="assistant")
            following = template_analysis.following(self._following, self._stop_texts, shown)
            if following is None:
                return None
            ids = await self._encoded(following.text, messages)
        except PromptError:
            return None
        if not ids or ids[0] not in self._stops:
            return None
        return ids[1:] if turn_ids and turn_ids[-1] == ids[0] else ids

    def parse(self, prompt_ids: Sequence[int], turn_ids: Sequence[int]) -> ParsedTurn:
        """Parse a turn. Special tokens stay in its text, because calls may consist of them.

        Only the token that ended the turn is removed.
        """
        ended = bool(turn_ids) and turn_ids[-1] in self._stops
        text = self._codec.decode(turn_ids[:-1] if ended else turn_ids)
        if self._parser is None:
            return ParsedTurn(text, text, [])
        turn = self._parser(text, self._before(prompt_ids))
        if self._around is not None and turn.calls and all(isinstance(call, ToolCall) for call in turn.calls):
            turn = replace(turn, content=self._around.sub("", turn.content))
        return _with_ids(turn, len(prompt_ids)) if self._asks_for_ids and turn.calls else turn

    async def _encoded(self, text: str, messages: Sequence[Message]) -> list[int]:
        """Encode the text of messages, with the tokens of their images."""
        ids = await self._codec.encode(text)
        if self.images is None:
            return ids
        shown, most = images_of(messages), self.images.max_per_episode
        if len(shown) > most:
            raise PromptError(f"it shows {len(shown)} images, images.max_per_episode = {most}: show fewer, or raise it")
        written = str(self.tokenizer.decode([self.images.token_id]))
        if (where := placeholder_text(messages, written)) is not None:
            raise PromptError(f"the text of {where} holds {written}, where no image is: take it out of the text")
        try:
            return expanded(ids, shown, self.images.token_id)
        except ImageError as error:
            raise PromptError(str(error)) from None

    def _checked(self, messages: Sequence[Message]) -> list[Message]:
        source = str(self.tokenizer.chat_template or "")
        parts = ("text",) if self.images is None else ("text", "image")
        given = checked(messages, parts, knows=lambda role: f"'{role}'" in source or f'"{role}"' in source)
        return self._shown_messages(given) if source else given

    def _tried(self, messages: Sequence[Message]) -> str | None:
        """Render a made-up conversation; None if the template refuses it."""
        try:
            return self._rendering.but(tools=[TRIED_TOOL] if self._rendering.tools else None)(messages)
        except template_analysis.REFUSALS:
            return None

    def _tried_tools(self, tools: Sequence[dict[str, Any]]) -> str | None:
        """Render made-up tools; None if the template refuses them."""
        return template_analysis.rendered(self._rendering.but(tools=tools), [template_analysis.USER]) or None

    def _text(
        self, messages: Sequence[Message], generation_prompt: bool = True, continue_final_message: bool = False
    ) -> str:
        if not self.tokenizer.chat_template:
            raise PromptError(_NO_TEMPLATE)
        try:
            return self._rendering(messages, generation_prompt, continue_final_message)
        except template_analysis.REFUSALS as error:
            if any(message.get("tool_calls") for message in messages):
                with suppress(*template_analysis.REFUSALS):  # it may be their ids that the template refuses
                    return self._rendering.but(own_ids=True)(messages, generation_prompt, continue_final_message)
            is_of_type = isinstance(error, TypeError | jinja2.UndefinedError)
            raise PromptError((is_of_type and _unreadable_arguments(messages)) or repr(error)) from error

    def _before(self, prompt_ids: Sequence[int]) -> Before:
        tail = self._codec.decode(prompt_ids[-_TAIL_IDS:])
        at = self._speaks_from(tail)
        if at < 0 and len(prompt_ids) > _TAIL_IDS and self._places:  # a long prefill
            tail = self._codec.decode(prompt_ids)
            at = self._speaks_from(tail)
        return Before(tail, tail[at:] if at >= 0 else "")

    def _speaks_from(self, tail: str) -> int:
        return max((at + len(place) for place in self._places if (at := tail.rfind(place)) >= 0), default=-1)

    def _drops_reasoning(self, prompt_ids: Sequence[int], turn_ids: Sequence[int], messages: Sequence[Message]) -> bool:
        """Return whether the template would leave out sampled reasoning if these messages follow."""
        thought = self.reasoning.thought
        if not thought.separate:
            return False
        if all(message.get("role") == "tool" for message in messages):
            return not self.reasoning.in_cycle and self.parse(prompt_ids, turn_ids).reasoning is not None
        return not self.reasoning.across and self._thinks(prompt_ids, turn_ids)

    def _thinks(self, prompt_ids: Sequence[int], turn_ids: Sequence[int]) -> bool:
        """Return whether this turn or an earlier one has a thought that is not empty."""
        thought = self.reasoning.thought
        _, *parts = (self._codec.decode(prompt_ids) + self._codec.decode(turn_ids)).split(thought.opening)
        return any(part.partition(thought.closing)[0].strip() for part in parts)

    def _choose_parser(self, parser: str) -> None:
        ends = self._stop_texts[0] if self._stop_texts else ""
        choice = choose_parser(parser, self._rendering, self._stop_texts, self.reasoning.thought, ends)
        self._parser, self.parser_name = choice.parser, choice.name
        self._rendering = choice.rendering
        self._around = choice.around
        if isinstance(choice.parser, Scan):
            self.reasoning = replace(self.reasoning, thought=choice.parser.thought)
        self._asks_for_ids = choice.shows_ids

    def _same_without_tools(self) -> bool:
        """Return whether the template writes the same text after a turn when it does not get the tools.

        The tools are long, and the template would render them again for each turn.
        """
        messages = [{"role": "tool", "name": "tool", "content": "result", "tool_call_id": call_id(2)}]
        bare = self._rendering.but(tools=None)
        return all(
            template_analysis.following(bare, self._stop_texts, following)
            == template_analysis.following(self._rendering, self._stop_texts, following)
            for following in (messages, messages * 2, [template_analysis.USER])
        )


def _with_ids(turn: ParsedTurn, length: int) -> ParsedTurn:
    """Give each call without an id one that no earlier turn's calls have.

    Args:
        turn: The turn.
        length: Length of the prompt in tokens. It makes the ids unique.

    Returns:
        The turn with ids of nine digits.
    """
    calls = [
        replace(call, id=f"{length % 10_000_000:07d}{place % 100:02d}")
        if isinstance(call, ToolCall) and call.id is None
        else call
        for place, call in enumerate(turn.calls)
    ]
    return ParsedTurn(turn.text, turn.content, calls, turn.reasoning)


def _unreadable_arguments(messages: Sequence[Message]) -> str | None:
    """Return which call has arguments that templates for JSON objects cannot write; None if none has."""
    for number, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            function = call.get("function") or call
            given = function.get("arguments")
            given = template_analysis.as_object(given) if isinstance(given, str) else given
            if given is not None and not isinstance(given, Mapping):
                name = function.get("name")
                text = f"the arguments of {name!r:.80} are {given!r:.80}; give a JSON object"
                return f"message {number}: {text}"
    return None


def _read(file: Path) -> str:
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat.template = {file}: the template cannot be read ({error}); name a Jinja file") from None


def _check_syntax(rendering: Rendering, origin: str) -> None:
    try:
        rendering([template_analysis.USER])
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template of {origin} has a syntax error, line {error.lineno}: {error.message}; fix it there, "
            f"or name another with chat.template = file.jinja"
        ) from None
    except template_analysis.REFUSALS:
        return  # the template may refuse this conversation and still accept others
