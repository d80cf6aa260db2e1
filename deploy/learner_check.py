"""What is checked of the learner's optimiser, schedule and adapter before a run starts: that they can be made here, and
that the adapter fits the model and the checkpoint to go on from."""

from __future__ import annotations

from protocol import checkpoints
from protocol.config import LearnerSection, RunConfig

_OWN = ("optim", "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs")


def check(config: RunConfig) -> None:
    """Raises `ConfigError`. Imports torch only where the run file asks for more than the defaults."""
    plain = LearnerSection()
    if any(getattr(config.learner, name) != getattr(plain, name) for name in _OWN):
        from learner.training import optimiser

        optimiser.check(config.learner)
    if config.lora.r:
        from learner.model import adapter

        adapter.check_installed(config.lora)
    if config.model.quantised_bits:
        from learner.model import precision

        precision.check_quantisation(config.model)


def check_adapter(config: RunConfig, resume: bool) -> None:
    """Raises `ConfigError`. Of a model that can be found; imports torch only where an adapter is or was."""
    kept = checkpoints.complete(config.run_dir) if resume else {}
    had_one = bool(kept) and (kept[max(kept)] / checkpoints.ADAPTER).is_dir()
    if config.lora.r or had_one:
        from learner.checkpoints import resuming

        resuming.check_adapter(config, resume)
