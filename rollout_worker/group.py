"""Makes the group of one ticket: reads its row, runs the episodes side by side, and computes their rewards.

Conversations are kept as JSON for people to read. Whatever the user's code or the policy puts into a message, writing
it raises nothing (I9).
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean
from typing import Any, get_args

import msgspec

from slipstream.protocol import reasons, tracing
from slipstream.protocol.messages import Group, Ticket, TicketKind, WorkerReport
from slipstream.rollout_worker import user_code
from slipstream.rollout_worker.chat.base import PromptError
from slipstream.rollout_worker.chat.parsers.base import Message
from slipstream.rollout_worker.data.rows import Row
from slipstream.rollout_worker.episodes.capacity import Capacity, Reservation
from slipstream.rollout_worker.episodes.episode import Episode
from slipstream.rollout_worker.episodes.runner import EpisodeRunner
from slipstream.rollout_worker.episodes.source import EpisodeSource, GroupPlan, TicketFailed
from slipstream.rollout_worker.inference.engine import OwnParams
from slipstream.rollout_worker.inference.failures import EpisodeFailed, FailureNotices
from slipstream.rollout_worker.inference.pool import ServerPool
from slipstream.rollout_worker.task.reward_base import RewardBatch, RewardError, TrainerState
from slipstream.rollout_worker.task.rewards import RewardFunctions
from slipstream.rollout_worker.task.row_reader import RowReader
from slipstream.rollout_worker.teacher import Teacher, TeacherError
from slipstream.rollout_worker.user_code.values import without_middle
from slipstream.rollout_worker.vision.processor import Seen

logger = logging.getLogger(__name__)

# Minimum rollouts of a group for training: an advantage compares them.
MIN_ROLLOUTS = 2

KINDS = get_args(TicketKind)

MAX_BYTES = 64 * 1024

# Maximum characters of one text. A byte of a message may take six in JSON.
MAX_TEXT = 8 * 1024

# Bytes of a message above which its images are named without their previews.
_MAX_PREVIEWED = 16 * 1024


@dataclass(frozen=True, slots=True)
class GroupRunner:
    """Makes groups of tickets.

    Attributes:
        counters: Counts episodes and failures here.
        notices: Keeps the first failure of each kind here.
        wall_clock: Gives seconds since the epoch.
        clock: Gives seconds, monotonic.
    """

    rows: RowReader
    rewards: RewardFunctions
    source: EpisodeSource
    episodes: EpisodeRunner
    pool: ServerPool
    capacity: Capacity
    counters: WorkerReport
    notices: FailureNotices
    keep_messages: bool
    teacher: Teacher | None = None
    wall_clock: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic

    async def run(self, ticket: Ticket, reservation: Reservation) -> Group:
        """Make the group of a ticket. `reservation`: slots for the first turns. Raises `TicketFailed`."""
        if ticket.kind not in KINDS:
            detail = f"ticket {ticket.id} is of kind {ticket.kind!r}, and this worker knows {' and '.join(KINDS)} only"
            self.notices.add("ticket", reasons.TICKET_KIND, detail)
            raise TicketFailed(reasons.TICKET_KIND, detail, retryable=False)
        started_at, born = self.wall_clock(), self.pool.tick
        row = await self._row(ticket)
        tracing.current().set(row=row.number, epoch=row.epoch)
        min_rollouts = MIN_ROLLOUTS if ticket.kind == "train" else 1
        with ExitStack() as after:
            own = OwnParams(ticket.temperature)
            plan = GroupPlan(row, ticket.group_size, born, reservation, self.episodes, own, after)
            outcomes = await self.source.run(plan)
            reservation.give_all()
            episodes = self._counted(ticket, [self._checked(outcome) for outcome in outcomes], min_rollouts)
            self._note_silent_roles(episodes)
            if self.keep_messages:
                self._keep_messages(episodes)
            if self.teacher is not None and ticket.kind == "train":
                await self._taught(self.teacher, row, episodes)
            rewarded = self._still_proven(await self._rewarded(ticket, row, episodes, min_rollouts), min_rollouts)
            rewarded = self._compared(rewarded, min_rollouts)
        server_names = sorted({span.server for episode in rewarded for span in episode.spans})
        drafts = [draft for episode in rewarded for draft in episode.drafts]
        images = {placed.image.wire.hash: placed.image.wire for draft in drafts for placed in draft.images}
        for episode in rewarded:
            episode.rollout.segments = episode.segments(server_names, [*images])
        group = Group(
            ticket_id=ticket.id,
            index=ticket.index,
            epoch=row.epoch,
            rollouts=[episode.rollout for episode in rewarded],
            worker_id=self.counters.worker_id,
            server_names=server_names,
            started_at=started_at,
            finished_at=self.wall_clock(),
            reward_weights=self.rewards.weights,
            images=[*images.values()] or msgspec.UNSET,
        )
        _describe(group)
        return group

    def _keep_messages(self, episodes: list[Episode]) -> None:
        prompts: dict[int, list[bytes]] = {}  # most episodes have the same prompt
        for episode in episodes:
            if id(episode.prompt) not in prompts:
                prompts[id(episode.prompt)] = of_prompt(self.source.chat.shown(episode.prompt))
            episode.rollout.messages = transcript(prompts[id(episode.prompt)], episode.messages)

    async def _row(self, ticket: Ticket) -> Row:
        try:
            if ticket.kind == "eval":
                return await self.rows.read_eval(ticket.index)
            return await self.rows.read(ticket.index, ticket.seed, ticket.row)
        except user_code.NotCalled as failure:
            raise _shut_off(failure) from None
        except user_code.UserCodeError as failure:
            detail = str(failure)
            self.notices.add("row", failure.kind, detail, failure.where)
            late = failure.kind == reasons.TIMEOUT
            raise TicketFailed(reasons.ROW, detail, retryable=late) from None

    def _checked(self, outcome: Episode | EpisodeFailed) -> Episode | EpisodeFailed:
        """Return the outcome, or a failure if weights that sampled some of it have failed their proof since (I5)."""
        if isinstance(outcome, Episode):
            try:
                self.pool.check_proven(outcome.affinity)
            except EpisodeFailed as failure:
                return failure
        return outcome

    def _still_proven(self, episodes: list[Episode], min_rollouts: int) -> list[Episode]:
        """Return the episodes whose weights are still proven: a proof may have failed while rewards were computed.
        Raises `TicketFailed` if too few are left."""
        proven = [episode for episode in episodes if self._checked(episode) is episode]
        lost = len(episodes) - len(proven)
        if lost:
            self.counters.failures[reasons.UNVERIFIED_SERVER] += lost
        if len(proven) < min_rollouts:
            detail = f"the weights of {lost} of {len(episodes)} episodes failed their proof or left service before it"
            raise TicketFailed(reasons.UNVERIFIED_SERVER, detail, retryable=True)
        return proven

    def _note_silent_roles(self, episodes: list[Episode]) -> None:
        """Say once which roles were asked in no episode of a group, where others were."""
        spoke = {episode.rollout.role for episode in episodes if episode.rollout.role}
        if spoke and (silent := [role for role in self.source.own_rewards if role not in spoke]):
            roles = ", ".join(map(repr, silent))
            detail = (
                f"the role {roles} had no answer in all episodes of a group, so nothing of it is trained there; is the "
                f"agent asking at endpoints[{silent[0]!r}]?"
            )
            self.notices.add("agent", f"silent {roles}", detail)

    def _compared(self, episodes: list[Episode], min_rollouts: int) -> list[Episode]:
        """Return the episodes whose role has enough of them to be compared. Raises `TicketFailed` if none has."""
        by_role = Counter(episode.rollout.role for episode in episodes)
        compared = [episode for episode in episodes if by_role[episode.rollout.role] >= min_rollouts]
        if alone := len(episodes) - len(compared):
            self.counters.failures[reasons.ROLE_ALONE] += alone
            few = ", ".join(repr(role) for role, count in by_role.items() if count < min_rollouts)
            detail = f"the role {few} has fewer than {min_rollouts} rollouts in a group, which leave it"
            self.notices.add("agent", reasons.ROLE_ALONE, detail)
            if not compared:
                raise TicketFailed(reasons.ROLE_ALONE, detail, retryable=True)
        return compared

    def _counted(self, ticket: Ticket, outcomes: list[Episode | EpisodeFailed], min_rollouts: int) -> list[Episode]:
        """Count all outcomes, those of an evaluation apart, and return the episodes that did not fail. Raises
        `TicketFailed` if too few are left."""
        episodes = [outcome for outcome in outcomes if isinstance(outcome, Episode)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, EpisodeFailed)]
        done = sum(not episode.is_further_role for episode in episodes)
        if ticket.kind == "train":
            self.counters.episodes_done += done
            self.counters.episodes_failed += len(failures)
            for episode in episodes:
                self.counters.tokens_sampled += episode.sampled_tokens
                self.counters.tool_calls += episode.rollout.tool_calls
                self.counters.tool_failures += episode.rollout.tool_failures
        else:
            self.counters.eval_episodes += done + len(failures)
        for failure in failures:
            self.counters.failures[failure.reason] += 1
            text = f"an episode failed ({failure.reason}): {failure}"
            self.notices.add(failure.kind, failure.key, text, failure.where)
        if len(episodes) < min_rollouts:
            # The ticket fails for the commonest reason.
            reason = Counter(failure.reason for failure in failures).most_common(1)[0][0]
            detail = next(str(failure) for failure in failures if failure.reason == reason)
            raise TicketFailed(
                reason,
                f"{len(failures)} of {done + len(failures)} episodes failed: {detail}",
                retryable=any(failure.retryable for failure in failures),
            )
        return episodes

    async def _taught(self, teacher: Teacher, row: Row, episodes: list[Episode]) -> None:
        """Put the teacher's log-probs into the episodes. Raises `TicketFailed`."""
        try:
            with self.capacity.being("judgement", len(episodes)), tracing.span("teacher"):
                await teacher.teach(episodes, row.columns)
        except (TeacherError, PromptError) as error:
            self.notices.add("teacher", type(error).__name__, f"{error}; at row {row.number}")
            raise TicketFailed(reasons.TEACHER, str(error), retryable=isinstance(error, TeacherError)) from error

    async def _rewarded(self, ticket: Ticket, row: Row, episodes: list[Episode], min_rollouts: int) -> list[Episode]:
        """Compute the rewards, put them into the rollouts, and return the episodes that have one. Raises
        `TicketFailed`."""
        started = self.clock()
        prompt = row.columns["prompt"]
        inputs = [episode.reward_inputs() for episode in episodes]
        batch = RewardBatch(
            prompt=prompt,
            completions=[episode.text if isinstance(prompt, str) else episode.messages for episode in episodes],
            completion_ids=[episode.completion_ids for episode in episodes],
            columns=row.columns,
            state=TrainerState(ticket.step, ticket.version, float(row.epoch), self.rewards.max_steps),
            prompts=[prompt if isinstance(prompt, str) else episode.prompt for episode in episodes],
            own=[episode.rewards for episode in episodes],
            inputs={name: [each[name] for each in inputs] for name in inputs[0]},
        )

        def note(error: RewardError) -> None:
            key = f"{error.function} {error.kind}"
            self.notices.add("reward", key, f"reward {error}; at row {row.number}", error.where)
            self.counters.failures[reasons.REWARD_RETRIED] += error.retryable

        try:
            with self.capacity.being("judgement", len(episodes)), tracing.span("reward"):
                scores = await self.rewards.score(batch, note)
        except RewardError as error:
            if isinstance(error.__cause__, user_code.NotCalled):
                raise _shut_off(error) from None
            key = f"{error.function} {error.kind}"
            self.notices.add("reward", key, f"reward {error}; at row {row.number}", error.where)
            raise TicketFailed(reasons.REWARD, str(error), retryable=True) from error
        seconds = self.clock() - started
        rewarded = []
        without: list[Episode] = []
        for episode, score in zip(episodes, scores, strict=True):
            if score.reward is None:
                self.counters.failures[self._why_without(episode)] += 1
                without.append(episode)
                if role := episode.rollout.role:
                    detail = f"the role {role!r} leaves a group without a reward: {episode.why_no_reward.text}"
                    self.notices.add("agent", f"{reasons.NO_REWARD} {role}", detail)
                elif self._why_without(episode) == reasons.TIMEOUT:
                    detail = f"an episode leaves its group without a reward: {episode.why_no_reward.text}"
                    self.notices.add("agent", reasons.TIMEOUT, detail)
                continue
            episode.rollout.reward, episode.rollout.reward_components = score.reward, score.components
            episode.rollout.timings["reward"] = seconds
            episode.rollout.metrics |= score.metrics
            episode.rollout.extra |= score.extra
            rewarded.append(episode)
        if len(rewarded) < min_rollouts:
            reason, detail = self._without_reward(without, len(episodes))
            self.notices.add("reward", reason, f"{detail}; at row {row.number}")
            raise TicketFailed(reason, detail, retryable=True)
        return rewarded

    def _why_without(self, episode: Episode) -> str:
        """Return the reason for which an episode has no reward: its own where it alone could have given one."""
        return reasons.NO_REWARD if self.rewards.names else episode.why_no_reward.reason

    def _without_reward(self, without: list[Episode], of: int) -> tuple[str, str]:
        """Return the commonest reason for which episodes have no reward, and a text."""
        reason = Counter(map(self._why_without, without)).most_common(1)[0][0]
        if self.rewards.names:
            return reason, f"every reward function gave None for {len(without)} of {of} episodes"
        texts = Counter(episode.why_no_reward.text for episode in without)
        parts = [f"for {count} of {of} episodes {text}" for text, count in texts.items()]
        return reason, f"{'; '.join(parts)}; the task has no reward functions, which Task(rewards=[...]) may give it"


def _describe(group: Group) -> None:
    """Describe a group in its trace."""
    if (span := tracing.current()).is_recording:
        span.set(
            rollouts=len(group.rollouts),
            tokens=group.sampled_tokens,
            reward=fmean(rollout.reward for rollout in group.rollouts),
            servers=group.server_names,
        )


def _shut_off(why: Exception) -> TicketFailed:
    """Return a failure that blames the worker and not the row, which keeps its attempts."""
    return TicketFailed(reasons.WORKER_STOPPED, str(why), retryable=True)


def _plain(value: Any) -> Any:
    return value.readable() if isinstance(value, Seen) else f"<{type(value).__name__}>"


def _brief(value: Any) -> Any:
    return value.readable() | {"preview": ""} if isinstance(value, Seen) else _plain(value)


_encoder, _brief_encoder = (json.JSONEncoder(ensure_ascii=False, default=write) for write in (_plain, _brief))


def of_prompt(prompt: str | Sequence[Message]) -> list[bytes]:
    """Write each message of a prompt as JSON; a text is a message of role `prompt`."""
    messages = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
    return [_as_json(message) for message in messages]


def transcript(prompt: Sequence[bytes], messages: Iterable[Message]) -> bytes:
    """Write a conversation as a JSON list of at most `MAX_BYTES`.

    A longer conversation keeps its beginning and its end, with a message of role `note` in between.

    Args:
        prompt: The prompt as `of_prompt` writes it.
        messages: The messages after it.

    Returns: UTF-8.
    """
    pieces = [*prompt, *map(_as_json, messages)]
    if sum(map(len, pieces)) + len(pieces) + 1 > MAX_BYTES:
        pieces = _shortened(pieces)
    return b"[" + b",".join(pieces) + b"]"


def _as_json(message: Mapping[str, Any]) -> bytes:
    """Write a message. A lone surrogate becomes a question mark, NaN and infinity null, an object the name of its
    type."""
    try:
        content = message.get("content")
        if isinstance(content, str) and len(content) > MAX_TEXT:
            message = {**message, "content": without_middle(content, MAX_TEXT)}
        text = _encoder.encode({**message})
        if not isinstance(content, str) and len(text) > _MAX_PREVIEWED:
            text = _brief_encoder.encode({**message})
        if "NaN" in text or "Infinity" in text:
            text = _encoder.encode(json.loads(text, parse_constant=lambda name: None))
    except Exception as error:
        text = _note(f"a message that cannot be written as JSON ({type(error).__name__})")
    return text.encode("utf-8", "replace")


def _shortened(pieces: list[bytes]) -> list[bytes]:
    room = MAX_BYTES // 2 - 128
    head = _fitting(pieces, room)
    tail = _fitting(reversed(pieces[len(head) :]), room)
    note = _note(f"{len(pieces) - len(head) - len(tail)} messages left out")
    return [*head, note.encode(), *reversed(tail)]


def _fitting(pieces: Iterable[bytes], room: int) -> list[bytes]:
    """Return as many of the first pieces as fit into `room` bytes."""
    fitting: list[bytes] = []
    for piece in pieces:
        room -= len(piece) + 1
        if room < 0:
            break
        fitting.append(piece)
    return fitting


def _note(text: str) -> str:
    return json.dumps({"role": "note", "content": text})
