"""Describes failures of user code as text: the error, the line in the user's file, and the remedy if one is known.

Invariant: no exception of user code leaves `contained`, which surrounds every call of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any

from slipstream.rollout_worker.user_code.values import encodable, type_name

# Maximum length of one error's text, because an exception may hold a whole page.
MAX_CHARACTERS = 2000

# Names of module signal that tell an alarm, which only a main thread can handle.
_ALARMS = {"SIGALRM", "alarm", "setitimer"}

# The words in asyncio's errors for futures, and for locks, events and queues.
_OF_ANOTHER_LOOP = ("different loop", "different event loop")


class UserCodeError(Exception):
    """The user's function failed or did not answer in time. The text describes the failure.

    Text, `kind` and `where` can be sent as they are.

    Attributes:
        kind: Type of the error, or `reasons.TIMEOUT`.
        where: The file:line in the user's file, or None if there is none.
        waited_s: Seconds that the call waited for a thread. They do not count as time of the call itself.
        raised: Class of the error; None if none was raised in this process.
    """

    waited_s = 0.0
    raised: type[BaseException] | None = None

    def __init__(self, text: str, kind: str, where: str | None) -> None:
        super().__init__(encodable(text))
        self.kind = encodable(kind)
        self.where = None if where is None else encodable(where)


class NotCalled(UserCodeError):
    """The function was not called, because too many earlier calls hang.

    The error gives no evidence against the function itself.
    """


def failure_of(error: BaseException, file: str | None, otherwise: str | None = None) -> UserCodeError:
    """Describe `error` as a `UserCodeError` with the innermost line of the user's `file`.

    This runs the error's `__str__`, which may fail.

    Args:
        error: The exception.
        file: The user's file, or None if unknown.
        otherwise: The file:line to name if the error was not raised in `file`.
    """
    kind = type_name(error)
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    try:
        text = f"{kind}({error})" if isinstance(error, SystemExit) else f"{kind}: {error}"
    except BaseException as another:
        text = f"{kind}, whose text fails with {type_name(another)}"
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}... ({len(text) - MAX_CHARACTERS} characters left out)"
    failure = UserCodeError(text + _remedy(kind, text), kind, f"{file}:{lines[-1]}" if lines else otherwise)
    failure.raised = type(error)
    return failure


def failure_in(function: Callable[..., Any], error: BaseException) -> UserCodeError:
    """Describe an error that `function`, or the code that works on its result, raised.

    A `UserCodeError` is returned as it is, without the frames that would keep the user's objects alive.
    """
    if isinstance(error, asyncio.CancelledError):
        text = "it cancelled itself, or other code on its event loop cancelled it"
        return UserCodeError(text, "CancelledError", defined_at(function))
    if isinstance(error, UserCodeError):
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    return failure_of(error, file_of(function), defined_at(function))


def defined_at(function: Callable[..., Any]) -> str | None:
    """Return the file:line where a function, method, partial or callable object is defined.

    The result is None if the function is not written in Python.
    """
    code = _code(function)
    return None if code is None else encodable(f"{code.co_filename}:{code.co_firstlineno}")


def file_of(function: Callable[..., Any]) -> str | None:
    """Return the file where a function is defined, or None, as for `defined_at`."""
    code = _code(function)
    return None if code is None else code.co_filename


def place_in(function: Callable[..., Any], thread: int | None) -> str | None:
    """Return the file:line that `function` is at in a thread.

    If the function is not seen there, return the place where it is defined.

    Args:
        function: The user's function.
        thread: Identifier of the thread.
    """
    file, frame = file_of(function), sys._current_frames().get(thread or 0)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return defined_at(function) if frame is None else encodable(f"{file}:{frame.f_lineno}")


def name_of(function: Callable[..., Any]) -> str:
    """Return the function's name as its author wrote it."""
    function = _whole(function)
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def is_async(function: Callable[..., Any]) -> bool:
    """Tell whether a call returns a coroutine or an async generator.

    Args:
        function: A function, method, partial or callable object.
    """
    called = _called(function)
    return inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)


def gives_items(function: Callable[..., Any]) -> bool:
    """Tell whether a call returns a generator, plain or async. It takes the same objects as `is_async`."""
    called = _called(function)
    return inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    function = _whole(function)
    return function if inspect.isroutine(function) else type(function).__call__


def _remedy(kind: str, text: str) -> str:
    if kind == "ValueError" and "signal only works in main thread" in text:
        return (
            "; user code runs in threads, where signals cannot be handled: use a time-out of the run file's [worker] "
            'instead of an alarm, or, for a task of tools alone, worker.tool_isolation = "process", where they run in '
            "their own main thread"
        )
    if kind == "RuntimeError" and any(words in text for words in _OF_ANOTHER_LOOP):
        return (
            "; new calls run on another event loop while one function blocks the usual one: see the notice that names "
            "it, and make what belongs to a loop (a client, a session, a lock) in the call that uses it"
        )
    return ""


def _code(function: Callable[..., Any]) -> CodeType | None:
    function = inspect.unwrap(_whole(function))
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def needs_main_thread(function: Callable[..., Any]) -> bool:
    """Tell whether a function, or one of its file that it calls by name, sets an alarm, as `signal.alarm` does.

    In a thread this fails. What a function calls otherwise is not looked at.
    """
    seen: set[Callable[..., Any]] = set()
    waiting = [inspect.unwrap(function)]
    while waiting:
        called = waiting.pop()
        if called in seen or not inspect.isfunction(called):
            continue
        seen.add(called)
        names = {name for part in _codes(called.__code__) for name in part.co_names}
        if names & _ALARMS:
            return True
        found = [inspect.unwrap(value) for name in names if callable(value := called.__globals__.get(name))]
        waiting += [each for each in found if getattr(each, "__globals__", None) is called.__globals__]
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions inside it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


@contextlib.contextmanager
def contained(on_error: Callable[[BaseException], object]) -> Iterator[None]:
    """Surround a call of user code: `with contained(failed): ...`. `failed` gets the exception that ended the code.

    A copy of this process that the code made with `os.fork` ends here, so that it does not continue as a second worker.
    """
    pid = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != pid:
            code = getattr(error, "code", 1) or 0
            os._exit(code if isinstance(code, int) else 1)
        on_error(error)
    else:
        if os.getpid() != pid:
            os._exit(0)
