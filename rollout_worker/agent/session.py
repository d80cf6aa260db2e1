"""One episode as its agent's requests make it: each is placed in the tree, sampled within the limits, and recorded."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from protocol import reasons
from protocol.config import RolloutSection
from protocol.figures import NEW_SEGMENTS, SERVER_MOVES
from protocol.messages import FinishReason, Rollout
from rollout_worker import user_code
from rollout_worker.agent import schemas
from rollout_worker.agent.deadline import Deadline
from rollout_worker.agent.errors import CONTEXT, SERVER, TURNS, ApiError, over
from rollout_worker.agent.formats import ChatFormats
from rollout_worker.agent.messages import Call, Said, read_messages
from rollout_worker.agent.parameters import Asked, read_parameters
from rollout_worker.agent.replies import Choice, Completion, arguments_text
from rollout_worker.agent.tree import Answer, GivenCall, Place, Tree, shown_to_policy
from rollout_worker.budget import TurnBudget
from rollout_worker.chat.base import ChatFormat, MalformedCall, Message, ParsedTurn, PromptError, ToolCall
from rollout_worker.episode import MOST_SEGMENTS, Episode, EpisodeRunner
from rollout_worker.inference.client import SERVED_MODEL_NAME
from rollout_worker.inference.errors import EpisodeFailed
from rollout_worker.inference.router import Affinity
from rollout_worker.inference.wire import Sampled
from rollout_worker.task.tools import MOST_COUNTED, ToolResult
from rollout_worker.task.tools.base import OTHER, UNKNOWN
from rollout_worker.tool_results import for_policy
from rollout_worker.user_code.texts import encodable

MODEL = SERVED_MODEL_NAME
# Larger bodies are read in a thread.
_INLINE_BYTES = 32 * 1024
_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Stage:
    """What all episodes share. `episodes` holds what samples, and the limits."""

    formats: ChatFormats
    episodes: EpisodeRunner
    rollout: RolloutSection


@dataclass(frozen=True, slots=True)
class _Context:
    """What a request is sampled after: all `ids`. suffix: those of them that come after the answer that it goes on
    from, None where the whole is a prompt of its own; shown: the messages that it adds, as the policy sees them."""

    ids: list[int]
    suffix: list[int] | None
    shown: list[Message]


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn, sampled and read. ended_as: the run's limit that cut it off, None if none did."""

    sampled: Sampled
    parsed: ParsedTurn
    ended_as: FinishReason | None


class Session:
    """One episode's side of the endpoint. `temperature`: the one that it is sampled at; `deadline`: its time-out.

    `failure`: why the last request could not be sampled, `ended_as`: the limit that the last request met; both None
    after an answer. Use it on one event loop.
    """

    def __init__(self, stage: Stage, affinity: Affinity, temperature: float, deadline: Deadline) -> None:
        self.turns = 0
        self.failure: EpisodeFailed | None = None
        self.ended_as: FinishReason | None = None
        self.temperature = temperature
        self._stage = stage
        self._affinity = affinity
        self._deadline = deadline
        self._tree = Tree()
        self._over = False
        self._requests: set[asyncio.Task[Any]] = set()
        self._sampled_tokens = 0
        # Sampled, whether or not the agent got it: what the limits count.
        self._spent_turns = self._spent_tokens = 0
        # Of requests that are being sampled: how many, and the tokens that they may come to.
        self._in_flight = self._reserved = 0
        self._changed = asyncio.Event()
        self._call_numbers = itertools.count()
        self._tool_calls = self._tool_failures = 0
        self._metrics: dict[str, float] = {}
        self._generate_s = self._busy_s = self._busy_since = 0.0

    async def answer(self, body: bytes) -> tuple[Asked, Completion]:
        """The answer to a request with this body, and what it asked for. Raises `ApiError`."""
        self._check_open()
        task = asyncio.create_task(self._answer(body))
        self._requests.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or not caller.cancelling():  # it is the episode that has ended
                raise over() from None
            raise
        finally:
            self._requests.discard(task)

    def end(self) -> None:
        """Nothing is answered from now on, and what runs is aborted."""
        self._over = True
        for task in self._requests:
            task.cancel()

    def episode(self, finish_reason: FinishReason, total_s: float) -> Episode:
        """What it has come to, with the conversation that the last answer stands in."""
        line = self._tree.last.line() if self._tree.last is not None else []
        timings = {
            "generate": self._generate_s,
            "agent": max(0.0, total_s - self._busy_s),
            "slots": self._deadline.paused_s,
            "total": total_s,
        }
        metrics = dict(self._metrics)
        if len(self._tree.drafts) > 1:
            metrics[NEW_SEGMENTS] = float(len(self._tree.drafts) - 1)
        if self._affinity.moves:
            metrics[SERVER_MOVES] = float(self._affinity.moves)
        if self._affinity.waited_s:
            timings["servers"] = self._affinity.waited_s
        rollout = Rollout(
            [],
            reward=math.nan,
            finish_reason=finish_reason,
            turns=self.turns,
            tool_calls=self._tool_calls,
            tool_failures=self._tool_failures,
            metrics=metrics,
            timings=timings,
        )
        messages = [message for answer in line for message in (*answer.shown, answer.message)]
        begins = len(line[0].shown) if line else 0
        return Episode(
            self._tree.drafts,
            rollout,
            self._affinity,
            messages[begins:],
            line[-1].text if line else "",
            self._sampled_tokens,
            prompt=messages[:begins],
        )

    def _check_open(self) -> None:
        if self._over:
            raise over()

    async def _answer(self, body: bytes) -> tuple[Asked, Completion]:
        if len(body) < _INLINE_BYTES:
            asked, said = self._read(body)
        else:
            asked, said = await user_code.in_thread(self._read, body=body)
        key = schemas.digest(asked.tools)
        chat = await self._stage.formats.of(asked.tools, key)
        place = self._tree.place(key, said)
        if place.before is not None:
            place.before.claims += 1
        try:
            context = await self._context(chat, place)
            turns = await self._turns(chat, place, context, asked)
            choices = [self._recorded(chat, place, context, asked, turn) for turn in turns]
        finally:
            if place.before is not None:
                place.before.claims -= 1
        name = f"chatcmpl-{secrets.token_hex(12)}"
        return asked, Completion(name, int(time.time()), MODEL, choices, len(context.ids))

    def _read(self, body: bytes) -> tuple[Asked, list[Said]]:
        try:
            asked = read_parameters(msgspec.json.decode(body), MODEL, self._stage.rollout, self.temperature)
            return asked, read_messages(asked.messages)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ApiError(400, f"the body is not JSON that can be read: {error}", "invalid_body") from None
        except (RecursionError, OverflowError) as error:
            raise ApiError(400, f"the body is nested too deeply, or holds a number too large: {error}") from None

    async def _context(self, chat: ChatFormat, place: Place) -> _Context:
        shown = await self._shown(chat, place)
        before = place.before
        if before is not None and place.appends:
            suffix = await chat.suffix_ids(before.prompt_ids, before.turn_ids, shown)
            if suffix is not None:
                return _Context(before.context + suffix, suffix, shown)
        conversation = [*(before.conversation() if before is not None else ()), *shown]
        try:
            return _Context(await chat.prompt_ids(conversation), None, shown)
        except PromptError as error:
            raise ApiError(400, f"messages: they cannot be rendered: {error}", "invalid_value", ["messages"]) from None

    async def _shown(self, chat: ChatFormat, place: Place) -> list[Message]:
        """The messages that a request adds; what tools answered is cut, and speaks as no other."""
        shown = []
        limit = self._stage.episodes.limits.tool_result_tokens
        for said, message in shown_to_policy(place.before, place.rest):
            if said.role == "tool":
                result = ToolResult(message["name"], message["content"], call_id=message.get("tool_call_id"))
                (read,) = await for_policy([result], limit, chat)
                message = dict(read.message())
                if read.defused:
                    self._stage.episodes.tell_of_defused(read.name, self._counted_as(read.name))
            shown.append(message)
        return shown

    async def _turns(self, chat: ChatFormat, place: Place, context: _Context, asked: Asked) -> list[_Turn]:
        """As many as were asked for, or none: what an agent does not get is not recorded."""
        if asked.n == 1:
            return [await self._turn(chat, place, context, asked)]
        try:
            async with asyncio.TaskGroup() as tasks:
                runs = [tasks.create_task(self._turn(chat, place, context, asked)) for _ in range(asked.n)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [run.result() for run in runs]

    async def _turn(self, chat: ChatFormat, place: Place, context: _Context, asked: Asked) -> _Turn:
        episodes = self._stage.episodes
        budget = await self._budget(place, context, asked)
        tokens = budget.tokens if asked.max_tokens is None else min(budget.tokens, asked.max_tokens)
        if not self._in_flight:
            self._busy_since = episodes.clock()
        self._in_flight += 1
        self._reserved += tokens
        try:
            async with self._slot():
                began = episodes.clock()
                sampled = await episodes.sampler.sample(
                    self._affinity, context.ids, tokens, None, self.temperature, asked.stop
                )
                self._generate_s += episodes.clock() - began
            self._spent_turns += 1
            self._spent_tokens += len(sampled.token_ids)
        except EpisodeFailed as failure:
            self.failure = failure
            raise ApiError(503, f"the answer could not be sampled: {failure}", failure.reason, kind=SERVER) from None
        finally:
            self._in_flight -= 1
            self._reserved -= tokens
            if not self._in_flight:
                self._busy_s += episodes.clock() - self._busy_since
            self._changed.set()
        await episodes.turnstile.passed()
        parsed = await episodes.parsed(chat, context.ids, sampled.token_ids)
        cut = sampled.finish_reason == "length" and tokens == budget.tokens
        return _Turn(sampled, parsed, budget.ends_as if cut else None)

    async def _budget(self, place: Place, context: _Context, asked: Asked) -> TurnBudget:
        """What an answer may sample. Where others that are sampled now may use it up, it waits for them. Raises
        `ApiError` at a limit."""
        limits, size = self._stage.episodes.limits, len(context.ids)
        while True:
            if self._spent_turns + self._in_flight >= limits.max_turns:
                self.ended_as = "turn_limit"
                text = f"the episode has had its {limits.max_turns} answers (rollout.max_turns)"
                raise ApiError(400, text, TURNS)
            if self._no_more_segments(place, context):
                self.ended_as = "turn_limit"
                text = f"the episode has {MOST_SEGMENTS} conversations, the most that are kept; go on from an answer"
                raise ApiError(400, text, TURNS, ["messages"])
            budget = limits.turn(self._spent_tokens, size)
            if budget.tokens <= 0:
                raise self._no_room(budget, size)
            beside = limits.turn(self._spent_tokens + self._reserved, size)
            if beside.tokens >= min(budget.tokens, asked.max_tokens or budget.tokens):
                return budget
            self._changed.clear()
            await self._changed.wait()

    def _no_more_segments(self, place: Place, context: _Context) -> bool:
        """Every answer that is on its way may begin a segment."""
        on_their_way = self._spent_turns - self.turns + self._in_flight
        if len(self._tree.drafts) + on_their_way < MOST_SEGMENTS:
            return False
        return bool(on_their_way) or context.suffix is None or place.before is None or not place.before.is_last

    def _no_room(self, budget: TurnBudget, size: int) -> ApiError:
        self.ended_as = budget.ends_as
        limits = self._stage.episodes.limits
        if budget.ends_as == "context":
            text = (
                f"This model's maximum context length is {limits.max_model_len} tokens (vllm.max_model_len), and the "
                f"messages with their tools have {size}: shorten them"
            )
        else:
            text = f"the episode has sampled its {limits.max_episode_tokens} tokens (rollout.max_episode_tokens)"
        return ApiError(400, text, CONTEXT, ["messages"])

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            with self._deadline.paused():
                await stack.enter_async_context(self._stage.episodes.capacity.turn(begun=self.turns > 0))
            yield

    def _recorded(self, chat: ChatFormat, place: Place, context: _Context, asked: Asked, turn: _Turn) -> Choice:
        sampled, parsed = turn.sampled, turn.parsed
        if context.suffix is None or place.before is None:
            answer = self._tree.begin(place.before, context.ids, sampled, context.shown, parsed)
        else:
            answer = self._tree.append(place.before, context.suffix, sampled, context.shown, parsed)
        tokens = len(sampled.token_ids)
        self.turns += 1
        self._sampled_tokens += tokens
        self.failure, self.ended_as = None, turn.ended_as
        self._count(parsed, {tool["function"]["name"] for tool in asked.tools})
        said = self._given_out(answer, place.key, parsed, asked.stop)
        logprobs = None
        if asked.logprobs:
            texts = [encodable(chat.tokenizer.decode([token])) for token in sampled.token_ids]
            logprobs = list(zip(texts, sampled.logprobs, strict=True))
        cut = sampled.finish_reason == "length"
        return Choice(said, "length" if cut else "tool_calls" if said.calls else "stop", tokens, logprobs)

    def _given_out(self, answer: Answer, key: bytes, parsed: ParsedTurn, stop: Sequence[str]) -> Said:
        """The answer as the agent gets it: its calls have ids, and of a text that ended it nothing is left."""
        calls, given = [], []
        for call in parsed.calls:
            if isinstance(call, ToolCall):
                own = None if call.id is None else encodable(call.id)
                name = encodable(call.name)
                id = own or f"call{next(self._call_numbers):05d}"  # nine letters and digits, as Mistral's templates ask
                calls.append(Call(id, name, encodable(arguments_text(call.arguments))))
                given.append(GivenCall(id, name, own))
        content = encodable(parsed.content)
        ends = [place for text in stop if (place := content.find(text)) >= 0]
        content = content[: min(ends, default=len(content))]
        reasoning = None if parsed.reasoning is None else encodable(parsed.reasoning)
        said = Said("assistant", None if calls and not content else content, tuple(calls), reasoning=reasoning)
        self._tree.remember(answer, key, said, tuple(given))
        return said

    def _count(self, parsed: ParsedTurn, known: set[str]) -> None:
        """The calls as the policy wrote them: whether the agent's tools did their work, only the agent knows."""
        for call in parsed.calls:
            reason = None
            if isinstance(call, MalformedCall):
                name, reason = UNKNOWN, reasons.TOOL_MALFORMED
            elif call.name not in known:
                name, reason = UNKNOWN, reasons.TOOL_UNKNOWN
            else:
                name = self._counted_as(call.name)
            self._tool_calls += 1
            self._tool_failures += reason is not None
            counts = {f"tools/{name}/calls": 1, f"tools/{name}/failures": int(reason is not None)}
            if reason is not None:
                counts[f"tools/{name}/failures/{reason}"] = 1
            for figure, count in counts.items():
                self._metrics[figure] = self._metrics.get(figure, 0.0) + count

    def _counted_as(self, name: str) -> str:
        """So many tools are counted by name, all others together."""
        name = name[:_NAME_CHARACTERS]
        counted = sum(figure.endswith("/calls") for figure in self._metrics)
        return name if f"tools/{name}/calls" in self._metrics or counted < MOST_COUNTED else OTHER
