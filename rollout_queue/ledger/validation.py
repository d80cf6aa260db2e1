"""The rules that a group must keep to be let in, each with a stable reason code.

Nothing is filled in or repaired: a group that breaks a rule is rejected whole (F17).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from protocol import codec
from protocol.messages import SCHEMA_VERSION, Group, Rollout, Segment
from rollout_queue.ledger.records import TicketRecord


class Rejection(Exception):
    """`reason` is the code that is counted; the text names the place and the value."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Stamp(msgspec.Struct):
    schema_version: int = SCHEMA_VERSION


def decode(body: bytes) -> Group:
    """The group in a request's body; raises `Rejection`."""
    try:
        stamp = codec.decode(body, _Stamp)
        if stamp.schema_version != SCHEMA_VERSION:
            raise Rejection(
                "schema_version",
                f"the group is of schema {stamp.schema_version}, this queue speaks {SCHEMA_VERSION}: run one release "
                f"of Slipstream everywhere",
            )
        return codec.decode(body, Group)
    except codec.DecodeError as error:
        raise Rejection("decode", str(error)) from error


def check(group: Group, ticket: TicketRecord, group_size: int, learner_version: int) -> None:
    """Raises `Rejection` for the first rule that the group breaks."""
    if (group.ticket_id, group.index) != (ticket.id, ticket.index) or group.epoch < 0:
        raise Rejection(
            "ticket_mismatch",
            f"ticket {ticket.id} is for row {ticket.index}, the group says ticket {group.ticket_id}, row "
            f"{group.index}, epoch {group.epoch}",
        )
    if not 2 <= len(group.rollouts) <= group_size:
        raise Rejection("group_size", f"{len(group.rollouts)} rollouts, allowed are 2 to {group_size}")
    for number, rollout in enumerate(group.rollouts):
        where = f"rollout {number}"
        _check_rewards(rollout, where)
        for position, segment in enumerate(rollout.segments):
            _check_segment(segment, learner_version, f"{where}, segment {position}")
    if group.sampled_tokens == 0:
        raise Rejection("no_sampled_tokens", "no rollout holds a sampled token")


def _check_rewards(rollout: Rollout, where: str) -> None:
    for name, value in (("reward", rollout.reward), *rollout.reward_components.items()):
        if value is not None and not math.isfinite(value):
            raise Rejection("reward_not_finite", f"{where}: {name} is {value}")


def _check_segment(segment: Segment, learner_version: int, where: str) -> None:
    length = len(segment.token_ids)
    if not length == len(segment.loss_mask) == len(segment.logprobs):
        raise Rejection(
            "length_mismatch",
            f"{where}: {length} token ids, {len(segment.loss_mask)} mask values, {len(segment.logprobs)} log-probs",
        )
    if length and int(segment.token_ids.min()) < 0:
        raise Rejection("token_id_negative", f"{where}: token id {segment.token_ids.min()}")
    _check_spans(segment, learner_version, where)
    sampled = segment.logprobs[segment.loss_mask]
    if np.isnan(sampled).any():
        raise Rejection("logprob_missing", f"{where}: {np.isnan(sampled).sum()} sampled tokens without log-prob")
    if not np.isfinite(segment.logprobs).all():
        raise Rejection("logprob_not_finite", f"{where}: a log-prob is infinite, or NaN outside the sampled tokens")
    if (sampled > 0).any():
        raise Rejection("logprob_positive", f"{where}: a log-prob is {sampled.max()}, above 0")


def _check_spans(segment: Segment, learner_version: int, where: str) -> None:
    length, end = len(segment.loss_mask), 0
    covered = np.zeros(length, dtype=np.bool_)
    for span in segment.version_spans:
        if not end <= span.start < span.end <= length:
            raise Rejection("span_cover", f"{where}: {span} overlaps, is empty or leaves the {length} tokens")
        if span.version < 0:
            raise Rejection("span_version_unknown", f"{where}: {span} has no version")
        if span.version > learner_version:
            raise Rejection("version_from_future", f"{where}: {span} is newer than the learner, at {learner_version}")
        covered[span.start : span.end] = True
        end = span.end
    if not np.array_equal(covered, segment.loss_mask):
        wrong = int(np.argmax(covered != segment.loss_mask))
        raise Rejection("span_cover", f"{where}: spans and loss_mask differ first at token {wrong}")
