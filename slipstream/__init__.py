"""The public names that users import: `from slipstream import Task`.

Each name is imported at its first use, so a task file or a queue client loads no more than it needs, and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.deploy.run.process_keeper import RunFailed
    from slipstream.learner.feed.token_batch import TokenBatch
    from slipstream.learner.joined_run import Run, join
    from slipstream.protocol.client import QueueClient
    from slipstream.protocol.config import ConfigError
    from slipstream.rollout_worker.chat.parsers.base import MalformedCall, ParsedTurn, ToolCall
    from slipstream.rollout_worker.task.agent import Endpoint
    from slipstream.rollout_worker.task.roles import UntrainedModel
    from slipstream.rollout_worker.task.task import Task
    from slipstream.rollout_worker.task.turn_rewards import reward
    from slipstream.rollout_worker.tools.base import Tool
    from slipstream.script import train
    from slipstream.weight_sync.own_servers import Servers, servers

    __version__: str

__all__ = [
    "ConfigError",
    "Endpoint",
    "MalformedCall",
    "ParsedTurn",
    "QueueClient",
    "Run",
    "RunFailed",
    "Servers",
    "Task",
    "TokenBatch",
    "Tool",
    "ToolCall",
    "UntrainedModel",
    "__version__",
    "join",
    "reward",
    "servers",
    "train",
]

_MODULES = {
    "ConfigError": "slipstream.protocol.config",
    "Endpoint": "slipstream.rollout_worker.task.agent",
    "MalformedCall": "slipstream.rollout_worker.chat.parsers.base",
    "ParsedTurn": "slipstream.rollout_worker.chat.parsers.base",
    "QueueClient": "slipstream.protocol.client",
    "Run": "slipstream.learner.joined_run",
    "Servers": "slipstream.weight_sync.own_servers",
    "RunFailed": "slipstream.deploy.run.process_keeper",
    "Task": "slipstream.rollout_worker.task.task",
    "TokenBatch": "slipstream.learner.feed.token_batch",
    "Tool": "slipstream.rollout_worker.tools.base",
    "ToolCall": "slipstream.rollout_worker.chat.parsers.base",
    "UntrainedModel": "slipstream.rollout_worker.task.roles",
    "join": "slipstream.learner.joined_run",
    "reward": "slipstream.rollout_worker.task.turn_rewards",
    "servers": "slipstream.weight_sync.own_servers",
    "train": "slipstream.script",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = import_module("slipstream.protocol.config.fingerprint").release()
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}; it has: {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
