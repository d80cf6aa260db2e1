"""TRL's experimental trainers that are here: `async_grpo`."""
