"""Calls one environment of the user's: `reset`, `respond`, `get_reward`, `close` and its tools.

Invariant: an instance runs one call at a time, even after a time-out. The next one starts only when the one before has
finished. An object that may be in a bad state, or that a call still uses, is
`lost` and serves no other episode (I9).

`EnvironmentInterface` lists what an environment can do. It is read from the class alone, under TRL's names. Slipstream
calls `reset`, `get_reward`, `respond` and `close`. All other public methods are tools. Neither Slipstream nor the
policy calls names that begin with an underscore. A `MethodTool` is described once per class and bound to the instance
of each episode.

The functions at the top convert the returned values: the observation of `reset`, which is added to a row's prompt, the
answer of `respond` to a turn, and the reward.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from slipstream.protocol import reasons
from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.parsers.base import Message
from slipstream.rollout_worker.data.columns import EMPTY_PROMPT, missing_column
from slipstream.rollout_worker.tools.base import Content
from slipstream.rollout_worker.tools.function import FunctionTool, converted
from slipstream.rollout_worker.tools.toolbox import ToolBox
from slipstream.rollout_worker.user_code import Call, Kind, UserCode, UserCodeError, defined_at
from slipstream.rollout_worker.user_code.values import as_number, bounded, plain, type_name
from slipstream.rollout_worker.vision.messages import has_images, seen_parts
from slipstream.rollout_worker.vision.processor import ImageProcessor, Seen

# Text or messages. None if the environment returned nothing.
Observation: TypeAlias = str | list[Message] | None

OURS = ("reset", "get_reward", "respond", "close")

# Methods that always get the same arguments, and their names.
_CALLED_WITH: Mapping[str, tuple[str, ...]] = {"get_reward": (), "respond": ("messages",), "close": ()}

# Seconds to wait for a call that was given up. A cancelled coroutine needs a moment to end, and a thread may need far
# longer, so it is not waited for.
GRACE_S = 1.0

_SPOILT_BY = (reasons.TIMEOUT, "SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError")


def observed(returned: Any, images: ImageProcessor | None = None) -> Observation:
    """Convert the value that `reset` returned to plain data.

    It reads the user's objects, so it runs where user code runs.

    Args:
        returned: None, text, parts of text or images (which TRL takes too), or messages.
        images: Opens images; None for a policy that reads text alone.

    Raises:
        TypeError: The value is none of these.
        ValueError: A part is not text, or a message holds an object that cannot be sent.
    """
    if returned is None:
        return None
    if isinstance(returned, str):
        return bounded(returned)
    entries = [returned] if isinstance(returned, Mapping) else returned
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, Mapping) for entry in entries):
        raise TypeError(
            f"it returned a {type_name(returned)}; return None, text, or a list of messages: "
            f"[{{'role': 'user', 'content': ...}}]"
        )
    if images is not None and has_images([{"content": entries}]):
        return [{"role": "user", "content": seen_parts(entries, images, bounded)}]
    if images is not None:
        entries = [_with_images(entry, images) for entry in entries]
    found: list[Message] = plain(entries, "what it returned", keep=(Seen,))
    if all("role" in entry for entry in found):
        return [{**entry, "content": _text(entry.get("content"), images)} for entry in found] or None
    return _joined(found)


def _with_images(message: Mapping[str, Any], images: ImageProcessor) -> Mapping[str, Any]:
    return {**message, "content": seen_parts(message["content"], images)} if has_images([message]) else message


def answered(returned: Any, images: ImageProcessor | None = None) -> list[Message] | None:
    """Convert the value that `respond` returned to messages of the user's role. It runs where `observed` does.

    Returns:
        The messages, or None to end the episode.

    Raises:
        TypeError: As for `observed`.
        ValueError: As for `observed`, and if a message has another role or no text.
    """
    found = observed(returned, images)
    if found is None or isinstance(found, str):
        return None if found is None else [{"role": "user", "content": found}]
    if wrong := next((message for message in found if message["role"] != "user"), None):
        raise ValueError(
            f"it returned a message of role {wrong['role']!r:.80}; an answer to the policy has role 'user'"
        )
    if any(not isinstance(message["content"], str) and not (images and has_images([message])) for message in found):
        raise ValueError("it returned a message without text; give it 'content'")
    return [{"role": "user", "content": message["content"]} for message in found]


def rewarded(value: Any) -> float | None:
    """Convert the value that `get_reward` returned. It runs where `observed` does.

    Returns:
        The reward, or None for no reward.

    Raises:
        TypeError: The value is not a number.
        ValueError: It is not finite.
    """
    if value is None:
        return None
    reward = as_number(value)
    if not math.isfinite(reward):
        raise ValueError(f"it returned {reward}; a reward is a finite number, or None for no reward")
    return reward


def folded(prompt: Sequence[Message], observation: Observation) -> list[Message]:
    """Add the observation of `reset` to a row's prompt.

    Text is appended to the last message of the user's role, as in TRL. Messages follow those of the row, or stand alone
    if the row has no prompt.

    Returns:
        The prompt of one episode.
    """
    messages = list(prompt)
    if observation is None:
        return messages
    if not isinstance(observation, str):
        return [*([] if messages == EMPTY_PROMPT else messages), *observation]
    last = next((at for at in reversed(range(len(messages))) if messages[at].get("role") == "user"), None)
    if last is None:
        return [*messages, {"role": "user", "content": observation}]
    content = messages[last].get("content")
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": observation}]
    else:
        content = (content or "") + observation
    messages[last] = {**messages[last], "content": content}
    return messages


def _text(content: Any, images: ImageProcessor | None) -> Any:
    """Join parts of text into one text. Parts with images stay for a policy that sees. The chat format decides about
    other content."""
    if isinstance(content, str):
        return bounded(content)
    if images is not None and has_images([{"content": content}]):
        return content
    return _joined(content) if isinstance(content, list) else content


def _joined(parts: list[Any]) -> str:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type_name(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"it returned a part of type {kind!r:.80}, and the policy reads text alone")
    return bounded("".join(part["text"] for part in parts))


class MethodTool(FunctionTool):
    """Offers a public method of an environment as a tool.

    Args:
        cls: Name of the environment's class.
        method: The method, bound to any instance of the class. The instance is not kept.

    Raises:
        ConfigError: The method cannot be described to the policy.
    """

    in_order = True

    def __init__(self, cls: str, method: Callable[..., Any]) -> None:
        try:
            super().__init__(method)
        except ConfigError as error:
            text = str(error).replace("Task(tools=...)", f"Task(environment=...), class {cls}", 1)
            raise ConfigError(
                f"{text}. Public methods of an environment are tools: begin the name of one that is not with _"
            ) from None
        self.function = getattr(method, "__func__", method)
        self._player: Instance | None = None

    def bound(self, player: Instance) -> Self:
        tool = copy.copy(self)
        tool._player = player
        return tool

    async def _content(self, arguments: dict[str, Any], timeout_s: float) -> Content:
        assert self._player is not None, "a tool is bound before it is called"
        content: Content = await self._player.call(
            self.name, self.read, timeout_s, arguments, lambda given: converted(given, self.converters)
        )
        return content


@dataclass(frozen=True, slots=True)
class EnvironmentInterface:
    """Lists what the instances of an environment can do.

    Attributes:
        cls: Name of the class. Its reward is counted under this name.
        methods: Public functions of the class, by name.
        tools: Names of the methods that the policy may call, in alphabetical order as in TRL.
        begins_by: The column of a row without which the episodes of a group begin differently, if its class names one.
    """

    cls: str
    methods: Mapping[str, Callable[..., Any]]
    tools: tuple[str, ...]
    begins_by: str | None = None

    @property
    def rewards(self) -> bool:
        return "get_reward" in self.methods

    @property
    def responds(self) -> bool:
        return "respond" in self.methods

    def has(self, other: EnvironmentInterface) -> bool:
        """Tell whether an instance with the interface `other` has the same methods.

        The classes may differ, because a factory may make a class for each instance.
        """
        return self.methods.keys() == other.methods.keys()

    def reset_arguments(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Select the columns of a row that `reset` takes.

        Args:
            columns: Values of the row, by column.

        Raises:
            ConfigError: `reset` needs a column that the row does not have.
        """
        parameters = list(inspect.signature(self.methods["reset"]).parameters.values())[1:]
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return dict(columns)
        by_name = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        if missing := [each.name for each in by_name if each.default is each.empty and each.name not in columns]:
            taker = f"Task(environment=...): {self.cls}.reset"
            raise missing_column(taker, missing[0], columns, "; write it as def reset(self, **columns)")
        return {each.name: columns[each.name] for each in by_name if each.name in columns}


def interface_of(instance: Any) -> EnvironmentInterface:
    """Read the interface from the class alone, so that no property is read. This may run user code of a metaclass."""
    cls = type(instance)
    found = dict(inspect.getmembers(cls, predicate=inspect.isfunction))
    methods = {name: method for name, method in found.items() if not name.startswith("_")}
    tools = tuple(name for name in sorted(methods) if name not in OURS)
    begins_by = inspect.getattr_static(cls, "begins_by", None)
    return EnvironmentInterface(cls.__name__, methods, tools, begins_by if isinstance(begins_by, str) else None)


def no_reset(given_as: str, cls: str) -> ConfigError:
    """Make the error for a class without a method `reset`.

    Args:
        given_as: How the task names the environment.
        cls: Name of the class.
    """
    return ConfigError(
        f"{given_as}: {cls} has no method reset, which begins each episode; write one: def reset(self, **columns), "
        f"which returns None, text or messages"
    )


def tools_of(interface: EnvironmentInterface, instance: Any) -> list[MethodTool]:
    """Return the tools of any instance with this interface.

    Args:
        instance: One such instance; it is not kept.

    Raises:
        ConfigError: The class has no `reset`, a method cannot be called as Slipstream calls it, or a tool cannot be
            described to the policy.
    """
    if "reset" not in interface.methods:
        raise no_reset("Task(environment=...)", interface.cls)
    for name, given in _CALLED_WITH.items():
        if name in interface.methods:
            _check_call(interface.cls, getattr(instance, name), name, given)
    return [MethodTool(interface.cls, getattr(instance, name)) for name in interface.tools]


def _check_call(cls: str, method: Callable[..., Any], name: str, given: tuple[str, ...]) -> None:
    """Check that a method can be called with the arguments `given`, by name. Raises `ConfigError` otherwise."""
    try:
        inspect.signature(method).bind(**dict.fromkeys(given))
    except TypeError as error:
        raise ConfigError(
            f"Task(environment=...): {cls}.{name} cannot be called: {error}; write it as "
            f"def {name}({', '.join(('self', *given))})"
        ) from None


class Holder:
    """Carries an object to the thread that uses it last, and therefore frees it.

    It is callable, because the boundary copies arguments that are not.
    """

    def __init__(self, held: Any) -> None:
        self._held = [held]

    def __call__(self) -> Any:
        return self._held.pop()


class Instance:
    """One environment instance, with its calls in order.

    Attributes:
        name: Name of the factory that made the object, or None if there is only one factory.
        object: The user's object.
        interface: What the object can do.
        lost: True if the object must not serve another episode.
        free: True if no call uses the object.
    """

    def __init__(self, name: str | None, made: Any, interface: EnvironmentInterface, code: UserCode) -> None:
        self.name = name
        self.object = made
        self.interface = interface
        self.lost = False
        self._code = code
        self._line = asyncio.Lock()
        self._last: Call | None = None
        self._last_method = ""
        self._tools: ToolBox | None = None

    @property
    def free(self) -> bool:
        return self._last is None or self._last.finished.is_set()

    async def until_free(self, timeout_s: float) -> bool:
        """Wait until the object is free. Returns False if it is still in use after `timeout_s` seconds."""
        if not self.free:
            assert self._last is not None
            try:
                async with asyncio.timeout(timeout_s):
                    await self._last.finished.wait()
            except TimeoutError:
                return False
        return True

    def tools(self, box: ToolBox) -> ToolBox:
        """Return the tools of `box`, with those that are methods bound to this instance."""
        if self._tools is None:
            self._tools = box.with_each(lambda tool: tool.bound(self) if isinstance(tool, MethodTool) else tool)
        return self._tools

    async def call(
        self,
        method: str,
        plain: Callable[[Any], Any],
        timeout_s: float,
        arguments: dict[str, Any] | None = None,
        convert: Callable[[dict[str, Any]], dict[str, Any]] = dict,
        wait_s: float = GRACE_S,
    ) -> Any:
        """Call a method of the object after the calls before it have ended.

        Args:
            method: Name of the method.
            plain: Turns the result into plain data.
            timeout_s: Seconds that the call may take.
            arguments: Arguments of the method, by name.
            convert: Converts the arguments where user code runs.
            wait_s: Seconds to wait for an earlier call that was given up and is still running.

        Returns:
            `plain(self.object.method(**convert(arguments)))`.

        Raises:
            UserCodeError: The call failed or was late, or an earlier call is still running.
        """
        named = self.interface.methods[method]

        def run(**given: Any) -> Any:
            return getattr(self.object, method)(**convert(given))

        async with self._line:
            if not await self.until_free(wait_s):
                text = f"not called: {self._last_method} of the same {self.interface.cls} has not come back"
                raise UserCodeError(text, reasons.TIMEOUT, defined_at(named))
            call = self._code.begin(run, plain, timeout_s, Kind.ENVIRONMENT, named, **(arguments or {}))
            self._last, self._last_method = call, method
            try:
                return await call.result()
            except UserCodeError as error:
                self.lost = self.lost or (call.began and error.kind in _SPOILT_BY)
                raise

    def emptied(self) -> Holder:
        """Hand the object over in a `Holder`. The instance no longer holds it."""
        holder, self.object, self._tools = Holder(self.object), None, None
        return holder
