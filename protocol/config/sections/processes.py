"""The queue's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from protocol.config.sections.base import Bytes, Count, Host, Port, Seconds, Section, is_number, own_url, setting


class QueueSection(Section):
    host: Host = setting(
        "127.0.0.1",
        description="address that the queue listens on",
        why="nobody else can reach it, so no token is needed",
    )
    port: Port = setting(
        8200, description="port that the queue listens on", why="free on most machines, and not vLLM's"
    )
    token: str | None = setting(
        None,
        description="the run's secret, which every role's token is derived from; SLIPSTREAM_TOKEN in the environment "
        "overrides it",
        why="loopback needs none; every other address refuses to start without",
        repr=False,
    )
    store: Literal["sqlite", ":memory:"] = setting(
        "sqlite",
        description="sqlite survives kill -9; :memory: is for throw-away runs",
        why="a crash of any process loses nothing",
    )
    capacity_groups: Count = setting(
        10_000,
        description="most groups that the queue holds",
        why="far above what admission lets out; a last bound, not a throttle",
    )
    capacity_bytes: Bytes = setting(
        2 * 1024**3,
        description="most bytes of groups that the queue holds",
        why="fits the memory and disk of a small machine",
    )
    max_group_bytes: Bytes = setting(
        64 * 1024**2, description="largest group that the queue accepts", why="16 rollouts of 400,000 tokens"
    )
    max_staleness: int = setting(
        4,
        ge=0,
        le=10_000,
        description="K: no token older than K versions contributes to a gradient",
        why="TRL's default; pacing keeps most tokens far younger, at 1.2 in the quickstart",
    )
    overage: Literal["mask", "drop"] = setting(
        "mask",
        description="what happens to tokens older than K: mask them, or drop the whole group",
        why="keeps what is young of a long episode",
    )
    depth: float | Literal["auto"] = setting(
        "auto",
        description="d: groups outstanding, in optimiser steps; auto adapts between 1 and K + 1",
        why="no figure fits two tasks; it finds the smallest that keeps the learner busy",
    )
    ticket_timeout_s: Seconds = setting(
        60.0, description="time-out of a ticket that no heartbeat renews", why="six missed heartbeats"
    )
    ticket_max_age_s: Seconds | Literal["auto"] = setting(
        "auto",
        description="time-out of a ticket however often it is renewed, so that a worker that hangs cannot hold it for "
        "ever; auto is 2 x (worker.environment_timeout_s + worker.episode_timeout_s + worker.reward_timeout_s)",
        why="all that a group may take, in an environment too, which is made and reset; and an episode may wait for a "
        "slot",
    )
    ticket_attempts: Count = setting(
        3,
        description="times that a row is issued before it is given up",
        why="one bad server or worker is outlived, a bad row is not tried for ever",
    )
    lease_timeout_s: Seconds = setting(
        120.0,
        description="time-out of a lease that is not renewed",
        why="three renewals may be lost, and a dead learner's groups are not held for long",
    )
    record: bool = setting(
        False,
        description="write every group that is trained, with its step, into the run directory's record/, for "
        "slipstream replay",
        why="takes disk: 13 bytes a token in the quickstart, with the messages",
    )
    record_bytes: Bytes = setting(
        8 * 1024**3,
        description="most bytes of the record; the oldest eighth is deleted where it is full",
        why="the newest steps, from a checkpoint on, are what a bug report needs",
    )
    stall_after_s: Seconds = setting(
        120.0,
        description="seconds without an optimiser step that raise the stall alarm, or 5 median steps if longer",
        why="longer than a slow first episode, short enough to look up from",
    )

    @field_validator("depth", mode="before")
    @classmethod
    def _depth_is_positive(cls, value: object) -> object:
        if value != "auto" and not is_number(value, above=0, most=10_000):
            raise ValueError("must be 'auto' or a number above 0 and at most 10000")
        return value

    @property
    def url(self) -> str:
        return own_url(self.host, self.port)
