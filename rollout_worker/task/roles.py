"""Several agents in one episode: roles that the policy plays, each trained by its own reward, and other models.

All trained roles share the policy's weights. A role differs from another by its system prompt, and its rollouts are
compared with those of the same role alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.protocol.config import ConfigError
from slipstream.protocol.messages import MAX_ROLES
from slipstream.rollout_worker.task.reward_base import NAME_CHARACTERS

# Names of roles are parts of metrics' names.
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class UntrainedModel:
    """A role that another model plays, behind a server that speaks as OpenAI's: an opponent, a judge.

    Attributes:
        base_url: Its address, which ends in /v1.
        model: The name to ask for.
        api_key_variable: The environment variable with its key; None for servers that want none.
    """

    base_url: str
    model: str
    api_key_variable: str | None = None

    @property
    def api_key(self) -> str:
        """Its key. Raises `ConfigError` where the variable is not set."""
        if self.api_key_variable is None:
            return "none"
        if not (key := os.environ.get(self.api_key_variable)):
            raise ConfigError(
                f"UntrainedModel({self.base_url!r}, api_key_variable={self.api_key_variable!r}): the variable is not "
                f"set; set it where the worker runs"
            )
        return key


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a task.

    Attributes:
        trained: System prompt of each role that the policy plays, by name; None for none.
        others: The roles of other models.
    """

    trained: Mapping[str, str | None] = field(default_factory=dict)
    others: Mapping[str, UntrainedModel] = field(default_factory=dict)

    @property
    def described(self) -> list[dict[str, Any]]:
        """Description of the roles for the fingerprint."""
        own = [{"role": name, "system_prompt": prompt} for name, prompt in self.trained.items()]
        return own + [{"role": name, "model": other.model} for name, other in self.others.items()]


def read_roles(agents: Any) -> Roles:
    """Read `Task(agents=...)`.

    Raises:
        ConfigError: It is no mapping of roles, or none of them is trained.
    """
    if not isinstance(agents, Mapping) or not agents:
        raise ConfigError(
            f"Task(agents={agents!r:.200}): give a dict of roles by name: a system prompt (or None) for each that the "
            f"policy plays, an UntrainedModel for each other one"
        )
    trained: dict[str, str | None] = {}
    others: dict[str, UntrainedModel] = {}
    for name, role in agents.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > NAME_CHARACTERS:
            raise ConfigError(
                f"Task(agents={{{name!r:.80}: ...}}): name each role by a word of at most {NAME_CHARACTERS} letters, "
                f"digits, _, - and dots"
            )
        if isinstance(role, UntrainedModel):
            if not str(role.base_url).startswith(("http://", "https://")):
                raise ConfigError(f"Task(agents={{{name!r}: ...}}): base_url = {role.base_url!r} is no address")
            if not isinstance(role.model, str) or not role.model:
                raise ConfigError(
                    f"Task(agents={{{name!r}: ...}}): model = {role.model!r}; give the name that its server serves"
                )
            others[name] = role
        elif role is None or isinstance(role, str):
            trained[name] = role or None
        else:
            raise ConfigError(
                f"Task(agents={{{name!r}: ...}}): a {type(role).__name__} is no role; give its system prompt, None, or "
                f"an UntrainedModel"
            )
    if not trained:
        raise ConfigError(
            "Task(agents={...}): no role is trained; give the system prompt of one that the policy plays, or None"
        )
    if len(trained) > MAX_ROLES:
        raise ConfigError(f"Task(agents={{...}}): {len(trained)} roles are trained, at most {MAX_ROLES} can be")
    return Roles(trained, others)
