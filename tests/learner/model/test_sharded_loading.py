"""Ranks that read a part of a checkpoint each hold what a whole load gives, bit for bit, and read no more than that."""

from __future__ import annotations

import json
import multiprocessing
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter

from slipstream.learner.model import sharded_loading
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.model.sharded_loading import Outline, WholeLoadNeeded
from slipstream.learner.ranks import wrapping
from slipstream.learner.ranks.team import Team
from slipstream.protocol.config import ConfigError, LearnerSection, ModelSection
from tests.kit.copies import start_function
from tests.kit.model import tiny_model
from tests.learner.families import LONGEST, MIXTURES, TEXT, VISION

dist: Any = torch.distributed

# Rows of many shapes, and four experts, are not divided evenly by it.
RANKS = 3
SCORING = Scoring(1.0, 16)
JOINED = "joined"
FAMILIES = {**TEXT, **MIXTURES, **VISION}


def section(folder: Path) -> ModelSection:
    return ModelSection(path=str(folder), attention="varlen_sdpa")


def contents(policy: Policy) -> dict[str, torch.Tensor]:
    """All weights and buffers, whole, and which train."""
    state = dict(policy.model.named_parameters(remove_duplicate=False))
    buffers = dict(policy.model.named_buffers(remove_duplicate=False))
    trained = {f"{name}, trains": torch.tensor(of.requires_grad) for name, of in state.items()}
    whole = {name: wrapping.whole(of.detach()) for name, of in {**state, **buffers}.items()}
    return {**whole, **trained}


class CountedSlice:
    def __init__(self, stored: Any, counted: list[int]) -> None:
        self._stored, self._counted = stored, counted

    def get_shape(self) -> list[int]:
        shape: list[int] = self._stored.get_shape()
        return shape

    def __getitem__(self, rows: Any) -> torch.Tensor:
        found: torch.Tensor = self._stored[rows]
        self._counted.append(found.nbytes)
        return found


class CountedFile:
    def __init__(self, file: Any, counted: list[int]) -> None:
        self._file, self._counted = file, counted
        self.keys = file.keys

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *_: object) -> None: ...

    def get_slice(self, key: str) -> CountedSlice:
        return CountedSlice(self._file.get_slice(key), self._counted)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of each read."""
    sizes: list[int] = []
    opened = sharded_loading.safe_open
    sharded_loading.safe_open = lambda path, kind: CountedFile(opened(path, kind), sizes)
    try:
        yield sizes
    finally:
        sharded_loading.safe_open = opened


def loaded(number: int, folder: Path) -> dict[str, Any]:
    """How many bytes a rank read, how many it holds, and the names that differ from a whole load."""
    team = Team(number, RANKS, sharded=True)
    with counted() as sizes:
        part = load_policy(str(folder), section(folder), SCORING, longest=LONGEST, team=team)
    held = {id(of): wrapping.local(of).nbytes for of in part.parameters()}
    ours = contents(part)
    whole = load_policy(str(folder), section(folder), SCORING, longest=LONGEST)
    theirs = contents(whole)
    assert list(ours) == list(theirs)
    row = torch.arange(1, 9)
    return {
        "sharded": wrapping.is_sharded(part),
        "differs": [name for name, of in theirs.items() if not torch.equal(ours[name], of)],
        "kinds": [name for name, of in theirs.items() if ours[name].dtype != of.dtype],
        "conversions": str(part.model._weight_conversions) == str(whole.model._weight_conversions),
        "generation": part.model.generation_config.to_dict() == whole.model.generation_config.to_dict(),
        "config": part.model.config.to_dict() == whole.model.config.to_dict(),
        "score": torch.equal(part.run(lambda: scored(part, row)), scored(whole, row)),
        "read": sum(sizes),
        "held": sum(held.values()),
        "buffers": sum(of.nbytes for of in part.model.state_dict().values() if not hasattr(of, "placements")),
    }


def scored(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.from_numpy(policy.score(ids.tolist()))


def rank(number: int, folders: list[Path], store: str, pipe: int) -> None:
    answers = Connection(pipe)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=RANKS)
    for folder in folders:
        if folder.name == JOINED:
            register_checkpoint_conversion_mapping("qwen3", joined())
        try:
            found: Any = loaded(number, folder)
        except Exception:
            found = traceback.format_exc()
        answers.send((folder.name, number, found))
    dist.destroy_process_group()


def joined() -> list[WeightConverter]:
    """As a checkpoint that has gate and up projections in one tensor would be loaded."""
    return [WeightConverter("mlp.gate_up.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)])]


def written(root: Path) -> dict[str, Path]:
    """Checkpoints of each family, and of several layouts."""
    folders = {}
    for name, make in FAMILIES.items():
        torch.manual_seed(0)
        folders[name] = root / name
        make().save_pretrained(folders[name])
    folders["several files"] = root / "several files"
    tiny_model(hidden_size=6, head_dim=2).save_pretrained(folders["several files"], max_shard_size="3KB")
    assert len(list(folders["several files"].glob("*.safetensors"))) > 3
    model = tiny_model()
    model._weight_conversions = joined()
    folders[JOINED] = root / JOINED
    model.save_pretrained(folders[JOINED])
    assert "model.layers.0.mlp.gate_up.weight" in load_file(folders[JOINED] / "model.safetensors")
    folders["torch.save"] = root / "torch.save"
    tiny_model().save_pretrained(folders["torch.save"])
    file = folders["torch.save"] / "model.safetensors"
    torch.save(load_file(file), folders["torch.save"] / "pytorch_model.bin")
    file.unlink()
    return folders


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folders = written(tmp_path_factory.mktemp("models"))
    store = str(tmp_path_factory.mktemp("store") / "store")
    pipes, processes = [], []
    answers: dict[str, list[Any]] = {name: [] for name in folders}
    for number in range(RANKS):
        ours, theirs = multiprocessing.Pipe()
        processes.append(
            start_function(
                ["slipstream.learner.run"], rank, number, list(folders.values()), store, pipes=[theirs.fileno()]
            )
        )
        pipes.append(ours)
        theirs.close()
    try:
        for _ in folders:
            for pipe in pipes:
                assert pipe.poll(240), "a rank does not answer"
                name, _, answer = pipe.recv()
                answers[name].append(answer)
    finally:
        for process in processes:
            process.kill()
    return answers


@pytest.mark.parametrize("name", [*FAMILIES, "several files", JOINED])
def test_each_rank_holds_its_part_of_a_whole_load(found: Any, name: str) -> None:
    for answer in found[name]:
        assert isinstance(answer, dict), answer
        assert answer["sharded"]
        assert answer["differs"] == []
        assert answer["kinds"] == []
        assert answer["conversions"]
        assert answer["generation"]
        assert answer["config"]
        assert answer["score"]


@pytest.mark.parametrize("name", [*FAMILIES, "several files"])
def test_a_rank_reads_what_it_holds_and_no_more(found: Any, name: str) -> None:
    """All families here stack their experts, which a rank reads one by one."""
    for answer in found[name]:
        assert answer["read"] == answer["held"] + answer["buffers"]


def test_weights_that_a_conversion_takes_apart_are_read_whole_and_cut(found: Any) -> None:
    for answer in found[JOINED]:
        assert answer["read"] > answer["held"]


def test_a_checkpoint_of_another_kind_is_loaded_whole(found: Any) -> None:
    for answer in found["torch.save"]:
        assert isinstance(answer, dict), answer
        assert not answer["sharded"]
        assert answer["differs"] == []


def changed(folder: Path, **weights: torch.Tensor | None) -> Path:
    """A tied model, with weights put into its checkpoint, or left out of it."""
    tiny_model(tie_word_embeddings=True).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        key = next((key for key in tensors if name in key), name)
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key.replace("lm_head", "lm_head.weight")] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_what_only_a_whole_load_can_judge_is_left_to_it(tmp_path: Path) -> None:
    both = changed(tmp_path / "both", lm_head=torch.zeros_like(tiny_model().lm_head.weight))
    with pytest.raises(WholeLoadNeeded, match=r"it has both lm_head\.weight and model\.embed_tokens\.weight"):
        Outline(str(both), section(both), torch.float32)
    lacks = changed(tmp_path / "lacks", up_proj=None)
    with pytest.raises(WholeLoadNeeded, match=r"it lacks model\.layers\.\d\.mlp\.up_proj\.weight$"):
        Outline(str(lacks), section(lacks), torch.float32)
    quantised = changed(tmp_path / "quantised")
    facts = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**facts, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(WholeLoadNeeded, match="it is quantised"):
        Outline(str(quantised), section(quantised), torch.float32)


def test_a_checkpoint_that_does_not_fit_is_refused_as_a_whole_load_refuses_it(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", up_proj=torch.zeros(3, 3))
    with pytest.raises(ConfigError) as by_part:
        Outline(str(folder), section(folder), torch.float32)
    with pytest.raises(ConfigError) as whole:
        load_policy(str(folder), section(folder), SCORING, LearnerSection())
    assert str(by_part.value) == str(whole.value)
    assert "cannot be loaded" in str(whole.value)
