"""Records times and weights of a training by a callback that runs in Slipstream and in TRL alike.

Its settings are environment variables: SAVED_IN, a folder; SAVED_EVERY, steps between two files of weights;
SAVED_DTYPE, the type of the weights. The folder then has `times.json` and the weights `step-N.safetensors`.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Saved(TrainerCallback):  # type: ignore[misc]
    """Writes weights every few steps. The seconds that this takes are noted, so that they can be left out."""

    def __init__(self) -> None:
        self._folder = Path(os.environ["SAVED_IN"])
        self._every = int(os.environ["SAVED_EVERY"])
        self._dtype = getattr(torch, os.environ["SAVED_DTYPE"])
        self._times: dict[str, Any] = {"began": 0.0, "ended": [], "saving_s": []}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._times["began"] = time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        now = time.time()
        if state.global_step % self._every == 0:
            weights = {name: weight.detach().to(self._dtype) for name, weight in model.named_parameters()}
            safetensors.torch.save_file(weights, self._folder / f"step-{state.global_step}.safetensors")
        self._times["ended"].append(now)
        self._times["saving_s"].append(time.time() - now)
        (self._folder / "times.json").write_text(json.dumps(self._times))


@dataclass(frozen=True)
class Times:
    """Times of a training, without those of saving.

    Attributes:
        launched: When its command was started.
        began: When its first step began. Both in seconds since the epoch.
        ended: For each step, when it would have ended without any saving.
    """

    launched: float
    began: float
    ended: list[float]

    @classmethod
    def read(cls, folder: Path, launched: float) -> Times:
        """Read what the callback wrote."""
        read = json.loads((folder / "times.json").read_text())
        saved, ended = 0.0, []
        for end, saving in zip(read["ended"], read["saving_s"], strict=True):
            ended.append(end - saved)
            saved += saving
        return cls(launched, read["began"], ended)


def successes(
    folder: Path, model: Path, dtype: str, rows: list[dict[str, Any]], tokens: int, score: Any
) -> dict[int, float]:
    """Return the greedy success of each file of weights by its step, in plain transformers.

    Args:
        folder: The callback's folder.
        model: Folder of the model that was trained; its own success is that of step 0.
        rows: Held-out rows, each with `prompt` and `answer`.
        tokens: Longest completion.
        score: A reward function.
    """
    # Two threads that wait for each other take several times as long where other programs use the cores.
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    files = {int(file.stem.removeprefix("step-")): file for file in folder.glob("step-*.safetensors")}
    found = {0: _success(policy, tokenizer, rows, tokens, score)}
    for step, file in sorted(files.items()):
        # What is tied is not in the file, and nothing else may be missing.
        unknown = policy.load_state_dict(safetensors.torch.load_file(file), strict=False).unexpected_keys
        if unknown:
            raise ValueError(f"{file}: {model} has no weights {unknown}")
        found[step] = _success(policy, tokenizer, rows, tokens, score)
    return found


@torch.inference_mode()
def _success(policy: Any, tokenizer: Any, rows: list[dict[str, Any]], tokens: int, score: Any) -> float:
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        for row in rows
    ]
    texts = [""] * len(rows)
    # Prompts of one length are a batch without padding.
    for length in {len(prompt) for prompt in prompts}:
        places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[place] for place in places])
        out = policy.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        for place, text in zip(places, tokenizer.batch_decode(out[:, length:], skip_special_tokens=True), strict=True):
            texts[place] = text
    scores = score([[{"content": text}] for text in texts], [row["answer"] for row in rows])
    return sum(one == 1.0 for one in scores) / len(rows)


saved = Saved if "SAVED_IN" in os.environ else None
