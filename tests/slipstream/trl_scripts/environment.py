"""As TRL's documentation writes a script with a stateful environment: its public methods are tools, its `reset` adds to
the prompt, its `get_reward` scores the episode, and no reward function is given.

For TRL, `from trl import GRPOConfig, GRPOTrainer` is the only line that differs.
"""

import os

from datasets import Dataset

from slipstream.trl import GRPOConfig, GRPOTrainer


class CounterEnv:
    def __init__(self):
        self.counter = 0
        self.goal = 0

    def reset(self, goal, **kwargs) -> str | None:
        self.counter = 0
        self.goal = goal
        return f" Reach {goal}."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: The amount to add to the counter.

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter

    async def peek(self) -> int:
        """
        Look at the internal counter.

        Returns:
            The counter.
        """
        return self.counter

    def get_reward(self) -> float:
        return 1.0 if self.counter == self.goal else 0.0


dataset = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": "Use the tool."}], "goal": goal} for goal in range(1, 65)]
)

trainer = GRPOTrainer(
    model=os.environ.get("MODEL", "Qwen/Qwen3-0.6B"),
    args=GRPOConfig(
        output_dir=os.environ.get("OUTPUT_DIR", "runs/trl-environment"),
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=128,
        max_steps=int(os.environ.get("MAX_STEPS", "5")),
    ),
    train_dataset=dataset,
    environment_factory=CounterEnv,
)

if __name__ == "__main__":
    trainer.train()
