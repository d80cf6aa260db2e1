"""Checkpoints that ranks write together: read with any number of ranks, to the bit; whole or not there at all."""

from __future__ import annotations

import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from slipstream.learner.checkpoints import checkpoint as checkpoints
from slipstream.learner.checkpoints import resuming
from slipstream.learner.checkpoints.checkpoint import CheckpointError, CheckpointInfo
from slipstream.learner.checkpoints.model_folder import Sources
from slipstream.learner.feed.packing import pack
from slipstream.learner.run import build_trainer
from slipstream.learner.start import starting_point
from slipstream.learner.training import state_files
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol import checkpoints as places
from slipstream.protocol.config import RunConfig
from tests.kit import LEARNER, config
from tests.kit.fake_vllm.tokenizer import tiny_tokenizer
from tests.kit.learner import step_rollouts
from tests.kit.ranks import Ranks
from tests.learner.families import MIXTURES, TEXT
from tests.learner.ranks.test_ranks import samples_of

# A reference that moves is a part of checkpoints; so are Muon's momentum and AdamW's moments.
LEARNS: dict[str, Any] = {"learning_rate": 1e-2, "kl_coef": 0.1, "reference_sync_steps": 1, "optim": "muon"}
FAMILIES = {**TEXT, **MIXTURES}


def run_file(folder: Path, family: str, ranks: int, shard: bool = True, **learner: Any) -> RunConfig:
    path = folder / "model"
    if not path.exists():
        torch.manual_seed(0)
        FAMILIES[family]().save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
    of_learner = {**LEARNS, "ranks": ranks, "shard_weights": shard and ranks > 1, **learner}
    return config(LEARNER, model={"path": str(path)}, run={"dir": str(folder)}, learner=of_learner)


def held(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Copies of the weights, and of what the trainer keeps, whole."""
    state = trainer.state()
    moments = {f"{n}.{name}": of for n, each in state["optimiser"]["state"].items() for name, of in each.items()}
    reference = {f"reference.{name}": of for name, of in state["reference"].items()}
    found = {**dict(trainer.weights()), **moments, **reference}
    return {name: torch.as_tensor(of).clone() for name, of in found.items()}


def save(trainer: PolicyTrainer, settings: RunConfig, step: int, fails: bool = False) -> dict[str, Any] | str:
    """Train a step and write a checkpoint of it. What is held then, or why it cannot be written."""
    samples = samples_of([30, 20, 25, 35, 12, 18], 2, 10 * step)
    trainer.step(pack(samples, 64, ranks=2), step_rollouts(samples))
    try:
        checkpoints.save(settings.run_dir, CheckpointInfo(step, step), trainer, Sources(settings.model), keep=2)
    except CheckpointError as error:
        return str(error)
    return held(trainer)


def same(found: dict[str, Any], right: dict[str, Any]) -> None:
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("family", "others", "shard"), [("Mixtral", 3, True), pytest.param("Qwen2, tied", 2, False, marks=pytest.mark.wide)]
)
def test_any_number_of_ranks_goes_on_from_what_four_have_written(
    tmp_path: Path, family: str, others: int, shard: bool
) -> None:
    four = run_file(tmp_path, family, 4)
    with Ranks(four) as ranks:
        right = ranks.call(save, four, 1)
    found = checkpoints.latest(four.run_dir)
    assert found is not None
    names = [f"model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert sorted(path.name for path in found.model_path.glob("*.safetensors")) == names
    assert sorted(path.name for path in (found.path / "trainer").iterdir()) == state_files.file_names(4)
    with Ranks(run_file(tmp_path, family, others, shard), resume=True) as ranks:
        same(ranks.call(held), right)
    one = run_file(tmp_path, family, 1)
    alone = build_trainer(one, starting_point(one, resume=True))
    same(held(alone), right)
    network = AutoModelForCausalLM.from_pretrained(found.model_path, dtype=torch.float32)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, alone.policy.model.state_dict()[name]), name


def test_no_rank_writes_more_than_its_part(tmp_path: Path) -> None:
    four = run_file(tmp_path, "Llama", 4)
    with Ranks(four) as ranks:
        ranks.call(save, four, 1)
    found = checkpoints.latest(four.run_dir)
    assert found is not None
    sizes = [path.stat().st_size for path in sorted((found.path / "trainer").iterdir())]
    assert max(sizes) <= 1.1 * sum(sizes) / 4
    with safe_open(found.model_path / "model-00001-of-00004.safetensors", "pt") as file:
        assert 0 < len(file.keys()) < 12, "each has its share of the names"
    kept = torch.load(found.path / "trainer.pt", weights_only=True)
    assert (found.path / "trainer.pt").stat().st_size < min(sizes), "no tensor of weights' size is in it"
    assert kept["parts"] == state_files.file_names(4)


def end_in_the_second_checkpoint(rank: int, here: int) -> None:
    if rank != here:
        return
    count, write = 0, state_files.write_tensors

    def ending(path: Path, *arguments: Any, **more: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            path.write_bytes(b"half")
            os._exit(9)
        write(path, *arguments, **more)

    state_files.write_tensors = ending


def test_a_rank_that_is_killed_as_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    two = run_file(tmp_path, "Llama", 2)
    with Ranks(two, first=partial(end_in_the_second_checkpoint, here=1)) as ranks:
        right = ranks.call(save, two, 1)
        assert "rank 1 of the learner" in ranks.call(save, two, 2)
    assert list(places.complete(two.run_dir)) == [1]
    with Ranks(two, resume=True) as ranks:
        same(ranks.call(held), right)
        ranks.call(save, two, 2)
    assert list(places.complete(two.run_dir)) == [1, 2]
    assert not list(places.folder(two.run_dir).glob(".*")), "nothing is left unfinished"


def write_little(rank: int, here: int) -> None:
    if rank == here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, resource.RLIM_INFINITY))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_disk_is_full_fails_the_checkpoint_and_the_run_goes_on(tmp_path: Path, rank: int) -> None:
    two = run_file(tmp_path, "Llama", 2)
    with Ranks(two, first=partial(write_little, here=rank)) as ranks:
        for step in (1, 2):
            said = ranks.call(save, two, step)
            assert isinstance(said, str)
            assert f"cannot be written: rank {rank}: " in said
            assert "File too large" in said
    assert not list(places.folder(two.run_dir).iterdir())


def see_no_checkpoints(rank: int, here: int) -> None:
    """As on a machine of its own without a shared folder."""
    if rank == here:
        is_dir = Path.is_dir
        Path.is_dir = lambda path, **more: "checkpoints" not in path.parts and is_dir(path)  # type: ignore


def test_ranks_without_a_shared_folder_send_rank_0_what_it_writes_and_get_what_it_reads(tmp_path: Path) -> None:
    two = run_file(tmp_path, "Llama", 2)
    with Ranks(two) as ranks:
        first = ranks.call(save, two, 1)
    apart = partial(see_no_checkpoints, here=1)
    with Ranks(two, resume=True, first=apart) as ranks:
        same(ranks.call(held), first)
        second = ranks.call(save, two, 2)
    found = checkpoints.latest(two.run_dir)
    assert found is not None
    assert not (found.path / "trainer").exists()
    assert [path.name for path in found.model_path.glob("*.safetensors")] == ["model.safetensors"]
    with Ranks(two, resume=True) as ranks:
        same(ranks.call(held), second)


@pytest.mark.parametrize("file", [f"trainer/{state_files.file_names(2)[1]}", f"model/{SAFE_WEIGHTS_INDEX_NAME}"])
def test_a_checkpoint_that_lacks_one_of_its_files_is_not_taken(tmp_path: Path, file: str) -> None:
    two = run_file(tmp_path, "Llama", 2)
    with Ranks(two) as ranks:
        ranks.call(save, two, 1)
        ranks.call(save, two, 2)
    found = checkpoints.latest(two.run_dir)
    assert found is not None
    (found.path / file).unlink()
    chosen = resuming.choose(two.run_dir)
    assert chosen is not None
    assert chosen.info.step == 1
