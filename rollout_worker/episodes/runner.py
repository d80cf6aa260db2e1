"""Runs one episode: turns of the policy and its tools, tokens in and tokens out.

A turn enters the episode only when it is fully sampled, together with the tool messages before it, so an episode that
ends early holds nothing that the policy did not see. The request of turn k + 1 has the ids of turn k's request, the ids
sampled for it, and the suffix with the tool messages: nothing else, and nothing twice (I4). Where the chat format knows
no such suffix, turn k + 1 opens a new segment: its prompt is the whole conversation rendered again, and the turns
before stay in their segment as they were sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from slipstream.protocol import reasons, tracing
from slipstream.protocol.messages import FinishReason, Rollout
from slipstream.protocol.rollouts import SERVER_MOVES, TOOLS_OFFERED
from slipstream.rollout_worker import user_code
from slipstream.rollout_worker.chat.base import ChatFormat, PromptError
from slipstream.rollout_worker.chat.parsers.base import MalformedCall, Message, ParsedTurn
from slipstream.rollout_worker.chat.parsers.custom import plain_turn
from slipstream.rollout_worker.episodes.capacity import Capacity, LoopYield
from slipstream.rollout_worker.episodes.episode import Episode, EpisodeSetup, Opening, whole_conversation
from slipstream.rollout_worker.episodes.limits import Deadline, EpisodeLimits, size_fault
from slipstream.rollout_worker.episodes.tool_results import describe_defused, for_policy
from slipstream.rollout_worker.inference.engine import Sampled
from slipstream.rollout_worker.inference.experts import known_until
from slipstream.rollout_worker.inference.failures import EpisodeFailed, FailureNotices
from slipstream.rollout_worker.inference.router import Affinity
from slipstream.rollout_worker.inference.sampler import Sampler
from slipstream.rollout_worker.task.turn_rewards import rewarding
from slipstream.rollout_worker.tools.base import ToolResult, count_call
from slipstream.rollout_worker.vision.messages import Placed, images_of, placed
from slipstream.rollout_worker.vision.processor import Seen

# The queue takes no more for one rollout.
MAX_SEGMENTS = 1024

# Turns of more tokens are parsed in a thread: parsing them would block the loop.
_INLINE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class _Next:
    """The ids before the next turn: the segment so far and `suffix`, or the prompt of a new segment. `images`: those of
    the one or the other."""

    suffix: list[int] = field(default_factory=list)
    prompt: list[int] | None = None
    images: Sequence[Seen] = ()

    def placed(self, episode: Episode) -> list[Placed]:
        """Return the images in these ids, by their places in the segment."""
        if self.prompt is None:
            return placed(self.suffix, self.images, len(episode.ids))
        return placed(self.prompt, self.images)

    def shown(self, episode: Episode) -> list[Placed]:
        """Return all images that the turn sees."""
        return [*(episode.images if self.prompt is None else ()), *self.placed(episode)]

    def prompt_ids(self, episode: Episode) -> list[int]:
        return episode.ids + self.suffix if self.prompt is None else self.prompt


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """Runs episodes, and holds no state of any of them.

    Attributes:
        timeout_s: Seconds of an episode, without its waits for slots.
        clock: Seconds, monotonic.
        notices: Failures for people to read; the worker's.
        parse_timeout_s: Seconds for a turn that the user's own parser reads.
        failures: Counts by reason; the worker's.
    """

    sampler: Sampler
    limits: EpisodeLimits
    timeout_s: float
    capacity: Capacity
    clock: Callable[[], float] = time.monotonic
    notices: FailureNotices = field(default_factory=FailureNotices)
    code: user_code.UserCode = field(default_factory=user_code.UserCode)
    parse_timeout_s: float = 60.0
    failures: Counter[str] = field(default_factory=Counter)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    loop_yield: LoopYield = field(default_factory=LoopYield)

    async def run(self, setup: EpisodeSetup, affinity: Affinity, first: Opening | None = None) -> Episode:
        """Run an episode from its prompt to its end.

        Args:
            first: Its first turn, if that is sampled with the group's; it has a slot.

        Raises:
            EpisodeFailed: It cannot continue, or its time-out came before its first turn was done.
        """
        episode = Episode.begin(setup, affinity)
        deadline = Deadline(self.timeout_s)
        try:
            with self._timed(episode, "total"):
                async with deadline.limit:
                    episode.rollout.finish_reason = await self._turns(episode, setup, affinity, first, deadline)
        except TimeoutError:
            if not episode.rollout.turns:
                detail = f"no turn was done in {self.timeout_s:g} s"
                raise EpisodeFailed(reasons.TIMEOUT, detail, retryable=True) from None
            episode.rollout.finish_reason = "timeout"
        finally:
            self.sampler.pool.release([affinity])
        if setup.tools.schemas:
            episode.rollout.metrics[TOOLS_OFFERED] = float(len(setup.tools.schemas))
        if affinity.moves:
            episode.rollout.metrics[SERVER_MOVES] = float(affinity.moves)
        if affinity.waited_s:
            episode.rollout.timings["servers"] = affinity.waited_s
        if deadline.paused_s:
            episode.rollout.timings["slots"] = deadline.paused_s
        return episode

    async def _turns(
        self, episode: Episode, setup: EpisodeSetup, affinity: Affinity, first: Opening | None, deadline: Deadline
    ) -> FinishReason:
        rollout, chat = episode.rollout, setup.chat
        following: _Next | None = _Next()
        answers: list[Message] = []
        while following is not None:
            prompt_ids = following.prompt_ids(episode)
            budget = self.limits.turn(episode.sampled_tokens, len(prompt_ids))
            if budget.tokens <= 0 or len(following.shown(episode)) > self.limits.max_images:
                return budget.ends_as if budget.tokens <= 0 else "context"
            async with self._slot(episode, first, deadline):
                with self._timed(episode, "generate"), tracing.span("generate", kind="client") as span:
                    pending = None if first is None else first.pending
                    known = 0 if following.prompt is not None else known_until(episode.drafts[-1].experts)
                    seen = following.shown(episode)
                    turn = await self.sampler.sample(
                        affinity, prompt_ids, budget.tokens, pending, setup.own, known, seen
                    )
                    note_turn(span, rollout.turns + 1, turn)
            first = None
            await self.loop_yield.passed()
            parsed = await self.parsed(chat, prompt_ids, turn.token_ids)
            # Nothing is awaited from here to the messages: an episode has as many turns as messages of them.
            if following.prompt is not None:
                episode.open_segment(following.prompt, following.placed(episode))
                episode.add_turn([], turn)
            else:
                episode.add_turn(following.suffix, turn, following.placed(episode))
            episode.text = parsed.text
            episode.messages += [*answers, parsed.message()]
            newest = rollout.turns - 1
            episode.turn_of[len(episode.messages) - 1] = newest
            if turn.finish_reason == "length":
                return budget.ends_as
            ended: FinishReason | None = None
            if rollout.turns >= self.limits.max_turns:
                ended = "turn_limit"
            elif (left := self.limits.turn(episode.sampled_tokens, len(episode.ids))).tokens <= 0:
                ended = left.ends_as
            if parsed.calls:
                if ended is not None:
                    return ended
                with (
                    self._timed(episode, "tools"),
                    self.capacity.being("tools"),
                    tracing.span("tools", calls=len(parsed.calls)) as span,
                    rewarding({"": episode.turn_rewards}, newest),
                ):
                    results = await setup.tools.run(parsed.calls)
                    span.set(failures=sum(result.failed for result in results))
                    results = await for_policy(results, self.limits.tool_result_tokens, chat)
                    await self.loop_yield.passed()
                self._count(results, rollout)
                answers = [result.message() for result in results]
            else:
                with rewarding({"": episode.turn_rewards}, newest):
                    given = await setup.respond(episode.messages) if setup.respond is not None else None
                if given is None:
                    return "stop"
                if ended is not None:
                    return ended
                answers = given
            if len(episode.images) + len(images_of(answers)) > self.limits.max_images:
                return "context"
            if size_fault(answers, self.limits.max_model_len):
                return "context"
            suffix = await chat.suffix_ids(prompt_ids, turn.token_ids, answers)
            if suffix is not None:
                following = _Next(suffix, images=images_of(answers))
            else:
                following = await self._anew(episode, setup, answers)
        return "aborted"

    @asynccontextmanager
    async def _slot(self, episode: Episode, first: Opening | None, deadline: Deadline) -> AsyncIterator[None]:
        """Hold a slot while a turn is sampled. A first turn that is sampled with its group's has one from the ticket's
        reservation."""
        if first is None:
            async with deadline.slot(self.capacity, begun=episode.rollout.turns > 0):
                yield
            return
        try:
            yield
        finally:
            first.reservation.give()

    async def _anew(self, episode: Episode, setup: EpisodeSetup, answers: Sequence[Message]) -> _Next | None:
        """Render the whole conversation as the prompt of a new segment. Returns None where it cannot be rendered."""
        prompt = setup.prompt
        if isinstance(prompt, str):
            why = "its prompt is text, and no messages that could be rendered again"
        elif len(episode.drafts) == MAX_SEGMENTS:
            why = f"it has {MAX_SEGMENTS} segments, the most that a rollout may have"
        else:
            try:
                messages = whole_conversation(prompt, [*episode.messages, *answers])
                return _Next(prompt=await setup.chat.prompt_ids(messages), images=images_of(messages))
            except PromptError as error:
                why = f"its conversation cannot be rendered: {error}"
        detail = f"an episode ended early: the chat format cannot tell what follows a turn, and {why}"
        self.notices.add("episode", "segment", detail)
        return None

    async def parsed(self, chat: ChatFormat, prompt_ids: list[int], turn_ids: list[int]) -> ParsedTurn:
        """Parse a turn; a long one in a thread, as it would block the loop, and with user code where the format has
        it."""
        if chat.parses_by_user_code:
            return await self._parsed_by_user_code(chat, prompt_ids, turn_ids)
        if len(turn_ids) < _INLINE_TOKENS:
            return chat.parse(prompt_ids, turn_ids)
        parsed: ParsedTurn = await asyncio.to_thread(chat.parse, prompt_ids=prompt_ids, turn_ids=turn_ids)
        return parsed

    async def _parsed_by_user_code(self, chat: ChatFormat, prompt_ids: list[int], turn_ids: list[int]) -> ParsedTurn:
        try:
            found: ParsedTurn = await self.code.call(
                chat.parse,
                plain_turn,
                self.parse_timeout_s,
                user_code.Kind.CHAT,
                prompt_ids=prompt_ids,
                turn_ids=turn_ids,
            )
            return found
        except user_code.UserCodeError as error:
            self.notices.add("code", f"parser {error.kind}", f"the parser of turns failed: {error}", error.where)
            text = chat.tokenizer.decode(turn_ids, skip_special_tokens=False)
            return ParsedTurn(text, text, [MalformedCall(f"the turn cannot be read: {error.kind}")])

    def _count(self, results: Sequence[ToolResult], rollout: Rollout) -> None:
        """Count calls and failures in all, by tool and by reason. Errors of the tools' own code become notices."""
        rollout.tool_calls += len(results)
        for result in results:
            count_call(rollout.metrics, result.counted_as, result.reason, result.coerced, result.seconds)
            rollout.tool_failures += result.failed
            if result.defused:
                self.tell_of_defused(result.name, result.counted_as)
            if (error := result.error) is not None:
                self.notices.add("tool", f"{result.name} {error.kind}", f"tool {result.name}: {error}", error.where)

    def tell_of_defused(self, name: str, counted_as: str) -> None:
        """Add a notice about special tokens in a tool's answers, once for each tool."""
        self.notices.add("tool", f"{counted_as} special tokens", describe_defused(f"tool {name}"))

    @contextmanager
    def _timed(self, episode: Episode, what: str) -> Iterator[None]:
        started = self.clock()
        try:
            yield
        finally:
            episode.rollout.timings[what] += self.clock() - started


def note_turn(span: tracing.Span, number: int, turn: Sampled) -> None:
    """Describe a turn in its trace. `number`: of the turn in its episode, from 1."""
    last = turn.spans[-1] if turn.spans else None
    if span.is_recording and last is not None:
        span.set(turn=number, tokens=len(turn.token_ids), server=last.server, version=last.version)
