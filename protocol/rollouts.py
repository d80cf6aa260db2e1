"""Rollouts as people read them, the same in `slipstream rollouts`, `rollouts.jsonl` and `GET /v1/rollouts`.

Also the names of the metrics that a worker counts in `Rollout.metrics`, and the learner adds up by name.
"""

from __future__ import annotations

import os
import re
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.messages import Group

# File in the run directory: one JSON line a rollout, in the order of the steps.
FILE_NAME = "rollouts.jsonl"

MAX_TEXT = 4000

# What stands in the place of the middle, or the end, of a text that is kept shorter. `CUT` finds both.
MIDDLE_CUT, END_CUT = "... ({} characters left out) ...", "... ({} more characters)"
CUT = re.compile("|".join(re.escape(cut).replace(r"\{\}", r"\d+") for cut in (MIDDLE_CUT, END_CUT)) + "$")

# Field of a message in `Rollout.messages` that was a turn of the policy: the reward at that turn.
TURN_REWARD = "turn_reward"

# Rollouts that `TrainedRollouts` keeps, and bytes of the file that it reads at a time: of a longer one the end.
MAX_TRAINED = 256
_MAX_READ = 2 * 1024**2


class TokenView(msgspec.Struct, array_like=True, frozen=True):
    """A token of a rollout.

    Attributes:
        version: That sampled it; None for a token that was not sampled, such as the prompt's.
        logprob: When it was sampled. `learner_logprob`: in the step that trained it, before the step; None if it is
            not known.
        trained: 1 if it contributed to a gradient.
        advantage: Of its turn; None where it is the rollout's.
    """

    text: str
    version: int | None
    logprob: float | None
    learner_logprob: float | None
    trained: int
    advantage: float | None = None


class RolloutView(msgspec.Struct):
    """A rollout for people.

    Attributes:
        messages: The conversation from the prompt on, long texts cut; None if it was not kept.
        versions: Oldest and newest version that sampled it.
        step: The step that it was leased for; None before.
        staleness, advantage: None if it was not trained; staleness is its oldest token's, an advantage that differs by
            turn the mean over the turns.
        extra: Notes of its reward functions, long texts cut.
        evaluation: Step of the evaluation that it is of; None for training.
        tokens: Its tokens, long rollouts cut; None before it was trained.
        timings: Seconds by name, as `Rollout.timings`.
        servers: That sampled it, in the order of their first tokens.
        role: That the policy played; None where an episode has one.
        turn_rewards: The reward at each turn; None where none was given at a turn.
        turn_advantages: With `learner.credit`, the advantage of each turn; None if it was not trained.
    """

    ticket_id: str
    index: int
    epoch: int
    number: int
    worker_id: str
    reward: float
    reward_components: dict[str, float | None]
    finish_reason: str
    turns: int
    tool_calls: int
    tool_failures: int
    sampled_tokens: int
    versions: tuple[int, int] | None
    messages: list[dict[str, Any]] | None = None
    step: int | None = None
    staleness: int | None = None
    advantage: float | None = None
    extra: dict[str, str] = {}
    evaluation: int | None = None
    tokens: list[TokenView] | None = None
    timings: dict[str, float] = {}
    servers: list[str] = []
    role: str | None = None
    turn_rewards: list[float] | None = None
    turn_advantages: list[float] | None = None

    @classmethod
    def of(cls, group: Group, number: int, evaluation: int | None = None) -> Self:
        """Make the view of rollout `number` of a group."""
        rollout = group.rollouts[number]
        spans = [span for segment in rollout.segments for span in segment.version_spans]
        versions = [span.version for span in spans]
        return cls(
            ticket_id=group.ticket_id,
            index=group.index,
            epoch=group.epoch,
            number=number,
            worker_id=group.worker_id,
            reward=rollout.reward,
            reward_components={
                name: value
                for name, value in rollout.reward_components.items()
                if not rollout.role or value is not None  # other roles' rewards are none of this one's
            },
            finish_reason=rollout.finish_reason,
            turns=rollout.turns,
            tool_calls=rollout.tool_calls,
            tool_failures=rollout.tool_failures,
            sampled_tokens=rollout.sampled_tokens,
            versions=(min(versions), max(versions)) if versions else None,
            messages=_readable(rollout.messages),
            extra={name: _cut(text) for name, text in rollout.extra.items()},
            evaluation=evaluation,
            timings=rollout.timings,
            servers=list(dict.fromkeys(group.server_names[span.server] for span in spans)),
            role=rollout.role or None,
            turn_rewards=rollout.turn_rewards or None,
        )


class TicketLife(msgspec.Struct):
    """The life of a ticket, as far as the queue knows it. Times are wall clock, seconds; None for what has not been,
    or was long ago or before the queue was started.

    Attributes:
        state: As in the ledger: issued, ready, leased, trained, evaluated, forgotten (trained, and a checkpoint holds
            it), dropped, or reissued (its row was given out again, or waits to be).
        version: The learner's when it was issued. `arrival_version`: when its group came.
        tokens, bytes: Sampled tokens of the group, and its size; 0 before it came.
        sampled_by: Servers with their oldest and newest version.
        failures: Failed attempts at its row until then.
        step, trained_version: The step that trained it, and the version that this step made.
        reason: Why it ended untrained.
    """

    id: str
    state: str
    worker_id: str
    version: int
    issued_at: float | None = None
    arrived_at: float | None = None
    arrival_version: int | None = None
    tokens: int = 0
    bytes: int = 0
    sampled_by: list[tuple[str, int, int]] = []
    failures: int = 0
    leased_at: float | None = None
    ended_at: float | None = None
    step: int | None = None
    trained_version: int | None = None
    reason: str | None = None


def read_messages(messages: bytes | None) -> list[dict[str, Any]] | None:
    """Decode `Rollout.messages`; None if there are none, or a worker sent something else."""
    if messages is None:
        return None
    try:
        return msgspec.json.decode(messages, type=list[dict[str, Any]])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _readable(messages: bytes | None) -> list[dict[str, Any]] | None:
    """Read messages and cut their texts."""
    found = read_messages(messages)
    return found and [{name: _cut(value) for name, value in message.items()} for message in found]


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return value[:MAX_TEXT] + END_CUT.format(len(value) - MAX_TEXT)
    return value


class TrainedRollouts:
    """Follows `rollouts.jsonl`, in which the learner writes rollouts of trained groups, with their step and tokens.

    Attributes:
        newest: At most `MAX_TRAINED`, oldest first.
    """

    def __init__(self, path: Path) -> None:
        self.newest: deque[RolloutView] = deque(maxlen=MAX_TRAINED)
        self._path = path
        self._at = 0
        self._file: tuple[int, int] | None = None

    def look(self) -> list[RolloutView]:
        """Return what was written since the last look. Blocks for a moment."""
        found: list[RolloutView] = []
        with suppress(OSError), self._path.open("rb") as file:
            stat = os.fstat(file.fileno())
            same = (stat.st_dev, stat.st_ino) == self._file and stat.st_size >= self._at
            self._file = stat.st_dev, stat.st_ino
            # Another file is the newer half of one that got too long, or of a run that was resumed.
            begin = max(self._at if same else 0, stat.st_size - _MAX_READ)
            file.seek(begin)
            *lines, rest = file.read(stat.st_size - begin).split(b"\n")
            self._at = stat.st_size - len(rest)
            known = {_key(view) for view in self.newest} if not same else set()
            for line in lines:
                with suppress(msgspec.DecodeError):  # the first one may be cut
                    view = msgspec.json.decode(line, type=RolloutView)
                    if _key(view) not in known:
                        found.append(view)
        self.newest += found
        return found


def _key(view: RolloutView) -> tuple[str, int, int | None]:
    return view.ticket_id, view.number, view.step


# Segments after a rollout's first; times that it continued at another server.
NEW_SEGMENTS = "chat/new_segments"

SERVER_MOVES = "servers/moves"

# Tools that the policy could call.
TOOLS_OFFERED = "tools/offered"

# Seconds that an environment took for reset, answers and reward in an episode; TRL's names.
ENV_RESET_S, ENV_RESPOND_S, ENV_REWARD_S = "env/reset_s", "env/respond_s", "env/reward_s"

# Seconds that a worker measures for each rollout: in its turns, in its tool calls, and in the reward functions.
TIMINGS = ("generate", "tools", "reward")

_OURS = (NEW_SEGMENTS, SERVER_MOVES, TOOLS_OFFERED, ENV_RESET_S, ENV_RESPOND_S, ENV_REWARD_S)

# Reasons for which a tool's call failed.
WHY_FAILED = (
    reasons.TOOL_UNKNOWN,
    reasons.TOOL_MALFORMED,
    reasons.TOOL_ARGUMENTS,
    reasons.TOOL_RAISED,
    reasons.TIMEOUT,
)

# Stands for the tool in the counts of calls that name none.
UNKNOWN_TOOL = "unknown"

TOOL_COUNT = re.compile(rf"tools/(?P<tool>.+?)/(?P<what>calls|coerced|seconds|failures(/({'|'.join(WHY_FAILED)}))?)")


def is_counted(name: str) -> bool:
    """Tell whether a worker counts under this name, so that a task may not use it."""
    return name in _OURS or TOOL_COUNT.fullmatch(name) is not None
