"""Whether the settings that a config comes to are within their bounds, said of the fields that the script set."""

from __future__ import annotations

import re

from protocol.config import ConfigError, resolve
from slipstream.script import overrides
from slipstream.trl.configs import _Config
from slipstream.trl.fields import FIELDS
from slipstream.trl.translate import Sections


def check(config: _Config, sections: Sections) -> None:
    """Raises `ConfigError` for a setting that is out of bounds because of a field. What `config.slipstream` sets is
    left to the start of the run, which speaks of settings."""
    kind = type(config).__name__
    task = {"path": "script.py:task", **sections.get("task", {})}
    try:
        resolve(None, overrides({**sections, "task": task}), kind)
    except ConfigError as error:
        lines = [_of_fields(config, line.removeprefix(f"{kind}: ")) for line in str(error).splitlines()]
        if said := "\n".join(filter(None, lines)):
            raise ConfigError(said) from None


def _of_fields(config: _Config, line: str) -> str | None:
    """The line, which begins with a setting, behind the fields that this is from; None where the script set none."""
    match = re.match(r"([a-z_]+)\.([a-z_]+) = ", line)
    if match is None or match[2] in config.slipstream.get(match[1], {}):
        return None
    setting = f"`{match[1]}.{match[2]}`"
    given = {name: value for name, value in config.given.items() if value is not None and setting in FIELDS[name].here}
    fields = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"{type(config).__name__}({fields}): {line}" if fields else None
