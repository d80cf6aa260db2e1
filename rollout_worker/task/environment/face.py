"""What the instances of an environment can do, told from their class, under TRL's names.

Public methods are tools. `reset`, `get_reward`, `respond` and `close` are ours to call, and names that begin with an
underscore are nobody's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from protocol.config import ConfigError
from rollout_worker.task.environment.method_tool import MethodTool

OURS = ("reset", "get_reward", "respond", "close")
# What we give those whose arguments are always the same.
_CALLED_WITH: Mapping[str, tuple[str, ...]] = {"get_reward": (), "respond": ("messages",), "close": ()}


@dataclass(frozen=True, slots=True)
class Face:
    """cls: the class's name, which its reward is counted under; methods: the class's functions by name, of which
    `tools` are for the policy, in alphabetical order as in TRL."""

    cls: str
    methods: Mapping[str, Callable[..., Any]]
    tools: tuple[str, ...]

    @property
    def rewards(self) -> bool:
        return "get_reward" in self.methods

    @property
    def responds(self) -> bool:
        return "respond" in self.methods

    def has(self, other: Face) -> bool:
        """Whether an instance with the face `other` can stand in: a factory may make a class for each."""
        return self.methods.keys() == other.methods.keys()

    def reset_arguments(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Of a row's columns those that `reset` takes. Raises `ConfigError` where it needs others."""
        parameters = list(inspect.signature(self.methods["reset"]).parameters.values())[1:]
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return dict(columns)
        by_name = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        if missing := [each.name for each in by_name if each.default is each.empty and each.name not in columns]:
            raise ConfigError(
                f"Task(environment=...): {self.cls}.reset takes {missing[0]!r}, which is not a column of the data set; "
                f"the columns are: {', '.join(map(str, columns))}; write it as def reset(self, **columns)"
            )
        return {each.name: columns[each.name] for each in by_name if each.name in columns}


def face_of(instance: Any) -> Face:
    """Told from the class alone, so that no property is read. It may run user code of a metaclass."""
    cls = type(instance)
    found = dict(inspect.getmembers(cls, predicate=inspect.isfunction))
    methods = {name: method for name, method in found.items() if not name.startswith("_")}
    return Face(cls.__name__, methods, tuple(name for name in sorted(methods) if name not in OURS))


def no_reset(given_as: str, cls: str) -> ConfigError:
    """The class, which the task names so, has no method `reset`."""
    return ConfigError(
        f"{given_as}: {cls} has no method reset, which begins each episode; write one: def reset(self, **columns), "
        f"which returns None, text or messages"
    )


def tools_of(face: Face, instance: Any) -> list[MethodTool]:
    """The tools, for any instance of this face; `instance` is one, and is not kept. Raises `ConfigError`, also for a
    class without `reset`, and for methods that cannot be called as we call them."""
    if "reset" not in face.methods:
        raise no_reset("Task(environment=...)", face.cls)
    for name, given in _CALLED_WITH.items():
        if name in face.methods:
            _check_call(face.cls, getattr(instance, name), name, given)
    return [MethodTool(face.cls, getattr(instance, name)) for name in face.tools]


def _check_call(cls: str, method: Callable[..., Any], name: str, given: tuple[str, ...]) -> None:
    """Raises `ConfigError` if it cannot be called with those arguments, by names."""
    try:
        inspect.signature(method).bind(**dict.fromkeys(given))
    except TypeError as error:
        raise ConfigError(
            f"Task(environment=...): {cls}.{name} cannot be called: {error}; write it as "
            f"def {name}({', '.join(('self', *given))})"
        ) from None
