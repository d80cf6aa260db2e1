"""One episode: turns of the policy and its tools, tokens in and tokens out.

A turn enters the episode whole, with the tool messages before it, once it is sampled; so whatever ends an episode
leaves only what the policy saw. The ids of turn k + 1's request are those of turn k's request, its sampled ids, and the
suffix with the tool messages: nothing else, and nothing twice (I4). Where the chat format knows no such suffix, turn
k + 1 opens a new segment: its prompt is the whole conversation rendered anew, and what was sampled before stays as it
was, in the segment before.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from protocol import reasons
from protocol.messages import FinishReason, Rollout, Segment
from protocol.rollouts import NEW_SEGMENTS, SERVER_MOVES
from rollout_worker import user_code
from rollout_worker.budget import Limits
from rollout_worker.chat.base import ChatFormat, MalformedCall, Message, ParsedTurn, PromptError
from rollout_worker.chat.parsers.custom import plain_turn
from rollout_worker.episodes.capacity import Capacity, Reservation
from rollout_worker.episodes.episode import SegmentDraft, whole_conversation
from rollout_worker.episodes.limits import Deadline
from rollout_worker.episodes.tool_results import for_policy, told_of_defused
from rollout_worker.inference.failures import EpisodeFailed
from rollout_worker.inference.router import Affinity
from rollout_worker.inference.sampler import PendingChoice, Sampler
from rollout_worker.inference.wire import Sampled, SampledSpan
from rollout_worker.scene import Scene
from rollout_worker.task.agent import AgentResult
from rollout_worker.task.environment import Instance
from rollout_worker.task.tools.counts import count_call
from rollout_worker.tools.base import ToolResult
from rollout_worker.troubles import Troubles
from rollout_worker.turnstile import Turnstile

# As many as the queue takes.
MOST_SEGMENTS = 1024

# Longer turns are read in a thread.
_INLINE_TOKENS = 256


@dataclass(slots=True)
class Episode:
    """What one episode has come to. `messages` are those after the prompt; `text`: the last turn's. `rollout` gets its
    segments when the group is put together, and its reward before that. `affinity`: what sampled it; `prompt`: what it
    began with; `environment`: that it was played in; `rewards`: those that it brings with it, by
    component; `result`: what its agent returned."""

    drafts: list[SegmentDraft]
    rollout: Rollout
    prompt: str | Sequence[Message]
    affinity: Affinity
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    sampled_tokens: int = 0
    environment: Instance | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    result: AgentResult | None = None

    @classmethod
    def begin(cls, scene: Scene, affinity: Affinity) -> Episode:
        timings = {"generate": 0.0, "tools": 0.0, "total": 0.0}
        rollout = Rollout([], reward=math.nan, finish_reason="stop", timings=timings)
        return cls([SegmentDraft(scene.prompt_ids)], rollout, scene.prompt, affinity)

    @property
    def ids(self) -> list[int]:
        """Of the segment that the episode is in."""
        return self.drafts[-1].ids

    @property
    def spans(self) -> list[SampledSpan]:
        """Of all segments, each counted from its own segment's start."""
        return [span for draft in self.drafts for span in draft.spans]

    @property
    def completion_ids(self) -> list[int]:
        """Everything after the first prompt, segment by segment: turns and the tool messages between them. The prompt
        of a later segment repeats the conversation, and is left out."""
        return [token for draft in self.drafts for token in draft.ids[draft.prompt_size :]]

    def add_turn(self, suffix: list[int], turn: Sampled) -> None:
        """Append the tool messages' ids and what was sampled after them."""
        self.drafts[-1].add(suffix, turn)
        self.sampled_tokens += len(turn.token_ids)
        self.rollout.turns += 1

    def open_segment(self, prompt_ids: list[int]) -> None:
        """What is sampled from here on is a new segment's."""
        self.drafts.append(SegmentDraft(prompt_ids))
        self.rollout.metrics[NEW_SEGMENTS] = self.rollout.metrics.get(NEW_SEGMENTS, 0.0) + 1.0

    def segments(self, server_names: Sequence[str]) -> list[Segment]:
        """The tokens so far; spans name their servers by place in `server_names`."""
        return [draft.segment(server_names) for draft in self.drafts]


@dataclass(frozen=True, slots=True)
class Opening:
    """The first turn of an episode, sampled with its group's, and the reservation that its slot is of."""

    pending: PendingChoice
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class _Next:
    """What the next turn is sampled after: the segment so far and `suffix`, or a new segment's `prompt`."""

    suffix: list[int] = field(default_factory=list)
    prompt: list[int] | None = None

    def prompt_ids(self, episode: Episode) -> list[int]:
        return episode.ids + self.suffix if self.prompt is None else self.prompt


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """Runs episodes; holds no state of any of them."""

    sampler: Sampler
    limits: Limits
    timeout_s: float
    capacity: Capacity
    clock: Callable[[], float] = time.monotonic
    troubles: Troubles = field(default_factory=Troubles)
    code: user_code.UserCode = field(default_factory=user_code.UserCode)
    parse_timeout_s: float = 60.0
    turnstile: Turnstile = field(default_factory=Turnstile)

    async def run(self, scene: Scene, affinity: Affinity, first: Opening | None = None) -> Episode:
        """An episode from its prompt to its end; `first`, if given, is its first turn, which has a slot. Raises
        `EpisodeFailed`."""
        episode = Episode.begin(scene, affinity)
        deadline = Deadline(self.timeout_s)
        try:
            with self._timed(episode, "total"):
                async with deadline.limit:
                    episode.rollout.finish_reason = await self._turns(episode, scene, affinity, first, deadline)
        except TimeoutError:
            if not episode.rollout.turns:
                detail = f"no turn was done in {self.timeout_s:g} s"
                raise EpisodeFailed(reasons.TIMEOUT, detail, retryable=True) from None
            episode.rollout.finish_reason = "timeout"
        finally:
            self.sampler.pool.release([affinity])
        if affinity.moves:
            episode.rollout.metrics[SERVER_MOVES] = float(affinity.moves)
        if affinity.waited_s:
            episode.rollout.timings["servers"] = affinity.waited_s
        if deadline.paused_s:
            episode.rollout.timings["slots"] = deadline.paused_s
        return episode

    async def _turns(
        self, episode: Episode, scene: Scene, affinity: Affinity, first: Opening | None, deadline: Deadline
    ) -> FinishReason:
        rollout, chat = episode.rollout, scene.chat
        following: _Next | None = _Next()
        answers: list[Message] = []
        while following is not None:
            prompt_ids = following.prompt_ids(episode)
            budget = self.limits.turn(episode.sampled_tokens, len(prompt_ids))
            if budget.tokens <= 0:
                return budget.ends_as
            async with self._slot(episode, first, deadline):
                with self._timed(episode, "generate"):
                    pending = None if first is None else first.pending
                    turn = await self.sampler.sample(affinity, prompt_ids, budget.tokens, pending, scene.own)
            first = None
            await self.turnstile.passed()
            if following.prompt is not None:
                episode.open_segment(following.prompt)
            episode.add_turn(following.suffix, turn)
            parsed = await self.parsed(chat, prompt_ids, turn.token_ids)
            episode.text = parsed.text
            episode.messages += [*answers, parsed.message()]
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
                with self._timed(episode, "tools"), self.capacity.being("tools"):
                    results = await scene.tools.run(parsed.calls)
                    results = await for_policy(results, self.limits.tool_result_tokens, chat)
                    await self.turnstile.passed()
                self._count(results, rollout)
                answers = [result.message() for result in results]
            else:
                said = await scene.respond(episode.messages) if scene.respond is not None else None
                if said is None:
                    return "stop"
                if ended is not None:
                    return ended
                answers = said
            suffix = await chat.suffix_ids(prompt_ids, turn.token_ids, answers)
            following = _Next(suffix) if suffix is not None else await self._anew(episode, scene, answers)
        return "aborted"

    @asynccontextmanager
    async def _slot(self, episode: Episode, first: Opening | None, deadline: Deadline) -> AsyncIterator[None]:
        """Held while a turn is sampled; a first turn of the group's has it from its ticket's reservation."""
        if first is None:
            async with deadline.slot(self.capacity, begun=episode.rollout.turns > 0):
                yield
            return
        try:
            yield
        finally:
            first.reservation.give()

    async def _anew(self, episode: Episode, scene: Scene, answers: Sequence[Message]) -> _Next | None:
        """A new segment's prompt: the whole conversation, rendered. None where that cannot be had."""
        prompt = scene.prompt
        if isinstance(prompt, str):
            why = "its prompt is text, and no messages that could be rendered anew"
        elif len(episode.drafts) == MOST_SEGMENTS:
            why = f"it has {MOST_SEGMENTS} segments, the most that a rollout may have"
        else:
            try:
                return _Next(
                    prompt=await scene.chat.prompt_ids(whole_conversation(prompt, [*episode.messages, *answers]))
                )
            except PromptError as error:
                why = f"its conversation cannot be rendered: {error}"
        detail = f"an episode ended early: the chat format cannot tell what follows a turn, and {why}"
        self.troubles.add("episode", "segment", detail)
        return None

    async def parsed(self, chat: ChatFormat, prompt_ids: list[int], turn_ids: list[int]) -> ParsedTurn:
        """A long turn is read in a thread: it would stop the loop. What reads it may be the user's own."""
        if chat.parses_by_user_code:
            return await self._parsed_by_user_code(chat, prompt_ids, turn_ids)
        if len(turn_ids) < _INLINE_TOKENS:
            return chat.parse(prompt_ids, turn_ids)
        parsed: ParsedTurn = await user_code.in_thread(chat.parse, prompt_ids=prompt_ids, turn_ids=turn_ids)
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
            self.troubles.add("code", f"parser {error.kind}", f"the parser of turns failed: {error}", error.where)
            text = chat.tokenizer.decode(turn_ids, skip_special_tokens=False)
            return ParsedTurn(text, text, [MalformedCall(f"the turn cannot be read: {error.kind}")])

    def _count(self, results: Sequence[ToolResult], rollout: Rollout) -> None:
        """Calls and failures, in all, by tool and by reason; what the tools' own code raised is a trouble."""
        rollout.tool_calls += len(results)
        for result in results:
            count_call(rollout.metrics, result.counted_as, result.reason, result.coerced)
            rollout.tool_failures += result.failed
            if result.defused:
                self.tell_of_defused(result.name, result.counted_as)
            if (error := result.error) is not None:
                self.troubles.add("tool", f"{result.name} {error.kind}", f"tool {result.name}: {error}", error.where)

    def tell_of_defused(self, name: str, counted_as: str) -> None:
        """A trouble, at the first such answer of a tool."""
        self.troubles.add("tool", f"{counted_as} special tokens", told_of_defused(f"tool {name}"))

    @contextmanager
    def _timed(self, episode: Episode, what: str) -> Iterator[None]:
        started = self.clock()
        try:
            yield
        finally:
            episode.rollout.timings[what] += self.clock() - started
