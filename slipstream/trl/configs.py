"""TRL's config classes: they take the fields that TRL's take, and hold what a script gives."""

from __future__ import annotations

from typing import Any, ClassVar

from protocol.config import ConfigError
from protocol.config.text import nearest
from slipstream.script import without_frames
from slipstream.trl.defaults import DEFAULTS
from slipstream.trl.fields import FIELDS


class _Config:
    """`given`: the fields that the script set. `slipstream`: sections of a run file, {section: {key: value}}, for what
    TRL has no name for; they override what the fields come to. Raises `ConfigError` for what is no field of TRL's."""

    letter: ClassVar[str]
    given: dict[str, Any]
    slipstream: dict[str, dict[str, Any]]

    @without_frames
    def __init__(
        self, output_dir: Any = None, *, slipstream: dict[str, dict[str, Any]] | None = None, **fields: Any
    ) -> None:
        vars(self)["given"] = {}
        self.slipstream = slipstream or {}
        for name, value in (("output_dir", output_dir), *fields.items()):
            setattr(self, name, value)

    @classmethod
    def names(cls) -> list[str]:
        """The fields that this class takes."""
        return [name for name, field in FIELDS.items() if {cls.letter, "T"} & {*field.of}]

    def field(self, name: str) -> Any:
        """What the script gives, else TRL's default where it shapes what is trained, else None."""
        return self.given.get(name, self.default(name))

    @classmethod
    def default(cls, name: str) -> Any:
        """TRL's default where it shapes what is trained, else None."""
        return DEFAULTS[cls.__name__].get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__name__
        if name == "slipstream":
            if not isinstance(value, dict) or not all(isinstance(section, dict) for section in value.values()):
                raise ConfigError(
                    f"{kind}(slipstream={value!r}): give sections, such as {{'learner': {{'steps': 100}}}}"
                )
            vars(self)[name] = value
        elif name in self.names():
            self.given[name] = value
        else:
            close = nearest(name, self.names())
            meant = (
                f"did you mean {close}?" if close else "what TRL has no name for goes to slipstream={section: {...}}"
            )
            raise ConfigError(f"{kind}({name}=...) is not a field of TRL 1.16's {kind}; {meant}")

    def __getattr__(self, name: str) -> Any:
        if name in type(self).names():
            return self.field(name)
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.given.items() if value is not None)
        return f"{type(self).__name__}({given})"


class GRPOConfig(_Config):
    """TRL's `GRPOConfig`."""

    letter = "G"


class RLOOConfig(_Config):
    """TRL's `RLOOConfig`."""

    letter = "R"


class AsyncGRPOConfig(_Config):
    """TRL's `AsyncGRPOConfig`."""

    letter = "A"
