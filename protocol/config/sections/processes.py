"""Settings of the queue and the workers."""

from __future__ import annotations

import re
import socket
from typing import Annotated, Literal, Self
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from pydantic import AfterValidator, Field, field_validator

from slipstream.protocol.addresses import split_urls
from slipstream.protocol.config.sections.base import (
    WILDCARDS,
    Bytes,
    Count,
    Host,
    Port,
    Seconds,
    Section,
    is_here,
    own_url,
    setting,
    url_of,
)


def _checked_urls(value: str) -> str:
    """Return the URLs, tidied; "auto" as it is. Raises `ValueError` for something else."""
    return value if value == "auto" else ",".join(split_urls(value))


QueueUrl = Annotated[str, AfterValidator(_checked_urls)]

STORES = ("sqlite", ":memory:", "postgresql")
# Those that are written by their name; the other by a URL.
_NAMED_STORES = tuple(name for name in STORES if name != "postgresql")

# A login ends at the last @, so that none of a password is left that should have been percent-encoded.
_POSTGRES = re.compile(r"postgres(?:ql)?://(?:(?P<login>.*)@)?(?P<rest>[^?@]*)(?:\?(?P<query>[^@]*))?")


class StoreName(str):
    """The value of `queue.store`: what is printed, written and sent of it holds no password.

    Attributes:
        password: That of a URL; None if it held none.
    """

    password: str | None

    def __new__(cls, value: str) -> Self:
        """Take the password out of a URL. Raises `ValueError` for what names no store."""
        if isinstance(value, cls):
            return value
        password = None
        if value not in _NAMED_STORES:
            found = _POSTGRES.fullmatch(value)
            if found is None:
                raise ValueError(f"must be {', '.join(map(repr, _NAMED_STORES))} or a URL postgresql://host/database")
            user, colon, given = (found["login"] or "").partition(":")
            query = parse_qsl(found["query"] or "", keep_blank_values=True)
            password = unquote(given) if colon else dict(query).get("password")
            value = f"postgresql://{user}{'@' if user else ''}{found['rest']}"
            if kept := urlencode([pair for pair in query if "password" not in pair[0]], safe="/"):
                value += f"?{kept}"
        self = super().__new__(cls, value)
        self.password = password
        return self


class QueueSection(Section):
    host: Host = setting(
        "127.0.0.1",
        description="address that the queue listens on",
        why="loopback needs no token",
    )
    port: Port = setting(8200, description="port that the queue listens on", why="usually free")
    url: QueueUrl = setting(
        "auto",
        description="URL of the queue for all others; several, separated by commas, for queues that share one "
        "PostgreSQL database; auto: from queue.host and queue.port",
        why="enough on one machine",
    )
    token: str | None = setting(
        None,
        description="the run's secret, from which role tokens derive; SLIPSTREAM_TOKEN overrides it",
        why="only non-loopback addresses need one",
        repr=False,
    )
    store: str = setting(
        "sqlite",
        description="sqlite survives kill -9; postgresql://host/database also survives the queue's machine and "
        "allows standby queues; :memory: is for throw-away runs",
        why="loses nothing in a crash",
    )
    capacity_groups: Count = setting(
        10_000,
        description="maximum groups that the queue holds",
        why="a last bound above what admission allows",
    )
    capacity_bytes: Bytes = setting(
        2 * 1024**3,
        description="maximum bytes of groups that the queue holds",
        why="fits a small machine",
    )
    max_workers: int = setting(
        2048,
        ge=1,
        le=100_000,
        description="maximum workers, with 4 connections each; needs 6 file descriptors a worker and 672 more, "
        "and is lowered to what the process may open",
        why="more than one learner's fleet",
    )
    max_group_bytes: Bytes = setting(
        64 * 1024**2, description="largest group that the queue accepts", why="16 rollouts of 400,000 tokens"
    )
    max_staleness: int = setting(
        4,
        ge=0,
        le=10_000,
        description="K: no token older than K versions contributes to a gradient",
        why="TRL's; most tokens are far younger",
    )
    overage: Literal["mask", "drop"] = setting(
        "mask",
        description="tokens older than K: mask them, or drop the group",
        why="keeps a long episode's young tokens",
    )
    depth: Annotated[float, Field(gt=0, le=10_000)] | Literal["auto"] = setting(
        "auto",
        description="d: groups outstanding, in optimiser steps; auto adapts between 1 and K + 1",
        why="finds the smallest that keeps the learner busy",
    )
    ticket_timeout_s: Seconds = setting(
        60.0, description="time-out of a ticket without a heartbeat", why="six missed heartbeats"
    )
    ticket_max_age_s: Seconds | Literal["auto"] = setting(
        "auto",
        description="maximum age of a ticket despite heartbeats, against hung workers; auto: 2 x "
        "(worker.environment_timeout_s + worker.episode_timeout_s + worker.reward_timeout_s)",
        why="a group may take that long",
    )
    ticket_attempts: Count = setting(
        3,
        description="attempts at a row before it is given up",
        why="survives one bad server or worker",
    )
    lease_timeout_s: Seconds = setting(
        120.0,
        description="time-out of a lease that is not renewed",
        why="three renewals may be lost",
    )
    record: bool = setting(
        False,
        description="write every trained group to the run directory's record/, for slipstream replay",
        why="costs disk: 13 bytes a token in the quickstart",
    )
    record_bytes: Bytes = setting(
        8 * 1024**3,
        description="maximum bytes of the record; when full, the oldest eighth is deleted",
        why="bug reports need the newest steps",
    )
    stall_after_s: Seconds = setting(
        120.0,
        description="seconds without an optimiser step that raise the stall alarm, or 5 median steps if longer",
        why="longer than a slow first episode",
    )

    @field_validator("store")
    @classmethod
    def _store_is_known(cls, value: str) -> str:
        return StoreName(value)

    @property
    def store_kind(self) -> str:
        """Which of `STORES` it is."""
        return self.store.partition("://")[0]

    @property
    def store_password(self) -> str | None:
        """The password that stood in `store`, which itself holds none."""
        return self.store.password if isinstance(self.store, StoreName) else None

    @property
    def address(self) -> str:
        """`url` with "auto" resolved."""
        return self.local_url if self.url == "auto" else self.url

    @property
    def local_url(self) -> str:
        """URL by which this machine reaches the queue that listens here."""
        return own_url(self.host, self.port)

    @property
    def own_address(self) -> str:
        """URL by which others know this queue, as far as its settings say."""
        urls = [] if self.url == "auto" else [url for url in split_urls(self.url) if urlsplit(url).port == self.port]
        for url in urls:
            # Queues on several machines have one port as a rule.
            if len(urls) == 1 or is_here(urlsplit(url).hostname or ""):
                return url
        host = socket.gethostname() if self.host in WILDCARDS else self.host
        return url_of(host, self.port)


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
        description="slots: episodes of one worker that generate at once; waiting for a tool, a judge or the "
        "group takes none",
        why="fills a server of 64 to 256 sequences",
    )
    open_episodes: Count | Literal["auto"] = setting(
        "auto",
        description="maximum open episodes of one worker, waiting ones included; opens only what keeps the slots "
        "busy; auto: 8 per slot, within 4 GiB of tokens",
        why="a slow judge (10 s) costs no more with 8 than with 16",
    )
    request_timeout_s: Seconds = setting(
        600.0, description="time-out of one generation request", why="TRL's request_timeout"
    )
    request_attempts: Count = setting(
        4, description="tries of a request after a 5xx or a lost connection", why="outlives a server restart"
    )
    tool_timeout_s: Seconds = setting(
        60.0,
        description="time-out of one tool call",
        why="enough for a web request or a test run",
    )
    environment_timeout_s: Seconds = setting(
        120.0,
        description="time-out of making, resetting and closing an environment; its tools and respond have "
        "tool_timeout_s, get_reward has reward_timeout_s",
        why="enough to start a container",
    )
    reward_timeout_s: Seconds = setting(
        120.0, description="time-out of one reward function over one group", why="enough for a judge model"
    )
    episode_timeout_s: Seconds = setting(1800.0, description="time-out of one episode", why="half an hour is very long")
    tool_isolation: Literal["thread", "process"] = setting(
        "thread",
        description="where tools run: thread, or process: a child per call that imports the task file and is "
        "killed at the time-out; arguments and results cross as JSON",
        why="threads are free; use process for code that may hang",
    )
    user_threads: Count = setting(
        64,
        description="maximum threads or processes of tools; rewards, data set and chat format have as many each; "
        "environments and agents have that or episodes, whichever is more",
        why="async tools need none",
    )
    reward_attempts: Count = setting(
        2,
        description="tries of a failing reward, within reward_timeout_s, before its group fails",
        why="a judge's hiccup costs no generation",
    )
    agent_host: Host = setting(
        "127.0.0.1",
        description="address that the agents' endpoint listens on, if the task has an agent",
        why="agents run in the worker; a sandbox needs an address it can reach",
    )
    agent_port: int = setting(
        0,
        ge=0,
        le=65535,
        description="port of the agents' endpoint; 0: any free port",
        why="workers never clash",
    )
    keep_messages: bool = setting(
        True,
        description="keep at most 64 KiB of each rollout's conversation, for slipstream rollouts",
        why="shows what the policy writes",
    )
