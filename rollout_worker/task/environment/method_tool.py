"""An environment's public method as a tool: described once for a class, bound to the instance of each episode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol, Self

from protocol.config import ConfigError
from rollout_worker.task.tools.results import as_text
from rollout_worker.tools.function import FunctionTool, converted
from rollout_worker.user_code import UserCode


class Player(Protocol):
    """Of an instance: calls one of its methods."""

    async def call(
        self,
        method: str,
        plain: Callable[[Any], Any],
        timeout_s: float,
        arguments: dict[str, Any],
        convert: Callable[[dict[str, Any]], dict[str, Any]] = ...,
    ) -> Any: ...


class MethodTool(FunctionTool):
    """`method`: bound to any instance of the class `cls`, and not kept. Raises `ConfigError` where it cannot be
    described to the policy."""

    in_order = True

    def __init__(self, cls: str, method: Callable[..., Any], code: UserCode | None = None) -> None:
        try:
            super().__init__(method, code)
        except ConfigError as error:
            text = str(error).replace("Task(tools=...)", f"Task(environment=...), class {cls}", 1)
            raise ConfigError(
                f"{text}. Public methods of an environment are tools: begin the name of one that is not with _"
            ) from None
        self.function = getattr(method, "__func__", method)
        self._player: Player | None = None

    def bound(self, player: Player) -> Self:
        tool = copy.copy(self)
        tool._player = player
        return tool

    async def _text(self, arguments: dict[str, Any], timeout_s: float) -> str:
        assert self._player is not None, "a tool is bound before it is called"
        text: str = await self._player.call(
            self.name, as_text, timeout_s, arguments, lambda given: converted(given, self.converters)
        )
        return text
