"""Makes tasks of environments of the library `verifiers` (Prime Intellect, version 0.4).

Such an environment has its own rows, its own program that plays an episode, and its own rewards. The program is not
changed. Its requests go to the endpoint of its episode, which records its tokens as for any agent (docs/agents.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any

from slipstream.protocol.config import ConfigError
from slipstream.protocol.rollouts import is_counted
from slipstream.rollout_worker.task.agent import Endpoint
from slipstream.rollout_worker.task.reward_base import MAX_METRICS
from slipstream.rollout_worker.task.task import Task

__all__ = ["verifiers_task"]

# Column that holds a task's number in the library's task set, from 0.
NUMBER = "verifiers_task"
# Servers that an environment's episodes share must start within this time, or the episodes fail.
START_S = 300.0
# The library wants the name of a variable with the key. This one is never set, because an endpoint's key must not be
# in the process's environment.
_NO_KEY = "SLIPSTREAM_HAS_NO_KEY_HERE"
# The endpoint answers a request beyond the run's limits with this code.
_AT_A_LIMIT = "context_length_exceeded"

_endpoint: ContextVar[Endpoint] = ContextVar("endpoint")


def verifiers_task(environment: Any, *, select: Mapping[str, Any] | None = None, **fields: Any) -> Task:
    """Make a task of an environment of `verifiers`.

    The reward is the sum of the environment's rewards. Each of these rewards and the environment's metrics become
    metrics of the run.

    Args:
        environment: Id of a task set, such as "gsm8k-v1"; or an `EnvConfig`.
        select: Selects tasks with the fields of the library's `SelectConfig`: {"limit": 1000, "shuffle": True}.
        **fields: Fields of the `[env]` block of the library's run files, next to a task set's id: taskset={...},
            agent={"harness": {...}, "runtime": {...}}, id=... An `EnvConfig` has its own.

    Raises:
        ConfigError: The library is not installed, or the environment cannot be built or trained.
    """
    vf = _library()
    if fields and not isinstance(environment, str):
        raise ConfigError(
            f"verifiers_task(..., {', '.join(fields)}): fields go with a task set's id; an EnvConfig has its own"
        )
    if isinstance(environment, str):
        environment = {**fields, "taskset": {**fields.get("taskset", {}), "id": environment}}
    try:
        config = vf.resolve_env_config(environment)
        selection = vf.SelectConfig(**(select or {}))
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        raise ConfigError(f"verifiers_task({environment!r:.300}): {error}") from error
    seat = _trained_seat(config)
    player = _Player(_locally_run(config), seat, selection)
    return Task(dataset=player.rows, agent=player.play)


class _Player:
    """Plays episodes of the environment that `config` describes.

    Args:
        config: The library's `EnvConfig`.
        seat: Name of the agent that the policy plays.
        selection: The library's `SelectConfig`.
    """

    def __init__(self, config: Any, seat: str, selection: Any) -> None:
        self._config = config
        self._seat = seat
        self._selection = selection
        self._tasks: list[Any] | None = None
        # An environment's servers and locks belong to one event loop, and user code may run on several loops.
        self._served: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self._ready: dict[asyncio.AbstractEventLoop, asyncio.Future[Any]] = {}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each of the library's tasks, and keep the tasks for `play`.

        Raises:
            ConfigError: The task set has no end, or gave no task.
        """
        vf = _library()
        view = vf.load_taskset(self._config.taskset).select(self._selection)
        if not view.bounded:
            raise ConfigError(
                f"the task set {self._config.taskset.id!r} has no end; limit the number of its tasks: "
                f"verifiers_task(..., select={{'limit': 1000}})"
            )
        self._tasks = list(view)
        if not self._tasks:
            raise ConfigError(f"the task set {self._config.taskset.id!r} gave no task; select={self._selection!r}")
        return [{"prompt": _prompt(task.data), NUMBER: place} for place, task in enumerate(self._tasks)]

    async def play(self, endpoint: Endpoint, verifiers_task: int) -> dict[str, Any]:
        """Play one episode.

        Args:
            endpoint: Answers the episode's requests with the policy.
            verifiers_task: Number of the task, from the row.

        Returns:
            The reward, its components, metrics and the reason for the end.

        Raises:
            RuntimeError: The environment cannot be started, or the episode failed.
        """
        if self._tasks is None:
            await asyncio.to_thread(self.rows)
        assert self._tasks is not None
        vf = _library()
        environment = await self._environment()
        _endpoint.set(endpoint)
        client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=_NO_KEY)
        context = vf.ModelContext(model=endpoint.model, client=client)
        return _outcome(await environment.run_episode(self._tasks[verifiers_task], context), self._seat)

    async def _environment(self) -> Any:
        """Return the environment that is served on this event loop, and start it if needed."""
        loop = asyncio.get_running_loop()
        if loop not in self._served or self._served[loop].done():
            self._ready[loop] = loop.create_future()
            self._served[loop] = loop.create_task(self._serve(self._ready[loop]))
        return await asyncio.shield(self._ready[loop])

    async def _serve(self, ready: asyncio.Future[Any]) -> None:
        """Serve the environment until the event loop's end cancels this task.

        Args:
            ready: Gets the environment, or a `RuntimeError` if it cannot be started.
        """
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(START_S):
                    environment = await asyncio.to_thread(_library().load_environment, self._config)
                    await stack.enter_async_context(environment.serving())
            except BaseException as error:
                if not ready.cancelled():
                    ready.set_exception(RuntimeError(f"the environment could not be started: {_describe(error)}"))
                raise
            environment._interception = clients = _OwnClients(environment._interception)
            stack.push_async_callback(clients.close)
            ready.set_result(environment)
            await asyncio.Event().wait()


class _OwnClients:
    """Wraps the library's interception and gives each running episode its own client, with the episode's key.

    The library itself keeps one client for each endpoint and variable as long as it lives, and takes the key from the
    process's environment.
    """

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._idle: list[Any] = []

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        config = session.ctx.client
        if config.api_key_var != _NO_KEY:  # the agent has its own model
            async with self._shared.acquire(session) as slot:
                yield slot
            return
        # Clients are reused because a new one costs 20 ms, for its TLS context.
        client = self._idle.pop() if self._idle else _library().resolve_client(config)
        client.base_url, client.api_key = config.base_url, _endpoint.get().api_key
        try:
            async with self._shared.acquire(session) as slot:
                session.client = client
                yield slot
        finally:
            self._idle.append(client)

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()


def _outcome(episode: Any, seat: str) -> dict[str, Any]:
    """Read the reward, its components, metrics and the reason for the end from an episode.

    If a limit of the run ended the program, the library gives no score, and the reward is 0.

    Raises:
        RuntimeError: The episode failed, or did not run the policy's agent exactly once.
    """
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        if errors and _AT_A_LIMIT in errors[-1].message:
            return {"stop_condition": _AT_A_LIMIT, "reward": 0.0}
        cause = f"{errors[-1].type}: {errors[-1].message}" if errors else "it was not completed"
        raise RuntimeError(f"verifiers: {cause}")
    traces = [trace for trace in episode.traces if trace.agent.name == seat]
    if len(traces) != 1:
        raise RuntimeError(
            f"the environment {episode.env.id!r} ran its agent {seat!r} {len(traces)} times in one episode, each with "
            f"its own reward; environments that run it once can be trained"
        )
    (trace,) = traces
    components = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {**components, **{name: value for name, value in trace.metrics.items() if value is not None}}
    shown = dict(list(metrics.items())[:MAX_METRICS])
    named = {f"verifiers/{name}" if name == "reward" or is_counted(name) else name: shown[name] for name in shown}
    return {**named, "stop_condition": trace.stop_condition or "", "reward": trace.reward}


def _trained_seat(config: Any) -> str:
    """Return the name of the one agent that the policy plays.

    Raises:
        ConfigError: There is none, or more than one.
    """
    from verifiers.v1.configs.agent import agent_config_fields

    seats = [name for name, spec in agent_config_fields(config).items() if spec.client is None]
    if len(seats) != 1:
        raise ConfigError(
            f"the environment {config.env_id!r} has {len(seats)} agents that the policy would play"
            f"{': ' if seats else ''}{', '.join(seats)}; one can be trained: give each other agent a model and a "
            f"client of its own, as judge={{'model': ..., 'client': {{'type': 'eval', 'base_url': ...}}}}"
        )
    return str(seats[0])


def _locally_run(config: Any) -> Any:
    """Return `config` with a subprocess as runtime for each agent that names no runtime.

    The library's default is a remote sandbox, which needs an account. A program that runs no code of the policy may
    run next to the worker.

    Raises:
        ConfigError: An agent without a runtime executes code of the policy, or needs a container.
    """
    vf = _library()
    from verifiers.v1.configs.agent import agent_config_fields

    chosen: dict[str, Any] = {}
    for name, spec in agent_config_fields(config).items():
        if "runtime" in spec.model_fields_set:
            continue
        harness = vf.load_harness(spec.harness or vf.default_agent_harness(config.taskset.id))
        if harness.EXECUTES_CODE or harness.NEEDS_CONTAINER:
            raise ConfigError(
                f"the agent {name!r} of the environment {config.env_id!r} runs the harness {harness.config.id!r}, "
                f"which executes what the policy writes; say where: {name}={{'runtime': {{'type': 'docker'}}}}, or "
                f"choose one that only talks: {name}={{'harness': {{'id': 'null'}}}}"
            )
        chosen[name] = spec.model_copy(update={"runtime": vf.SubprocessConfig()})
    return config.model_copy(update=chosen)


def _prompt(data: Any) -> list[dict[str, Any]]:
    """Return the prompt that readers and reward functions see. The library renders its own for the policy."""
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    return [*system, {"role": "user", "content": data.prompt_text or "(the environment opens the conversation)"}]


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _library() -> Any:
    try:
        import verifiers.v1
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"verifiers_task needs the library verifiers, version 0.4 ({error}); install slipstream-rl[verifiers]"
        ) from error
    return verifiers.v1
