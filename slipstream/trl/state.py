"""Reads a run's journals as transformers' `TrainerState`: `trainer.state` of a script, and the mean loss of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.protocol import checkpoints


@dataclass
class TrainerState:
    """What a run has done so far, under transformers' names.

    Attributes:
        log_history: A dict for each step and each evaluation, with `step` and `epoch`; of a run that is over, one with
            `train_loss`, `train_runtime` and the last step's metrics is the last.
        best_metric: The highest mean reward of an evaluation.
        best_model_checkpoint: Folder of the checkpoint that `load_best_model_at_end` keeps.
    """

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    num_input_tokens_seen: int = 0
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list)
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True

    def save_to_json(self, json_path: str | Path) -> None:
        """Write the state to a file."""
        Path(json_path).write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_state(
    run_dir: Path, logged: Sequence[dict[str, Any]] = (), steps_per_epoch: float | None = None
) -> TrainerState:
    """Read the state of a run; that of no step where it has no journals.

    Args:
        run_dir: The run directory.
        logged: What the script has logged itself; stands in front of the run's end.
        steps_per_epoch: Steps in which each row is drawn once; where None, epochs are counted as whole ones.
    """
    state = TrainerState()
    epoch_of: dict[int, float] = {}
    entries: list[tuple[int, int, dict[str, Any]]] = []
    for line in _lines(run_dir / "metrics.jsonl"):
        epoch = line["step"] / steps_per_epoch if steps_per_epoch else float(line.get("epoch") or 0)
        epoch_of[line["step"]] = line["epoch"] = epoch
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        entries.append((line["step"], 0, {name: value for name, value in numbers.items() if "eval/" not in name}))
        state.global_step, state.epoch = line["step"], epoch_of[line["step"]]
        state.num_input_tokens_seen = line.get("num_tokens") or state.num_input_tokens_seen
    for line in _lines(run_dir / "evaluations.jsonl"):
        entry = evaluation_metrics(line, "eval")
        entries.append((line["step"], 1, {**entry, "epoch": epoch_of.get(line["step"], 0.0), "step": line["step"]}))
        reward = line.get("reward")
        if reward is not None and (state.best_metric is None or reward > state.best_metric):
            state.best_metric, state.best_global_step = reward, line["step"]
    state.log_history = [entry for _, _, entry in sorted(entries, key=lambda item: item[:2])] + [*logged]
    if best := checkpoints.best(run_dir):
        state.best_model_checkpoint = str(checkpoints.complete(run_dir)[best.step])
    if (run_dir / "summary.json").is_file() and state.global_step:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        seconds = summary.get("wall_s")
        end = {"train_loss": mean_loss(run_dir), "train_runtime": seconds, "epoch": state.epoch}
        if seconds:
            end["train_steps_per_second"] = summary["steps"] / seconds
        last = next(entry for step, kind, entry in reversed(entries) if (step, kind) == (state.global_step, 0))
        metrics = {name: value for name, value in last.items() if name != "loss"}
        state.log_history.append({**metrics, **end, "step": state.global_step})
    return state


def evaluation_metrics(line: dict[str, Any], prefix: str) -> dict[str, float]:
    """Return an evaluation's numbers as transformers names them.

    Args:
        line: A line of `evaluations.jsonl`.
        prefix: Stands in front of each name, as in eval_reward.
    """
    found: dict[str, Any] = {
        "reward": line.get("reward"),
        "reward_std": line.get("reward_std"),
        "completions/mean_length": line.get("mean_length"),
        "completions/clipped_ratio": line.get("clipped"),
        "runtime": line.get("seconds"),
        **{f"rewards/{name}/mean": value for name, value in (line.get("rewards") or {}).items()},
    }
    return {f"{prefix}_{name}": value for name, value in found.items() if value is not None}


def mean_loss(run_dir: Path) -> float:
    """Return the mean of the steps' losses, NaN without a step."""
    losses = [line.get("loss") for line in _lines(run_dir / "metrics.jsonl")]
    found = [loss for loss in losses if isinstance(loss, int | float)]
    return math.fsum(found) / len(found) if found else math.nan


def _lines(journal: Path) -> list[dict[str, Any]]:
    """Return a journal's lines, without the last one while it is being written."""
    text = journal.read_text(encoding="utf-8") if journal.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
