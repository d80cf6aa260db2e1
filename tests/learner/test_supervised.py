"""Learning from conversations alone: the loss falls, a resume makes the same weights, an adapter alone may learn."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from slipstream.learner.ranks.stopping import LearnerFailed
from slipstream.learner.supervised import train
from slipstream.protocol import checkpoints as places
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.demonstrations import Demonstration
from tests.kit import LEARNER, config
from tests.learner.feed.test_demonstrations import conversations

SOME = conversations([12, 20, 9, 16, 24, 18, 11, 14])
RATE = 5e-3


def run_file(model_path: Path, tmp_path: Path, learner: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    demonstrations = {"batch_size": 2, "epochs": 2.0, "eval_share": 0.25, **sections.pop("demonstrations", {})}
    return config(
        LEARNER,
        model={"path": str(model_path)},
        run={"dir": str(tmp_path), "name": "test"},
        demonstrations=demonstrations,
        learner={"checkpoint_every": 2, "keep_checkpoints": 9, "algorithm": "rloo", "kl_coef": 0.1, **(learner or {})},
        **sections,
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [msgspec.json.decode(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    return [{name: value for name, value in line.items() if name != "step_time"} for line in found]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_loss_falls_and_the_folder_is_a_model(model_path: Path, tmp_path: Path) -> None:
    here = run_file(model_path, tmp_path, demonstrations={"epochs": 20.0})
    folder = train(here, SOME, RATE)
    assert folder == tmp_path / "test-sft" / "checkpoints" / "step-000060" / places.MODEL
    first, *steps = lines(tmp_path / "test-sft")
    assert (first["step"], first["loss"], len(steps)) == (0, None, 60)
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert steps[-1]["mean_token_accuracy"] > 0.8
    assert [line["step"] for line in steps if line["eval_loss"] is not None] == list(range(3, 61, 3))
    assert steps[-1]["epoch"] == 20.0
    assert steps[-1]["learning_rate"] < 0.05 * RATE
    # What was learnt is what the folder holds: its own cross entropy of a conversation that was learnt.
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = AutoModelForCausalLM.from_pretrained(model_path)
    assert loss_of(model, SOME[:3]) < 0.5 * loss_of(before, SOME[:3])


def loss_of(model: Any, some: list[Demonstration]) -> float:
    found = []
    for segment in (segment for of in some for segment in of.segments):
        ids = torch.from_numpy(segment.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1]
        found += (-logprobs.gather(1, ids[1:, None])[:, 0])[torch.from_numpy(segment.loss_mask[1:])].tolist()
    return float(np.mean(found))


def test_a_resume_makes_the_weights_and_the_metrics_that_would_have_been(model_path: Path, tmp_path: Path) -> None:
    here = run_file(model_path, tmp_path)
    whole = train(here, SOME, RATE)
    run_dir = tmp_path / "test-sft"
    right, told = weights(whole), lines(run_dir)
    assert sorted(places.complete(run_dir)) == [2, 4, 6]
    with pytest.raises(ConfigError, match="holds a checkpoint of step 6: continue from it with --resume"):
        train(here, SOME, RATE)
    for step in (4, 6):
        shutil.rmtree(places.complete(run_dir)[step])
    again = train(here, SOME, RATE, resume=True)
    assert again == whole
    assert lines(run_dir) == told
    for name, weight in weights(again).items():
        torch.testing.assert_close(weight, right[name], rtol=0, atol=0, msg=name)
    assert train(here, SOME, RATE, resume=True) == whole  # nothing is left to do


def test_an_adapter_alone_learns(model_path: Path, tmp_path: Path) -> None:
    here = run_file(model_path, tmp_path, lora={"r": 4}, demonstrations={"epochs": 10.0})
    folder = train(here, SOME, 2e-2)
    steps = lines(tmp_path / "test-sft")
    assert steps[-1]["loss"] < 0.8 * steps[1]["loss"]
    assert (folder.parent / places.ADAPTER / "adapter_config.json").is_file()
    changed = [name for name, weight in weights(folder).items() if not torch.equal(weight, weights(model_path)[name])]
    assert changed
    assert all("_proj" in name for name in changed)


def test_a_loss_that_is_not_finite_ends_it_with_the_setting_to_change(model_path: Path, tmp_path: Path) -> None:
    here = run_file(model_path, tmp_path, learner={"max_grad_norm": 1e9})
    with pytest.raises(LearnerFailed, match=r"lower demonstrations.learning_rate = 1e\+30"):
        train(here, SOME, 1e30)


def test_without_a_checkpoint_there_is_nothing_to_resume(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--resume: .* holds no checkpoint; start without --resume"):
        train(run_file(model_path, tmp_path), SOME, RATE, resume=True)


@pytest.mark.parametrize(("place", "kept"), [((Accelerator, "clip_grad_norm_"), 2), ((AdamW, "step"), 3)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_loses_no_step(
    model_path: Path,
    tmp_path: Path,
    number: signal.Signals,
    place: tuple[type, str],
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes in the third step, before the weights change or while they do; what is resumed is what would have
    been."""
    here = run_file(model_path, tmp_path, {"checkpoint_every": 0, "checkpoint_minutes": 0})
    right = weights(train(here, SOME, RATE))
    shutil.rmtree(tmp_path / "test-sft")
    calls, plain = [], getattr(*place)

    def signalled(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return plain(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(*place, signalled)
        with pytest.raises(SystemExit) as stopped:
            train(here, SOME, RATE)
    assert stopped.value.code == 128 + number
    assert [*places.complete(tmp_path / "test-sft")] == [kept]
    for name, weight in weights(train(here, SOME, RATE, resume=True)).items():
        torch.testing.assert_close(weight, right[name], rtol=0, atol=0, msg=name)
