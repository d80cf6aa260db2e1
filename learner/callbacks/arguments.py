"""What a callback sees as `args`: the run's settings by the names of transformers' TrainingArguments.

No TrainingArguments are made: they set up a device and process groups of their own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from protocol.config import RunConfig


@dataclass(frozen=True)
class Arguments:
    """The fields that a run has an answer for. `metric_for_best_model` is the mean reward of evaluations."""

    output_dir: str
    run_name: str
    max_steps: int
    learning_rate: float
    weight_decay: float
    max_grad_norm: float
    seed: int
    save_steps: int
    save_strategy: SaveStrategy
    eval_steps: int
    eval_strategy: IntervalStrategy
    report_to: list[str]
    push_to_hub: bool
    hub_model_id: str | None
    logging_steps: int = 1
    logging_strategy: IntervalStrategy = IntervalStrategy.STEPS
    logging_first_step: bool = True
    eval_delay: int = 0
    num_train_epochs: float = 1.0
    metric_for_best_model: str = "eval_reward"
    greater_is_better: bool = True
    load_best_model_at_end: bool = False
    process_index: int = 0
    local_process_index: int = 0
    world_size: int = 1
    should_log: bool = True
    should_save: bool = True
    disable_tqdm: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"args.{name}: this learner has no such field of TrainingArguments; args.settings has the run file's "
            f"sections"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Plain values only, as transformers gives them to trackers."""
        return {name: value for name, value in asdict(self).items() if isinstance(value, bool | int | float | str)}


def arguments(config: RunConfig, settings: dict[str, Any]) -> Arguments:
    """`settings`: what `args.settings` has."""
    learner, evaluation, hub = config.learner, config.eval, config.hub
    return Arguments(
        output_dir=str(config.run_dir.absolute()),
        run_name=config.tracking.run_name or config.run.name,
        max_steps=learner.steps,
        learning_rate=learner.learning_rate,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        seed=config.run.seed,
        save_steps=learner.checkpoint_every,
        save_strategy=SaveStrategy.STEPS if learner.checkpoint_every else SaveStrategy.NO,
        eval_steps=evaluation.every,
        eval_strategy=IntervalStrategy.STEPS if evaluation.is_on else IntervalStrategy.NO,
        report_to=list(config.tracking.report_to),
        push_to_hub=hub.push_to_hub,
        hub_model_id=hub.hub_model_id,
        settings=settings,
    )
