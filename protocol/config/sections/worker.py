"""The workers' settings."""

from __future__ import annotations

from typing import Literal

from protocol.config.sections.base import Count, Host, Seconds, Section, setting


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
