"""Rewards: the task's own functions with TRL's signature, and classifiers that a pooling server scores."""

from rollout_worker.task.rewards.base import RewardBatch, RewardError, Score, TrainerState
from rollout_worker.task.rewards.functions import RewardFunctions, build_rewards

__all__ = ["RewardBatch", "RewardError", "RewardFunctions", "Score", "TrainerState", "build_rewards"]
