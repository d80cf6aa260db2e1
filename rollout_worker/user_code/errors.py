"""What user code did wrong, as text: the error, the line in the user's file, and what to do where that is known.

What becomes of copies of a process that user code makes with `os.fork`.

A copy that runs user code may do so to the end of the call, as `fork` is meant to be used; then it must not go on as
another worker, or as another child that answers.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from rollout_worker.user_code.values import encodable, type_name

# Of one error's text: an exception may hold a whole page.
MAX_CHARACTERS = 2000

# As asyncio says it of futures, and of locks, events and queues.
_OF_ANOTHER_LOOP = ("different loop", "different event loop")


class UserCodeError(Exception):
    """The user's function failed, or did not answer in time; the text says how. `kind`: the type of the error, or
    `reasons.TIMEOUT`; `where`: file:line in the user's file, None if it has none. All three can be sent as they are.
    `waited_s`: seconds that the call waited for a thread, which are none of its own."""

    waited_s = 0.0

    def __init__(self, text: str, kind: str, where: str | None) -> None:
        super().__init__(encodable(text))
        self.kind = encodable(kind)
        self.where = None if where is None else encodable(where)


class NotCalled(UserCodeError):
    """The function was not called, as too many calls before it hang: it says nothing of this call's function."""


def failure_of(error: BaseException, file: str | None, otherwise: str | None = None) -> UserCodeError:
    """`error` as text, raised at the innermost line of the user's `file`; `otherwise`, if it was not raised there. Of
    the error's own code only its text is run, and that may fail."""
    kind = type_name(error)
    trace = BaseException.__dict__["__traceback__"].__get__(error)
    lines = [line for frame, line in traceback.walk_tb(trace) if frame.f_code.co_filename == file]
    try:
        text = f"{kind}({error})" if issubclass(type(error), SystemExit) else f"{kind}: {error}"
    except BaseException as another:
        text = f"{kind}, whose text fails with {type_name(another)}"
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}... ({len(text) - MAX_CHARACTERS} characters left out)"
    return UserCodeError(text + _remedy(kind, text), kind, f"{file}:{lines[-1]}" if lines else otherwise)


def failure_in(function: Callable[..., Any], error: BaseException) -> UserCodeError:
    """`error`, raised by `function` or by what works on its result. A `UserCodeError` is given back as it is, without
    the frames that would keep the user's objects alive."""
    if issubclass(type(error), UserCodeError):  # not isinstance, which asks the error for its class
        assert isinstance(error, UserCodeError)
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    code = _code(function)
    return failure_of(error, None if code is None else code.co_filename, defined_at(function))


def defined_at(function: Callable[..., Any]) -> str | None:
    """file:line of a function, method, partial or callable object; None of one that is not written in Python."""
    code = _code(function)
    return None if code is None else encodable(f"{code.co_filename}:{code.co_firstlineno}")


def file_of(function: Callable[..., Any]) -> str | None:
    """The file that it is defined in, as `defined_at`."""
    code = _code(function)
    return None if code is None else code.co_filename


def place_in(function: Callable[..., Any], thread: int | None) -> str | None:
    """file:line that `function` is at in the thread of that number; where it is defined, if it is not seen there."""
    file, frame = file_of(function), sys._current_frames().get(thread or 0)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return defined_at(function) if frame is None else encodable(f"{file}:{frame.f_lineno}")


def name_of(function: Callable[..., Any]) -> str:
    """Its name, as a person wrote it."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine or an async generator: functions, methods, partials, callable objects."""
    called = _called(function)
    return inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)


def gives_items(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a generator, plain or async: of the same as `is_async`."""
    called = _called(function)
    return inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _remedy(kind: str, text: str) -> str:
    if kind == "ValueError" and "signal only works in main thread" in text:
        return (
            "; user code runs in threads, where signals cannot be handled: use a time-out of the run file's [worker] "
            'instead of an alarm, or, for a task of tools alone, worker.tool_isolation = "process", where they run in '
            "a main thread of their own"
        )
    if kind == "RuntimeError" and any(words in text for words in _OF_ANOTHER_LOOP):
        return (
            "; async code moves to another event loop while one function blocks the usual one: see the trouble that "
            "names it, and make what belongs to a loop (a client, a session, a lock) in the call that uses it"
        )
    return ""


def _code(function: Callable[..., Any]) -> Any:
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def end_if_copy(pid: int, error: BaseException | None = None) -> None:
    """End at once, writing nothing, if this is not the process `pid`: with the code of a `SystemExit`, with 1 after
    another `error`."""
    if os.getpid() == pid:
        return
    code = 1 if error is not None else 0
    if error is not None and issubclass(type(error), SystemExit):
        given = SystemExit.__dict__["code"].__get__(error)
        code = 0 if given is None else given & 255 if type(given) is int else 1
    os._exit(code)
