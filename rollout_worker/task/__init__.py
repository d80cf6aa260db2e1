"""What the user writes: a task with its data set, tools and rewards."""

from rollout_worker.task.task import Task, load_task

__all__ = ["Task", "load_task"]
