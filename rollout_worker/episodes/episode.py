"""Holds an episode while it grows: its setup, segments and conversation.

A segment is a prompt and the turns that were sampled after it. Its ids are never changed, only appended to (I4).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.protocol import reasons
from slipstream.protocol.images import ImagePlace
from slipstream.protocol.messages import Rollout, SamplingMask, Segment, TeacherTop, VersionSpan
from slipstream.protocol.rollouts import NEW_SEGMENTS
from slipstream.rollout_worker.chat.base import ChatFormat
from slipstream.rollout_worker.chat.parsers.base import Message
from slipstream.rollout_worker.episodes.capacity import Reservation
from slipstream.rollout_worker.inference.engine import AS_THE_RUN, Masks, OwnParams, Sampled, SampledSpan
from slipstream.rollout_worker.inference.experts import RecordedExperts, joined
from slipstream.rollout_worker.inference.router import Affinity
from slipstream.rollout_worker.inference.sampler import PendingChoice
from slipstream.rollout_worker.tools.toolbox import ToolBox
from slipstream.rollout_worker.vision.messages import Placed


@dataclass(frozen=True, slots=True)
class NoReward:
    """The reason for which an episode without reward functions has no reward: a code of `protocol.reasons`, and a
    text."""

    reason: str = reasons.NO_REWARD
    text: str = "it brings no reward"


@dataclass(slots=True)
class Episode:
    """One run of the policy, whatever kind of task it is of.

    Attributes:
        drafts: Its segments.
        rollout: Gets its reward, and then its segments, when the group is put together.
        prompt: The prompt that it began with.
        affinity: The servers that sampled it.
        messages: The conversation after the prompt.
        text: Text of the last turn.
        rewards: The rewards that it brings with it, by component.
        reward_inputs: Returns further arguments that reward functions may take besides its conversation, by name. All
            episodes of a task have the same names.
        why_no_reward: Why it has no reward, if neither it nor a reward function gives one.
        chat: The chat format that rendered its prompt; None if an agent did.
        is_further_role: Whether it is what another role said in an episode that is counted already.
    """

    drafts: list[SegmentDraft]
    rollout: Rollout
    prompt: str | Sequence[Message]
    affinity: Affinity
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    sampled_tokens: int = 0
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward_inputs: Callable[[], Mapping[str, Any]] = dict
    why_no_reward: NoReward = NoReward()
    is_further_role: bool = False
    chat: ChatFormat | None = None

    @classmethod
    def begin(cls, setup: EpisodeSetup, affinity: Affinity) -> Episode:
        timings = {"generate": 0.0, "tools": 0.0, "total": 0.0}
        rollout = Rollout([], reward=math.nan, finish_reason="stop", timings=timings)
        return cls(
            [SegmentDraft(setup.prompt_ids, setup.prompt_images)], rollout, setup.prompt, affinity, chat=setup.chat
        )

    @property
    def ids(self) -> list[int]:
        """Token ids of the current segment."""
        return self.drafts[-1].ids

    @property
    def spans(self) -> list[SampledSpan]:
        """Spans of all segments; each counts from the start of its segment."""
        return [span for draft in self.drafts for span in draft.spans]

    @property
    def completion_ids(self) -> list[int]:
        """Token ids after the prompt of each segment: turns, and the tool messages between them. The prompt of a later
        segment repeats the conversation, so it is left out."""
        return [token for draft in self.drafts for token in draft.ids[draft.prompt_size :]]

    @property
    def images(self) -> list[Placed]:
        """Images in the current segment."""
        return self.drafts[-1].images

    def add_turn(self, suffix: list[int], turn: Sampled, images: Sequence[Placed] = ()) -> None:
        """Append the ids of tool messages, with the images in them, and the turn that was sampled after them."""
        self.drafts[-1].images += images
        self.drafts[-1].add(suffix, turn)
        self.sampled_tokens += len(turn.token_ids)
        self.rollout.turns += 1

    def open_segment(self, prompt_ids: list[int], images: Sequence[Placed] = ()) -> None:
        """Begin a new segment: later turns belong to it."""
        self.drafts.append(SegmentDraft(prompt_ids, images))
        self.rollout.metrics[NEW_SEGMENTS] = self.rollout.metrics.get(NEW_SEGMENTS, 0.0) + 1.0

    def segments(self, server_names: Sequence[str], images: Sequence[str] = ()) -> list[Segment]:
        """Return the segments so far. Spans name a server by its index in `server_names`, places an image by that of
        its hash in `images`."""
        return [draft.segment(server_names, images) for draft in self.drafts]


@dataclass(frozen=True, slots=True)
class Opening:
    """The first turn of an episode, sampled with its group's, and the reservation that holds its slot."""

    pending: PendingChoice
    reservation: Reservation


class SegmentDraft:
    """A segment that grows.

    Attributes:
        prompt_size: Number of tokens of the prompt, with which `ids` begins.
        ids: Token ids.
        mask: For each token, whether it was sampled.
        logprobs: For each token, its log-prob; 0 where it was not sampled.
        spans: Sampled tokens by policy version and server, counted from the start of the segment.
        experts: Experts that servers recorded of its tokens, in order.
        images: Images among the tokens, in order.
        masks: What each sampled token was sampled from, with `rollout.top_k`.
        teacher: float32 [S], the teacher's log-prob of each sampled token; None without a teacher.
        teacher_top: Its likeliest ids, with `teacher.top_k`.
    """

    def __init__(self, prompt_ids: Sequence[int], images: Sequence[Placed] = ()) -> None:
        self.images = list(images)
        self.prompt_size = len(prompt_ids)
        self.ids = list(prompt_ids)
        self.mask = [False] * self.prompt_size
        self.logprobs = [0.0] * self.prompt_size
        self.spans: list[SampledSpan] = []
        self.experts: list[RecordedExperts] = []
        self.masks = Masks()
        self.teacher: npt.NDArray[np.float32] | None = None
        self.teacher_top: TeacherTop | None = None

    def add(self, suffix: Sequence[int], turn: Sampled) -> None:
        """Append the ids that were shown before a turn, and the turn."""
        self.ids += suffix
        self.mask += [False] * len(suffix)
        self.logprobs += [0.0] * len(suffix)
        self.spans += [span.moved(len(self.ids)) for span in turn.spans]
        self.ids += turn.token_ids
        self.mask += [True] * len(turn.token_ids)
        self.logprobs += turn.logprobs
        self.experts += turn.experts
        self.masks.extend(turn.masks)

    def segment(self, server_names: Sequence[str], images: Sequence[str] = ()) -> Segment:
        """Return the segment so far, as `Episode.segments`."""
        places = [ImagePlace(images.index(placed.image.wire.hash), placed.start) for placed in self.images]
        return Segment(
            token_ids=np.array(self.ids, dtype=np.int32),
            loss_mask=np.array(self.mask, dtype=np.bool_),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            version_spans=[
                VersionSpan(span.version, span.start, span.end, server_names.index(span.server)) for span in self.spans
            ],
            experts=joined(self.experts),
            images=places,
            sampling_mask=_sampling_mask(self.masks),
            teacher=self.teacher,
            teacher_top=self.teacher_top,
        )


def _sampling_mask(masks: Masks) -> SamplingMask | None:
    if not masks.counts:
        return None
    return SamplingMask(np.array(masks.ids, dtype=np.int32), np.array(masks.counts, dtype=np.uint16))


def whole_conversation(prompt: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """Join a prompt and the messages after it. A last message of the prompt that the policy continued becomes one
    message with its continuation."""
    if not (prompt and messages and prompt[-1].get("role") == messages[0].get("role") == "assistant"):
        return [*prompt, *messages]
    begun, continued = prompt[-1], messages[0]
    content = f"{begun.get('content') or ''}{continued.get('content') or ''}"
    return [*prompt[:-1], {**begun, **continued, "content": content}, *messages[1:]]


# Maps the conversation after the prompt to the messages that answer it; None ends the episode. Raises `EpisodeFailed`.
Respond = Callable[[Sequence[Message]], Awaitable[list[Message] | None]]


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """Inputs of one episode.

    Attributes:
        prompt: The messages or text behind `prompt_ids`. A new segment can be rendered from messages only.
        chat: The chat format that shows `tools`.
        respond: Answers a turn without calls; without it such a turn is the last.
        own: Sampling parameters of this episode's ticket.
        prompt_images: Images in `prompt_ids`.
    """

    prompt: str | Sequence[Message]
    prompt_ids: list[int]
    chat: ChatFormat
    tools: ToolBox
    respond: Respond | None = None
    own: OwnParams = AS_THE_RUN
    prompt_images: Sequence[Placed] = ()
