"""Environments and harnesses that exist, as tasks: one line in a task file for each (docs/environments.md).

`gymnasium_environment`, `textarena_environment` and `openenv_environment` give what `Task(environment=...)` takes;
`nemo_gym_task`, `harbor_task`, `inspect_task` and `verifiers_task` give whole tasks. Each imports its library when it
is called.
"""

from slipstream.environments.gymnasium import gymnasium_environment
from slipstream.environments.harbor import harbor_task
from slipstream.environments.inspect_ai import inspect_task
from slipstream.environments.nemo_gym import nemo_gym_task
from slipstream.environments.openenv import openenv_environment
from slipstream.environments.textarena import textarena_environment
from slipstream.verifiers import verifiers_task

__all__ = [
    "gymnasium_environment",
    "harbor_task",
    "inspect_task",
    "nemo_gym_task",
    "openenv_environment",
    "textarena_environment",
    "verifiers_task",
]
