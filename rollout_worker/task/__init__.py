"""What the user writes: a task with its data set, tools and reward functions."""
