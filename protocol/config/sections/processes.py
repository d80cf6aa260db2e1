"""The queue's settings.

The workers' settings.
"""

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


class WorkerSection(Section):
    count: int = setting(
        1,
        ge=0,
        le=256,
        description="workers that the launcher starts on this machine",
        why="one process runs hundreds of episodes",
    )
    episodes: Count = setting(
        256,
        description="slots: episodes that one worker lets generate at once; one that waits for a tool, a judge or "
        "its group holds none",
        why="fills a server of 64 to 256 sequences",
    )
    open_episodes: Count | Literal["auto"] = setting(
        "auto",
        description="most episodes that one worker has open at once, those included that wait for tools, judges or "
        "their group; no more are opened than keep the slots busy; auto: 8 for each slot, as far as 4 GiB hold their "
        "tokens",
        why="where a judge takes 10 s, 2 for each slot make a step 2.3 times as long as 8 do, 4 make it 1.2 times, and "
        "16 no shorter: by then max_staleness is the bound; an open episode takes about 80 bytes a token",
    )
    request_timeout_s: Seconds = setting(
        600.0, description="time-out of one generation request", why="TRL's request_timeout"
    )
    request_attempts: Count = setting(
        4, description="tries of a request after a 5xx or a lost connection", why="outlives the restart of one server"
    )
    tool_timeout_s: Seconds = setting(
        60.0, description="time-out of one tool call", why="a web request or a test run; slower tools say so"
    )
    environment_timeout_s: Seconds = setting(
        120.0,
        description="time-out of making an environment, of its reset and of its close; its tools and respond have "
        "tool_timeout_s, its get_reward reward_timeout_s",
        why="a container that starts; longer ones say so",
    )
    reward_timeout_s: Seconds = setting(
        120.0, description="time-out of one reward function over one group", why="a judge model over one group"
    )
    episode_timeout_s: Seconds = setting(
        1800.0, description="time-out of one episode", why="half an hour is a very long episode"
    )
    tool_isolation: Literal["thread", "process"] = setting(
        "thread",
        description="where tools run: process has each call in a child process that imports the task file and is "
        "killed when it does not return; arguments and results cross as JSON",
        why="a thread costs nothing; take process for code that may not be trusted to come back",
    )
    user_threads: Count = setting(
        64,
        description="threads, or processes, that tools run in at once; rewards, the data set and the chat format "
        "have as many threads each, environments and agents as many as episodes if that is more",
        why="as many as tools usually wait for; async tools need none",
    )
    reward_attempts: Count = setting(
        2,
        description="tries of a reward that fails, before its group fails; all within reward_timeout_s",
        why="a judge's hiccup costs no generation",
    )
    agent_host: Host = setting(
        "127.0.0.1",
        description="address of this machine that the agents' endpoint listens on, where the task has an agent",
        why="agents run in the worker; one that runs elsewhere, in a sandbox say, needs an address that it reaches",
    )
    agent_port: int = setting(
        0,
        ge=0,
        le=65535,
        description="port of the agents' endpoint; 0: any that is free",
        why="several workers on a machine never clash, and each episode is told the URL",
    )
    keep_messages: bool = setting(
        True,
        description="keep each rollout's conversation, at most 64 KiB of it, to be read: slipstream rollouts",
        why="what the policy says can then be read; it costs little beside the tokens",
    )
