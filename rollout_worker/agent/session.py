"""Serves one episode of an agent: places each request in the tree, samples it within the limits, and records it."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from slipstream.protocol import tracing
from slipstream.protocol.config import RolloutSection
from slipstream.protocol.messages import FinishReason, Rollout, TurnEnd
from slipstream.protocol.rollouts import NEW_SEGMENTS, SERVER_MOVES
from slipstream.protocol.versions import SERVED_MODEL_NAME
from slipstream.rollout_worker.agent.allowance import Allowance
from slipstream.rollout_worker.agent.api.base import Answered, Api, Finish, Reply, ReplyChoice, Request
from slipstream.rollout_worker.agent.api.chat import ChatApi
from slipstream.rollout_worker.agent.api.messages import SERVER, ApiError, ChatMessage, over
from slipstream.rollout_worker.agent.api.plain import PlainChoice, check_ids, encoded, read_plain
from slipstream.rollout_worker.agent.api.request import Asked, Reading, schemas_digest
from slipstream.rollout_worker.agent.api.responses import ResponsesApi
from slipstream.rollout_worker.agent.forced_calls import one_call
from slipstream.rollout_worker.agent.formats import ChatFormats, Proven
from slipstream.rollout_worker.agent.pace import Pace
from slipstream.rollout_worker.agent.response import Outgoing, ReadCall, before_stop, first_stop, read_calls
from slipstream.rollout_worker.agent.segments import MEANT, NewSegment, why_new
from slipstream.rollout_worker.agent.tree import Answer, Context, Tree, TreeNode, shown_to_policy
from slipstream.rollout_worker.chat.base import ChatFormat, PromptError
from slipstream.rollout_worker.chat.parsers.base import Message, ParsedTurn
from slipstream.rollout_worker.episodes.capacity import Capacity
from slipstream.rollout_worker.episodes.episode import Episode
from slipstream.rollout_worker.episodes.limits import Deadline
from slipstream.rollout_worker.episodes.runner import EpisodeRunner, note_turn
from slipstream.rollout_worker.episodes.tool_results import for_policy
from slipstream.rollout_worker.inference.engine import OwnParams, Sampled
from slipstream.rollout_worker.inference.experts import known_until
from slipstream.rollout_worker.inference.failures import EpisodeFailed
from slipstream.rollout_worker.inference.router import Affinity
from slipstream.rollout_worker.task.reward_base import TEXT_CHARACTERS
from slipstream.rollout_worker.task.turn_rewards import TurnRewards
from slipstream.rollout_worker.tools.base import ToolResult
from slipstream.rollout_worker.user_code.values import encodable

MODEL = SERVED_MODEL_NAME

CHAT = ChatApi()

# Larger bodies are read in a thread: reading them would block the loop.
_INLINE_BYTES = 32 * 1024


class AgentClock:
    """Divides an episode's time between the policy and its agent.

    While no answer is sampled the agent or one of its tools is at work, and the episode counts as in tools.

    Attributes:
        policy_s: Seconds in which any answer was sampled or waited for its slot.
    """

    def __init__(self, capacity: Capacity, clock: Callable[[], float]) -> None:
        self.policy_s = 0.0
        self._capacity = capacity
        self._clock = clock
        self._runs = False
        self._answers = 0
        self._since = 0.0
        self._in_tools = ExitStack()

    @contextmanager
    def agent(self) -> Iterator[None]:
        """Count the time inside as the agent's, but for that of answers."""
        self._runs = True
        self._look()
        try:
            yield
        finally:
            self._runs = False
            self._look()

    @contextmanager
    def policy(self) -> Iterator[None]:
        """Count the time inside as the policy's. Several answers may be sampled at once."""
        if not self._answers:
            self._since = self._clock()
        self._answers += 1
        self._look()
        try:
            yield
        finally:
            self._answers -= 1
            self._look()
            if not self._answers:
                self.policy_s += self._clock() - self._since

    def _look(self) -> None:
        self._in_tools.close()
        if self._runs and not self._answers:
            self._in_tools.enter_context(self._capacity.being("tools"))


@dataclass(frozen=True, slots=True)
class AgentContext:
    """Shared by all episodes of a group. `episodes` holds the sampler and the limits. `refuse`: whether requests that
    cannot be followed are refused (`agent.unenforced`)."""

    formats: ChatFormats
    episodes: EpisodeRunner
    rollout: RolloutSection
    refuse: bool = False


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn, sampled and read. `ended_as`: the run's limit that cut it off; None if none did."""

    sampled: Sampled
    parsed: ParsedTurn
    calls: list[ReadCall]
    ended_as: FinishReason | None


class Session:
    """The endpoint's side of one episode. Use it on one event loop.

    Args:
        temperature: The temperature that the episode is sampled at.
        deadline: The episode's time-out.
        system_prompt: Put before conversations without a system message; None for the run's.
        agent_clock: The episode's, where it has several sessions; None for one of its own.

    Attributes:
        turns: Number of answers so far.
        failure: Why the last request could not be sampled; None after an answer.
        refused: Status and text of the last error that a request got; None before one.
        turn_rewards: The rewards that the agent gives at its turns.
        responses: The episode's responses.
        pace: How fast requests are handled.
    """

    def __init__(
        self,
        shared: AgentContext,
        affinity: Affinity,
        temperature: float,
        deadline: Deadline,
        system_prompt: str | None = None,
        agent_clock: AgentClock | None = None,
    ) -> None:
        self.turns = 0
        self.failure: EpisodeFailed | None = None
        self.refused: str | None = None
        self.temperature = temperature
        self.turn_rewards = TurnRewards()
        self.responses = ResponsesApi()
        self.pace = Pace(shared.episodes.notices)
        self.agent_clock = agent_clock or AgentClock(shared.episodes.capacity, shared.episodes.clock)
        self._system_prompt = system_prompt
        self._shared = shared
        self._reading = Reading(shared.rollout, temperature, shared.refuse)
        self._affinity = affinity
        self._deadline = deadline
        self._answers: list[Answer] = []
        self._tree = Tree()
        self._over = False
        self._requests: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()
        self._sampled_tokens = 0
        self._allowance = Allowance(shared.episodes.limits)
        self._outgoing = Outgoing()
        # The first new segment for each reason.
        self._whys: dict[str, NewSegment] = {}
        self._name, self._numbers = secrets.token_hex(4), itertools.count()
        self._generate_s = 0.0
        self._span = tracing.current()

    @property
    def ended_as(self) -> FinishReason | None:
        """The limit that the last request met; None if it met none."""
        return self._allowance.ended_as

    @contextmanager
    def _request(self) -> Iterator[None]:
        """Handle a request inside, which is aborted where the session ends."""
        self.check_open()
        task = asyncio.current_task()
        assert task is not None, "a request is handled in its own task"
        self._requests.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._ended and not task.uncancel():  # otherwise its client has disconnected too
                raise over() from None
            raise
        finally:
            self._requests.discard(task)
            self._ended.discard(task)

    def end(self) -> None:
        """Abort the running requests and answer no more."""
        self._over = True
        self._ended |= self._requests
        for task in self._requests:
            task.cancel()

    def episode(self, finish_reason: FinishReason, total_s: float) -> Episode:
        """Return the episode, with the conversation of its last answer. `total_s`: seconds that it took."""
        line = self._tree.last.line() if self._tree.last is not None else []
        timings = {
            "generate": self._generate_s,
            "agent": max(0.0, total_s - self.agent_clock.policy_s),
            "slots": self._deadline.paused_s,
            "total": total_s,
        }
        metrics = dict(self._outgoing.metrics)
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
            tool_calls=self._outgoing.calls,
            tool_failures=self._outgoing.failures,
            metrics=metrics,
            timings=timings,
            extra=self._segments(metrics),
        )
        messages: list[Message] = []
        turn_of: dict[int, int] = {}
        begins = len(line[0].shown) if line else 0
        turns = {id(answer): turn for turn, answer in enumerate(self._answers)}
        for answer in line:
            messages += [*answer.shown, answer.message]
            turn_of[len(messages) - 1 - begins] = turns[id(answer)]
        numbers = {id(draft): number for number, draft in enumerate(self._tree.drafts)}
        return Episode(
            self._tree.drafts,
            rollout,
            messages[:begins],
            self._affinity,
            messages[begins:],
            line[-1].text if line else "",
            self._sampled_tokens,
            turn_ends=[TurnEnd(numbers[id(answer.draft)], answer.end) for answer in self._answers],
            turn_of=turn_of,
            turn_rewards=self.turn_rewards,
        )

    def _segments(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Return how many segments the episode has, and why, for people; empty for one segment."""
        if not self._whys:
            return {}
        whys = [f"{metrics[f'agent/new_segments/{why}']:g} x {new.text}" for why, new in self._whys.items()]
        return {"segments": f"{len(self._tree.drafts)}, of which {'; '.join(whys)}"[:TEXT_CHARACTERS]}

    def check_open(self) -> None:
        """Raise `ApiError` where the session has ended."""
        if self._over:
            raise over()

    async def answer(self, body: bytes, api: Api = CHAT) -> Reply:
        """Answer a request. Raises `ApiError`."""
        with self._request():
            request = await self._read(body, api)
            asked = request.asked
            self._count_unenforced(asked.unenforced)
            key = schemas_digest(asked.tools)
            proven = await self._shared.formats.of(asked.tools, key)
            if asked.must_call:
                asked = self._held_to_calls(asked, proven)
                request = replace(request, asked=asked)
            place = self._tree.place(key, request.messages)
            if place.before is not None:
                place.before.claims += 1
            try:
                context = await self._context(proven, place)
                turns = await self._turns(proven, place, context, asked)
                choices = [
                    self._recorded(proven, place, context, asked, turn, is_more=turn is not turns[0]) for turn in turns
                ]
            finally:
                if place.before is not None:
                    place.before.claims -= 1
            name, now = f"{self._name}-{next(self._numbers)}", int(time.time())
            answered = Answered(name, now, self.temperature, self._shared.rollout.top_p, choices, len(context.ids))
            return Reply(api, request, answered)

    def _held_to_calls(self, asked: Asked, proven: Proven) -> Asked:
        """Return a request that is held to a call of one of `must_call`, where the chat format allows that."""
        frames = {name: proven.frames[name] for name in asked.must_call if name in proven.frames}
        if len(frames) == len(asked.must_call):
            return replace(asked, form=one_call(frames, asked.tools))
        text = "tool_choice: the model's chat format writes no JSON that a call could be held to; give auto"
        if self._reading.refuse:
            raise ApiError(400, text, "unsupported_value", ["tool_choice"])
        unenforced = {"tool_choice": text}
        self._count_unenforced(unenforced)
        return replace(asked, must_call=(), unenforced={**asked.unenforced, **unenforced})

    async def count(self, body: bytes, api: Api) -> int:
        """Return the number of tokens of a request's prompt, as it would be sampled after. Raises `ApiError`."""
        with self._request():
            request = await self._read(body, api)
            key = schemas_digest(request.asked.tools)
            proven = await self._shared.formats.of(request.asked.tools, key)
            context = await self._context(proven, self._tree.place(key, request.messages))
            return len(context.ids)

    async def complete(self, body: bytes) -> bytes:
        """Answer a request for a plain completion. Returns the answer's body. Raises `ApiError`."""
        with self._request():
            plain = await asyncio.to_thread(lambda: read_plain(_decoded(body), self._reading))
            asked = plain.asked
            self._count_unenforced(asked.unenforced)
            proven = await self._shared.formats.of([])
            tokenizer = proven.chat.tokenizer
            ids = plain.prompt
            if isinstance(ids, str):
                self._allowance.check_size(ids)
                ids = list(await asyncio.to_thread(tokenizer.encode, ids, add_special_tokens=plain.special))
            check_ids(ids, len(tokenizer))
            before = self._tree.before(ids)
            suffix = None if before is None else ids[before.end :]
            shown: list[Message] = [{"role": "user", "content": encodable(tokenizer.decode(suffix or ids))}]
            place, context = TreeNode(before, (), b""), Context(ids, suffix, shown)
            choices = []
            turns = await self._turns(proven, place, context, asked)
            for turn in turns:
                self._keep(place, context, turn, is_more=turn is not turns[0])
                sampled = turn.sampled
                text = encodable(tokenizer.decode(sampled.token_ids, skip_special_tokens=plain.skip_special))
                text = before_stop(text, asked.stop)
                tokens = _texts(proven, sampled) if asked.logprobs else []
                cut = "length" if sampled.finish_reason == "length" else "stop"
                choices.append(PlainChoice(text, sampled.token_ids, sampled.logprobs, tokens, cut))
            return encoded(f"cmpl-{self._name}-{next(self._numbers)}", ids, choices, plain)

    def _count_unenforced(self, unenforced: Mapping[str, str]) -> None:
        for name, text in unenforced.items():
            told = f"requests continue, though they ask for what is not followed (agent.unenforced = warn): {text}"
            self._count(f"agent/unenforced/{name}", told)

    def _count(self, metric: str, told: str) -> None:
        """Count what an agent's author may want to change. `told`: its notice; empty for none."""
        self._outgoing.metrics[metric] = self._outgoing.metrics.get(metric, 0.0) + 1.0
        if told:
            self._shared.episodes.notices.add("agent", metric, told)

    async def _read(self, body: bytes, api: Api) -> Request:
        def read() -> Request:
            request = api.read(_decoded(body), self._reading)
            if self._system_prompt is None or any(each.role in ("system", "developer") for each in request.messages):
                return request
            return replace(request, messages=[ChatMessage("system", self._system_prompt), *request.messages])

        return read() if len(body) < _INLINE_BYTES else await asyncio.to_thread(read)

    async def _context(self, proven: Proven, place: TreeNode) -> Context:
        """Return the ids to sample after: an answer and the suffix that the format gives, or the whole rendered
        again."""
        chat, before = proven.chat, place.before
        shown = await self._shown(chat, place)
        self._allowance.check_size(shown)
        after = {"user": proven.appends_users, "tool": before is not None and bool(before.calls)}
        if before is not None and all(after.get(added.role) for added in place.rest):
            suffix = await chat.suffix_ids(before.prompt_ids, before.turn_ids, shown)
            if suffix is not None:
                return Context(before.context + suffix, suffix, shown)
        conversation = [*(before.conversation() if before is not None else ()), *shown]
        try:
            # The episodes of a group begin with the same prompt; what follows an answer is rendered once only.
            ids = await proven.prompt_ids(conversation, comes_again=before is None)
        except PromptError as error:
            raise ApiError(400, f"messages: they cannot be rendered: {error}", "invalid_value", ["messages"]) from None
        return Context(ids, None, shown)

    async def _shown(self, chat: ChatFormat, place: TreeNode) -> list[Message]:
        """Return the messages that a request adds. Tool results are cut and their special tokens broken."""
        shown = []
        limit = self._shared.episodes.limits.tool_result_tokens
        for added, message in shown_to_policy(place.before, place.rest):
            if added.role == "tool":
                result = ToolResult(message["name"], message["content"], call_id=message.get("tool_call_id"))
                (read,) = await for_policy([result], limit, chat)
                message = dict(read.message())
                if read.defused:
                    self._shared.episodes.tell_of_defused(read.name, self._outgoing.counted_as(read.name))
            shown.append(message)
        return shown

    async def _turns(self, proven: Proven, place: TreeNode, context: Context, asked: Asked) -> list[_Turn]:
        """Sample as many answers as were asked for, or none: what an agent does not get is not recorded."""
        if asked.n == 1:
            return [await self._turn(proven, place, context, asked)]
        try:
            async with asyncio.TaskGroup() as tasks:
                runs = [tasks.create_task(self._turn(proven, place, context, asked)) for _ in range(asked.n)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [run.result() for run in runs]

    async def _turn(self, proven: Proven, place: TreeNode, context: Context, asked: Asked) -> _Turn:
        episodes, allowance, before = self._shared.episodes, self._allowance, place.before
        appends = context.suffix is not None and before is not None and before.is_last
        budget = await allowance.budget(len(context.ids), asked.max_tokens, self.turns, len(self._tree.drafts), appends)
        tokens = budget.tokens if asked.max_tokens is None else min(budget.tokens, asked.max_tokens)
        try:
            with self.agent_clock.policy(), allowance.taken(tokens):
                async with self._deadline.slot(episodes.capacity, begun=self.turns > 0):
                    began = episodes.clock()
                    # A request is answered in a task of the server's, which does not belong to the episode.
                    with tracing.span("generate", self._span, kind="client") as span:
                        known = known_until(before.draft.experts) if appends and before is not None else 0
                        own = OwnParams(self.temperature, asked.stop, asked.form)
                        sampled = await episodes.sampler.sample(self._affinity, context.ids, tokens, None, own, known)
                        note_turn(span, self.turns + 1, sampled)
                    self._generate_s += episodes.clock() - began
                allowance.spend(len(sampled.token_ids))
        except EpisodeFailed as failure:
            self.failure = failure
            raise ApiError(503, f"the answer could not be sampled: {failure}", failure.reason, kind=SERVER) from None
        await episodes.loop_yield.passed()
        parsed = await episodes.parsed(proven.chat, context.ids, sampled.token_ids)
        cut = sampled.finish_reason == "length" and tokens == budget.tokens
        calls = await read_calls(parsed, proven.parameters)
        return _Turn(sampled, parsed, calls, budget.ends_as if cut else None)

    def _keep(self, place: TreeNode, context: Context, turn: _Turn, is_more: bool) -> Answer:
        """Record a turn. `is_more`: whether its request has another answer already."""
        sampled, parsed = turn.sampled, turn.parsed
        appends = context.suffix is not None and place.before is not None and place.before.is_last
        if self._tree.drafts and not appends:
            self._count_segment(NewSegment("branch") if is_more else why_new(self._tree, place))
        answer = self._tree.add(place.before, context, sampled, parsed)
        self._answers.append(answer)
        self.turns += 1
        self.turn_rewards.turns = self.turns
        self._sampled_tokens += len(sampled.token_ids)
        self.failure, self._allowance.ended_as = None, turn.ended_as
        return answer

    def _count_segment(self, new: NewSegment) -> None:
        self._whys.setdefault(new.reason, new)
        told = (
            f"an episode has more segments than conversations: {new.text}. What was sampled before is read again, "
            f"and trains in the segment that it was sampled in"
        )
        self._count(f"agent/new_segments/{new.reason}", "" if new.reason in MEANT else told)

    def _recorded(
        self, proven: Proven, place: TreeNode, context: Context, asked: Asked, turn: _Turn, is_more: bool
    ) -> ReplyChoice:
        sampled, parsed = turn.sampled, turn.parsed
        answer, tokens = self._keep(place, context, turn, is_more), len(sampled.token_ids)
        self._outgoing.count(turn.calls, proven.parameters)
        reply, calls = self._outgoing.given(parsed, turn.calls, asked.stop)
        self._tree.remember(answer, place, reply, calls)
        logprobs = None
        if asked.logprobs:
            logprobs = list(zip(_texts(proven, sampled), sampled.logprobs, strict=True))
        cut = sampled.finish_reason == "length"
        finish: Finish = "length" if cut else "tool_calls" if reply.calls else "stop"
        return ReplyChoice(reply, finish, tokens, logprobs, first_stop(parsed.content, asked.stop))


def _texts(proven: Proven, sampled: Sampled) -> list[str]:
    """Return the text of each sampled token."""
    return [encodable(proven.chat.tokenizer.decode([token])) for token in sampled.token_ids]


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ApiError(400, f"the body is not JSON that can be read: {error}", "invalid_body") from None
    except (RecursionError, OverflowError) as error:
        raise ApiError(400, f"the body is nested too deeply, or holds a number too large: {error}") from None
