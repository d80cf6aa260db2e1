"""What the user writes: a task with its data set, tools and reward functions."""

from rollout_worker.task.task import Task, load_task

__all__ = ["Task", "load_task"]
