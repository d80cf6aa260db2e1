"""One environment of the user's, and its calls: one at a time, each followed until it has truly come back.

Whatever becomes of a call's time-out, the next call begins only when the object is free again; an object that may be
spoilt, or that something still works on, is `lost`, and serves no other episode (I9).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from protocol import reasons
from rollout_worker.task.environment.face import Face
from rollout_worker.task.environment.method_tool import MethodTool
from rollout_worker.tools.toolbox import ToolBox
from rollout_worker.user_code import Followed, Kind, NotCalled, UserCode, UserCodeError, defined_at

# A coroutine that was cancelled needs a moment to end; a thread that was given up is not waited for.
GRACE_S = 1.0
_SPOILT_BY = (reasons.TIMEOUT, "SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError")


class Holder:
    """The object, on its way to a thread where it is used last, and so freed there. Callable, so that it is no copy
    that is handed out."""

    def __init__(self, held: Any) -> None:
        self._held = [held]

    def __call__(self) -> Any:
        return self._held.pop()


class Instance:
    """`object`, which the factory `name` made. `lost`: it must not serve another episode; `free`: no call is at work on
    it."""

    def __init__(self, name: str | None, made: Any, face: Face, code: UserCode) -> None:
        self.name = name
        self.object = made
        self.face = face
        self.lost = False
        self._code = code
        self._line = asyncio.Lock()
        self._last: Followed | None = None
        self._last_method = ""
        self._tools: ToolBox | None = None

    @property
    def free(self) -> bool:
        return self._last is None or self._last.back.is_set()

    async def until_free(self, timeout_s: float) -> bool:
        """Whether it is free within that time."""
        if not self.free:
            assert self._last is not None
            try:
                async with asyncio.timeout(timeout_s):
                    await self._last.back.wait()
            except TimeoutError:
                return False
        return True

    def tools(self, box: ToolBox) -> ToolBox:
        """The tools of `box`, in which those that are methods are this instance's."""
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
        """`plain(self.object.method(**convert(arguments)))`, after the calls before it; `wait_s`: how long it waits for
        one that was given up and has not come back. Raises `UserCodeError`."""
        named = self.face.methods[method]

        def run(**given: Any) -> Any:
            return getattr(self.object, method)(**convert(given))

        async with self._line:
            if not await self.until_free(wait_s):
                text = f"not called: {self._last_method} of the same {self.face.cls} has not come back"
                raise UserCodeError(text, reasons.TIMEOUT, defined_at(named))
            call = self._last = Followed(run, named)
            self._last_method = method
            try:
                return await self._code.call(call.function, plain, timeout_s, Kind.ENVIRONMENT, **(arguments or {}))
            except NotCalled:
                raise
            except UserCodeError as error:
                self.lost = self.lost or (call.began and error.kind in _SPOILT_BY)
                raise
            finally:
                call.let_go()

    def emptied(self) -> Holder:
        """The object, which this lets go of."""
        holder, self.object, self._tools = Holder(self.object), None, None
        return holder
