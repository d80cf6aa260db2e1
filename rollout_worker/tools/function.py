"""Makes tools of functions and of the user's own `Tool` objects. Both run as user code, which cannot end a worker."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from slipstream.rollout_worker.tools.argument_text import short
from slipstream.rollout_worker.tools.base import ArgumentsError, Content, Tool, as_text
from slipstream.rollout_worker.tools.schema import described
from slipstream.rollout_worker.user_code import UserCode, UserCodeError, defined_at


class IsolatedCode(Protocol):
    """Runs a tool in a child process, by the tool's name in the task. A part of `UserCode`."""

    async def call_isolated(self, tool_name: str, arguments: dict[str, Any], timeout_s: float) -> str: ...


class InvalidArguments(Exception):
    """Is raised when pydantic, or a check in the user's own types, refuses arguments."""


class FunctionTool:
    """Makes a tool of a function, method, partial or callable object, sync or async.

    Args:
        function: The function. It needs type hints and a docstring, which describe it to the policy.
        code: Runs the function as user code.
        isolated: Runs it in a child process; None to run it in this process.

    Attributes:
        function: The function, changed to take arguments as JSON gives them.
        read: Converts what it returns, where user code runs.

    Raises:
        ConfigError: The function cannot be described to the policy.
    """

    def __init__(
        self, function: Callable[..., Any], code: UserCode | None = None, isolated: IsolatedCode | None = None
    ) -> None:
        found = described(function)
        self.name, self.schema, self.converters = found.name, found.schema, found.converters
        self.function = _converting(function, found.converters) if found.converters else function
        place = defined_at(function)
        self.origin = (
            f"the function at {place}"
            if place
            else f"a function of {getattr(function, '__module__', None) or 'the task'}"
        )
        self.read: Callable[[object], Content] = as_text
        self._code = code or UserCode()
        self._isolated = isolated

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> Content:
        try:
            return await self._content(arguments, timeout_s)
        except UserCodeError as error:
            if error.kind != InvalidArguments.__name__:
                raise
            raise ArgumentsError(f"bad arguments: {str(error).removeprefix(f'{error.kind}: ')}") from None

    async def _content(self, arguments: dict[str, Any], timeout_s: float) -> Content:
        if self._isolated is not None:
            return await self._isolated.call_isolated(self.name, arguments, timeout_s)
        content: Content = await self._code.call(self.function, self.read, timeout_s, **arguments)
        return content


class GuardedTool:
    """Runs the call of a user's `Tool` object as user code."""

    def __init__(self, tool: Tool, code: UserCode) -> None:
        self.schema = tool.schema
        self.origin = getattr(tool, "origin", f"a {type(tool).__name__} of the task")
        self.read: Callable[[object], Content] = as_text
        self._tool = tool
        self._code = code

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> Content:
        arguments = {"arguments": arguments, "timeout_s": timeout_s}
        content: Content = await self._code.call(self._tool.call, self.read, timeout_s, **arguments)
        return content


def callables(tools: Sequence[Any]) -> dict[str, Callable[..., Any]]:
    """Return the functions among a task's tools by name.

    A child process uses them: it receives a name and arguments. The functions take arguments as JSON gives them.

    Raises:
        ConfigError: A function cannot be described to the policy.
    """
    made = [FunctionTool(tool) for tool in tools if not is_tool(tool)]
    return {tool.name: tool.function for tool in made}


def is_tool(value: Any) -> bool:
    """Return whether a value is a `Tool` rather than a function."""
    return (
        not inspect.isroutine(value)
        and hasattr(type(value), "call")
        and (hasattr(type(value), "schema") or "schema" in getattr(value, "__dict__", {}))
    )


def _converting(function: Callable[..., Any], converters: Mapping[str, TypeAdapter[Any]]) -> Callable[..., Any]:
    """Wrap a function so that it takes JSON values in place of pydantic's.

    Arguments that are not given keep their defaults. Call the wrapper as user code, because checks in the user's
    types may run in it.
    """

    if inspect.iscoroutinefunction(function):

        async def asynchronous(**arguments: Any) -> Any:
            return await function(**converted(arguments, converters))

        return _wrapped(asynchronous, function)

    def synchronous(**arguments: Any) -> Any:
        return function(**converted(arguments, converters))

    return _wrapped(synchronous, function)


def converted(arguments: Mapping[str, Any], converters: Mapping[str, TypeAdapter[Any]]) -> dict[str, Any]:
    """Convert arguments to the types of the function's parameters.

    Args:
        arguments: JSON values by name.
        converters: Adapters by name; arguments without one stay as they are.

    Raises:
        InvalidArguments: A value does not fit its type.
    """
    return {
        name: _converted(name, value, converters[name]) if name in converters else value
        for name, value in arguments.items()
    }


def _wrapped(wrapper: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a wrapper the function's name and place, so that an error names the user's file and not this one."""
    while isinstance(function, functools.partial):
        function = function.func
    return functools.wraps(function if inspect.isroutine(function) else type(function).__call__)(wrapper)


def _converted(name: str, value: Any, adapter: TypeAdapter[Any]) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=True)[0]
        where = "".join(f"{part}: " for part in (name, *first["loc"]))
        raise InvalidArguments(f"{where}{short(first['input'])}: {first['msg']}") from None
