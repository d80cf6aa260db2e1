"""The user's part: a task with its data set, tools and reward functions."""
