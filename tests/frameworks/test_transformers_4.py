"""A model folder that transformers 4 wrote is trained from, and it loads the checkpoint again: the same logits.

Asked for by name, as an environment is downloaded: `pytest -m frameworks`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
import transformers

from slipstream.learner.checkpoints import checkpoint
from slipstream.learner.checkpoints.checkpoint import CheckpointInfo
from slipstream.learner.checkpoints.model_folder import Sources
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Scoring
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import LearnerSection, ModelSection
from tests.frameworks import transformers_4
from tests.frameworks.environments import environment

PROGRAM = Path(transformers_4.__file__)
# Of float32 sums in another order, in logits of some tens.
CLOSE = 1e-3


def in_transformers_4(*arguments: object) -> None:
    python = environment(["transformers>=4.57,<4.58", "safetensors"])
    # torch is this environment's: it does not depend on transformers.
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    (packages / "zz_torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8")
    command = [str(python), str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of transformers 4, with their logits; and next to each its checkpoint's model, with those of 4."""
    home = tmp_path_factory.mktemp("transformers-4")
    in_transformers_4("make", home)
    saved = []
    for name in transformers_4.FAMILIES:
        section = ModelSection(path=str(home / name))
        trainer = PolicyTrainer(load_policy(section.path, section, Scoring(1.0, 16)), LearnerSection(), 64)
        made = checkpoint.save(home / f"{name}-run", CheckpointInfo(1, 1), trainer, Sources(section), keep=1)
        saved.append(made.model_path.rename(home / f"{name}-saved"))
    in_transformers_4("read", *(home / name for name in transformers_4.FAMILIES), *saved)
    return home


@pytest.mark.frameworks
@pytest.mark.parametrize("name", transformers_4.FAMILIES)
def test_transformers_4_and_5_compute_the_same_with_a_checkpoint(name: str, folders: Path) -> None:
    source, saved = folders / name, folders / f"{name}-saved"
    wanted, found = torch.load(source / "logits.pt"), torch.load(saved / "logits.pt")
    assert wanted.std() > 0.1, "logits that differ by token"
    assert (found - wanted).abs().max() < CLOSE
    sees = "vision_config" in (saved / "config.json").read_text(encoding="utf-8")
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    with torch.no_grad():
        now = kind.from_pretrained(saved, dtype=torch.float32).eval()(torch.tensor(transformers_4.TOKENS)).logits
    assert (now - wanted).abs().max() < CLOSE
