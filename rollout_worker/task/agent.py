"""A task's agent: a program of the user's that owns its loop and asks the policy as OpenAI's clients do."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.messages import MAX_METRIC
from slipstream.protocol.rollouts import is_counted
from slipstream.rollout_worker.data.columns import missing_column, without_empty_prompt
from slipstream.rollout_worker.task.reward_base import (
    MAX_COLUMNS,
    MAX_METRICS,
    NAME_CHARACTERS,
    RESULTS,
    TEXT_CHARACTERS,
)
from slipstream.rollout_worker.user_code.errors import UserCodeError, gives_items, is_async, name_of
from slipstream.rollout_worker.user_code.values import encodable, type_name

logger = logging.getLogger(__name__)

# The parameter of an agent that gets the endpoint, or those of its roles by name; all others get columns.
ENDPOINT = "endpoint"
ENDPOINTS = "endpoints"
# Name of the note that holds an agent's text.
TEXT = "agent_result"

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of the policy in one episode, as `openai.AsyncOpenAI(base_url=..., api_key=...)` takes it.

    Attributes:
        base_url: Ends in /v1.
        api_key: Valid until the episode is over.
        model: The name to ask for.
        temperature: The temperature of the episode, for clients that must name one.
    """

    base_url: str
    api_key: str
    model: str
    temperature: float = 1.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Endpoint:
        return self  # The copy would equal it: its fields cannot be changed.


@dataclass(frozen=True, slots=True)
class AgentResult:
    """An agent's result.

    Attributes:
        given: Plain data, for reward functions.
        reward: Its own reward; None if it gave none.
        metrics: Numbers, as in a `Rollout`.
        extra: Texts, as in a `Rollout`.
        by_role: The reward of each role, where it has several.
    """

    given: Any = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)
    by_role: dict[str, float] = field(default_factory=dict)


# What an agent's errors do: "fail" its episode, or by their class give it this reward.
AgentErrors = Mapping[type[BaseException], float] | Literal["fail"]


class Agent:
    """The function `agent(endpoint=..., **columns)`, sync or async. It gets the columns that its signature names, or
    all with `**columns`. Raises `ConfigError` for a function that cannot be called so.

    Args:
        has_roles: Whether it plays several roles, and gets `endpoints` in place of `endpoint`.
    """

    def __init__(self, function: Callable[..., Any], errors: AgentErrors = "fail", has_roles: bool = False) -> None:
        self._reached_by = ENDPOINTS if has_roles else ENDPOINT
        self._errors = {} if errors == "fail" else _checked(errors)
        if not callable(function):
            raise ConfigError(
                f"Task(agent={function!r:.200}): it cannot be called; give a function: "
                f"async def agent(endpoint, prompt, **columns)"
            )
        self.function = function
        self.name = name_of(function)
        if gives_items(function):
            raise ConfigError(
                f"Task(agent=...): {self.name} yields, and an agent returns: nothing, its text, a number that is its "
                f"reward, or a dict of numbers and texts; write return in place of yield"
            )
        try:
            self._parameters: Mapping[str, inspect.Parameter] | None = inspect.signature(function).parameters
        except (TypeError, ValueError):  # a builtin without a signature
            self._parameters = None
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in (self._parameters or {}).values())
        if self._parameters is not None and self._reached_by not in self._parameters and not self._takes_all:
            each = "endpoints['role']" if has_roles else ENDPOINT
            raise ConfigError(
                f"Task(agent=...): {self.name} takes no {self._reached_by!r}, so it could not reach the policy; write "
                f"it as async def {self.name}({self._reached_by}, prompt, **columns), and give {each}.base_url, "
                f"{each}.api_key and {each}.model to its client"
            )

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if it cannot be called with the columns of `row`."""
        for taken, who in ((self._reached_by, "agents"), (RESULTS, "reward functions")):
            if taken in row:
                raise ConfigError(
                    f"Task(dataset=...): the column {taken!r} is a name that {who} already get; rename it"
                )
        for name, parameter in (self._parameters or {}).items():
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ConfigError(
                    f"Task(agent=...): {self.name} takes {name!r} by position alone, and agents are called by names; "
                    f"leave out the slash in its parameters"
                )
            needed = parameter.default is parameter.empty and parameter.kind in _BY_NAME
            if needed and name != self._reached_by and name not in row:
                remedy = f"; it may take {self._reached_by!r} besides"
                raise missing_column(f"Task(agent=...): {self.name}", name, row, remedy)

    def arguments(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that it is called with."""
        columns = without_empty_prompt(columns)
        if self._takes_all or self._parameters is None:
            return dict(columns)
        return {name: value for name, value in columns.items() if name in self._parameters}

    def reward_of(self, failure: UserCodeError) -> float | None:
        """Return the reward of an episode whose agent raised this; None if it fails. As with `except` clauses, the
        first class counts that the error is of."""
        raised = failure.raised
        found = (reward for kind, reward in self._errors.items() if raised is not None and issubclass(raised, kind))
        return next(found, None)


def _checked(errors: Any) -> dict[type[BaseException], float]:
    is_class = lambda kind: isinstance(kind, type) and issubclass(kind, BaseException)  # noqa: E731
    if not isinstance(errors, Mapping) or not errors or not all(map(is_class, errors)):
        raise ConfigError(
            f'Task(agent_errors={errors!r:.200}): give "fail", or a reward for each class of error, such as '
            f"{{ValueError: 0.0}}"
        )
    for kind, reward in errors.items():
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= MAX_METRIC:
            raise ConfigError(
                f"Task(agent_errors={{{kind.__name__}: {reward!r:.200}}}): the reward must be a finite number"
            )
    return {kind: float(reward) for kind, reward in errors.items()}


def max_open(config: RunConfig, agent: Callable[..., Any], threads: int) -> int:
    """Return the maximum number of episodes that a worker has open. A plain `def` agent holds one of `threads` for as
    long as its episode takes, and episodes that are open beyond them would only grow old."""
    if is_async(agent) or config.max_open <= threads:
        return config.max_open
    if config.worker.open_episodes != "auto":
        logger.warning(
            "worker.open_episodes = %d: %s is a plain def, each call of which has a thread, so only %d episodes are "
            "open; raise worker.user_threads, or write it as async def",
            config.worker.open_episodes,
            name_of(agent),
            threads,
        )
    return threads


def check_settings(config: RunConfig) -> None:
    """Raise `ConfigError` for settings that apply to tools only."""
    if config.task.mcp_servers:
        raise ConfigError(
            f"task.mcp_servers = {config.task.mcp_servers}: the task has an agent, which runs its own loop and names "
            f"its tools in its requests; leave it out, and call the servers from the agent"
        )
    if config.worker.tool_isolation == "process":
        raise ConfigError(
            "worker.tool_isolation = process: the task has an agent, which runs in the worker and calls its tools "
            "itself; set thread, and start processes from the agent where its tools need them"
        )


def read_result(value: Any) -> AgentResult:
    """Read what an agent returned: None, its text, its own reward as a number, or a dict.

    An `AgentResult` is taken as it is. The entry `reward` of a dict is its reward. Other numbers are metrics, and texts
    are notes for people. Called behind the boundary around user code.

    Raises:
        TypeError: It is something else.
        ValueError: A number or a name cannot be kept.
    """
    if value is None:
        return AgentResult()
    if isinstance(value, AgentResult):
        return value
    if isinstance(value, str):
        text = _text(value)
        return AgentResult(encodable(value), extra={TEXT: text})
    if isinstance(value, Mapping):
        return _read_mapping(value)
    number = _number(value)
    if number is None:
        raise TypeError(
            f"the agent returned a {type_name(value)}; return nothing, its text, a number that is its reward, or a "
            f"dict of numbers and texts"
        )
    return AgentResult(number, reward=_finite("its reward", number))


def read_result_of(roles: Collection[str]) -> Callable[[Any], AgentResult]:
    """Return what reads the result of an agent that plays these roles: a dict with a number for each role, which is its
    reward; other entries are as in `read_result`. Raises as that does."""

    def read(value: Any) -> AgentResult:
        if not isinstance(value, Mapping) or not (named := {key: value[key] for key in value if key in roles}):
            raise TypeError(
                f"the agent returned a {type_name(value)}; return a dict with the reward of each role: "
                f"{{{', '.join(f'{role!r}: 0.0' for role in roles)}}}"
            )
        rest = _read_mapping({key: entry for key, entry in value.items() if key not in named})
        if rest.reward is not None:
            raise ValueError("the agent returned 'reward', and it plays several roles; name the role that gets it")
        by_role = {}
        for role, entry in named.items():
            number = _number(entry)
            if number is None and entry is not None:
                raise TypeError(f"the agent returned {role!r}: a {type_name(entry)}; give that role's reward, a number")
            if number is not None:
                by_role[role] = _finite(f"the reward of {role!r}", number)
        return replace(rest, by_role=by_role)

    return read


def _read_mapping(value: Mapping[Any, Any]) -> AgentResult:
    given: dict[str, Any] = {}
    reward: float | None = None
    metrics: dict[str, float] = {}
    extra: dict[str, str] = {}
    for key, entry in value.items():
        name = encodable(str(key)[:NAME_CHARACTERS])
        number = _number(entry)
        if entry is None:
            given[name] = None
        elif isinstance(entry, str) and name == "reward":
            raise TypeError(f"the agent returned 'reward': {entry!r:.80}, which is text; give a number")
        elif isinstance(entry, str):
            given[name], extra[name] = encodable(entry), _text(entry)
        elif number is None:
            raise TypeError(f"the agent returned {name!r}: a {type_name(entry)}; give numbers and texts")
        elif name == "reward":
            given[name] = reward = _finite("its reward", number)
        elif is_counted(name):
            raise ValueError(f"the agent returned {name!r}, which is a metric of Slipstream's own; choose another name")
        else:
            given[name] = metrics[name] = _finite(repr(name), number)
    if len(metrics) > MAX_METRICS or len(extra) > MAX_COLUMNS:
        raise ValueError(
            f"the agent returned {len(metrics)} numbers and {len(extra)} texts; at most {MAX_METRICS} and "
            f"{MAX_COLUMNS} are kept"
        )
    return AgentResult(given, reward, metrics, extra)


def _number(value: Any) -> float | None:
    """Return a number, also of numpy or a tensor; None for anything else."""
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        return None
    return float(value)


def _finite(what: str, number: float) -> float:
    """Return the number. Raises `ValueError` if it is not finite or too large to report; `what` begins the message."""
    if not math.isfinite(number) or abs(number) > MAX_METRIC:
        raise ValueError(f"the agent returned {what} as {number}; give a finite number below {MAX_METRIC:g}")
    return number


def _text(value: str) -> str:
    return encodable(value if len(value) <= TEXT_CHARACTERS else f"{value[: TEXT_CHARACTERS - 3]}...")
