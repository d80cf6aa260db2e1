"""Environments: objects of the user's that an episode is played in, one each, pooled and reset."""

from rollout_worker.task.environment.instance import Instance
from rollout_worker.task.environment.opening import Environments, Stage, open_environments

__all__ = ["Environments", "Instance", "Stage", "open_environments"]
