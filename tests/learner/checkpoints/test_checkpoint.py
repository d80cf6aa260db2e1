from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from slipstream.deploy.servers.gpu_memory import checkpoint_bytes
from slipstream.deploy.servers.model_shape import model_shape
from slipstream.learner.algorithm.step_data import StepRollouts
from slipstream.learner.checkpoints import checkpoint, model_folder
from slipstream.learner.checkpoints.checkpoint import CheckpointError, CheckpointInfo
from slipstream.learner.checkpoints.model_folder import Sources
from slipstream.learner.feed.packing import pack
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.model.reference import ReferenceModel
from slipstream.learner.run import build_trainer
from slipstream.learner.training.base import DivergedError
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import ConfigError, LearnerSection, ModelSection
from slipstream.protocol.messages import MAX_METRIC
from tests.kit import LEARNER, config
from tests.kit.fake_vllm.tokenizer import build_tokenizer
from tests.kit.learner import sample, step_rollouts

SECTION = LearnerSection(learning_rate=1e-2, warmup_steps=3, weight_decay=0.1)


def _train(trainer: PolicyTrainer, steps: range) -> None:
    for step in steps:
        samples = [sample(12, 3, 10 * step + i, rollout=i) for i in range(4)]
        trainer.step(pack(samples, 32), step_rollouts(samples))


def _weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.policy.named_weights()}


def test_two_steps_resumed_for_two_equal_four_to_the_bit(
    make_policy: Callable[..., Policy], model_path: Path, tmp_path: Path
) -> None:
    whole = PolicyTrainer(make_policy(), SECTION, 64)
    _train(whole, range(4))
    half = PolicyTrainer(make_policy(), SECTION, 64)
    _train(half, range(2))
    checkpoint.save(tmp_path, CheckpointInfo(2, 2), half, Sources(ModelSection(path=str(model_path))), keep=2)

    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.info.step, found.info.version) == (2, 2)
    path = str(found.model_path)
    resumed = PolicyTrainer(load_policy(path, ModelSection(path=path), Scoring(1.0, 16)), SECTION, 64)
    checkpoint.restore(found, resumed)
    _train(resumed, range(2, 4))
    expected = _weights(whole)
    for name, weight in _weights(resumed).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("settings", [{}, {"optim": "sgd"}, {"optim": "adagrad"}, {"weights_dtype": "model"}], ids=str)
def test_the_bytes_that_are_asked_of_the_disk_are_those_of_a_checkpoint(
    model_path: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    run_config = config(LEARNER, model={"path": str(model_path)}, learner=settings)
    trainer = build_trainer(run_config, None)
    _train(trainer, range(1))
    made = checkpoint.save(tmp_path, CheckpointInfo(1, 1), trainer, Sources(run_config.model), keep=1)
    size = sum((made.path / name).stat().st_size for name in ("model/model.safetensors", "trainer.pt"))
    shape = model_shape(run_config.model)
    assert shape is not None
    # Norms and headers are not counted, and they are a larger share of a tiny model than of any other.
    assert 0.75 * size < checkpoint_bytes(shape, run_config) <= size


def test_a_reference_that_follows_is_resumed_to_the_bit(
    make_policy: Callable[..., Policy], model_path: Path, tmp_path: Path
) -> None:
    """It moves at steps 3, 6 and 9; the checkpoint is of step 4."""
    section = SECTION.model_copy(update={"kl_coef": 0.5, "reference_sync_steps": 3, "reference_mixup": 0.3})
    whole = PolicyTrainer(make_policy(), section, 64, ReferenceModel(make_policy()))
    _train(whole, range(9))
    half = PolicyTrainer(make_policy(), section, 64, ReferenceModel(make_policy()))
    _train(half, range(4))
    saved = checkpoint.save(tmp_path, CheckpointInfo(4, 4), half, Sources(ModelSection(path=str(model_path))), keep=1)
    path = str(saved.model_path)
    policy = load_policy(path, ModelSection(path=path), Scoring(1.0, 16))
    resumed = PolicyTrainer(policy, section, 64, ReferenceModel(make_policy()))
    checkpoint.restore(saved, resumed)
    _train(resumed, range(4, 9))
    for one, other in (
        (_weights(whole), _weights(resumed)),
        (whole.state()["reference"], resumed.state()["reference"]),
    ):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_reference_that_followed_stays_where_it_is_if_it_shall_follow_no_more(
    make_policy: Callable[..., Policy], model_path: Path, tmp_path: Path
) -> None:
    """And is in the next checkpoint, too: `model.path` has another."""
    section = SECTION.model_copy(update={"kl_coef": 0.5, "reference_sync_steps": 1})
    before = PolicyTrainer(make_policy(), section, 64, ReferenceModel(make_policy()))
    _train(before, range(2))
    kept = {name: weight.clone() for name, weight in before.state()["reference"].items()}
    saved = checkpoint.save(tmp_path, CheckpointInfo(2, 2), before, Sources(ModelSection(path=str(model_path))), keep=1)
    still = section.model_copy(update={"reference_sync_steps": 0})
    resumed = PolicyTrainer(make_policy(), still, 64, ReferenceModel(make_policy()))
    checkpoint.restore(saved, resumed)
    _train(resumed, range(2, 4))
    again = resumed.state()["reference"]
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    none = PolicyTrainer(make_policy(), SECTION, 64)
    checkpoint.restore(saved, none)
    assert "reference" not in none.state()


def test_random_states_come_back(make_policy: Callable[..., Policy], model_path: Path, tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    trainer = PolicyTrainer(make_policy(), SECTION, 64)
    saved = checkpoint.save(
        tmp_path, CheckpointInfo(1, 1), trainer, Sources(ModelSection(path=str(model_path))), keep=1
    )
    expected = draw()
    checkpoint.restore(saved, trainer)
    assert draw() == expected


def test_only_complete_checkpoints_count_and_only_the_newest_are_kept(
    make_policy: Callable[..., Policy], model_path: Path, tmp_path: Path
) -> None:
    trainer = PolicyTrainer(make_policy(), SECTION, 64)
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 2, 3):
        checkpoint.save(
            tmp_path, CheckpointInfo(step, step + 5), trainer, Sources(ModelSection(path=str(model_path))), keep=2
        )
    (tmp_path / "checkpoints" / ".unfinished-step-000004").mkdir()
    (tmp_path / "checkpoints" / "step-000005").mkdir()
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.path.name, found.info.step, found.info.version) == ("step-000003", 3, 8)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*/state.json")) == ["state.json"] * 2


def test_a_checkpoint_s_model_folder_can_be_served(
    make_policy: Callable[..., Policy], model_path: Path, tmp_path: Path
) -> None:
    saved = checkpoint.save(
        tmp_path,
        CheckpointInfo(1, 1),
        PolicyTrainer(make_policy(), SECTION, 64),
        Sources(ModelSection(path=str(model_path))),
        keep=1,
    )
    names = {path.name for path in saved.model_path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= names
    assert len({path.stat().st_mode for path in saved.model_path.iterdir()}) == 1, "another user may serve it too"


def test_i8_nothing_in_it_needs_unpickling(
    make_policy: Callable[..., Policy], model_path: Path, tmp_path: Path
) -> None:
    trainer = PolicyTrainer(make_policy(), SECTION, 64)
    _train(trainer, range(1))
    saved = checkpoint.save(
        tmp_path, CheckpointInfo(1, 1), trainer, Sources(ModelSection(path=str(model_path))), keep=1
    )
    assert set(torch.load(saved.path / "trainer.pt", weights_only=True)) == {"optim", "optimiser", "schedule", "random"}


def test_a_gradient_that_is_not_finite_touches_no_weight(make_policy: Callable[..., Policy]) -> None:
    """The worst that the queue lets in: rewards of the largest size, and a policy that has left the one that sampled,
    under settings that bound neither. float32 does not hold the product of the two."""
    trainer = PolicyTrainer(make_policy(), SECTION.model_copy(update={"advantage": "dr_grpo", "delta": "none"}), 64)
    before = _weights(trainer)
    unlikely = replace(taken := sample(12, 3, 0), behaviour=8 * taken.behaviour)
    rewards = np.array([-MAX_METRIC, MAX_METRIC])
    huge = StepRollouts.of(rewards, np.zeros(2, dtype=np.int64), np.array([9, 0]))
    with pytest.raises(
        DivergedError, match=r"loss is -?(nan|inf).*log_ratio_max \d.*kl \d.*lower learner.learning_rate"
    ):
        trainer.step(pack([unlikely], 32), huge)
    for name, weight in _weights(trainer).items():
        assert torch.equal(weight, before[name])


def test_a_policy_whose_log_probs_are_not_finite_is_told_from_one_that_went_too_far(
    make_policy: Callable[..., Policy],
) -> None:
    policy = make_policy()
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(DivergedError, match=r"log_ratio_max nan.*own log-probs are not finite: set model.dtype"):
        PolicyTrainer(policy, SECTION, 64).step(pack([sample(12, 3, 0)], 32), step_rollouts([sample(12, 3, 0)]))


def test_warm_up_is_linear_then_constant(make_policy: Callable[..., Policy]) -> None:
    trainer = PolicyTrainer(make_policy(), SECTION, 64)
    samples = [sample(12, 3, 0)]
    rates = [trainer.step(pack(samples, 32), step_rollouts(samples)).learning_rate for _ in range(5)]
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2, 1e-2])


def test_a_checkpoint_of_the_release_before_loads_and_keeps_its_settings_from_now_on(
    make_policy: Callable[..., Policy], model_path: Path, tmp_path: Path
) -> None:
    trainer = PolicyTrainer(make_policy(), SECTION, 64)
    saved = checkpoint.save(
        tmp_path, CheckpointInfo(1, 3), trainer, Sources(ModelSection(path=str(model_path))), keep=1
    )
    (saved.path / "state.json").write_text('{"step": 1, "version": 3}')
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.info == CheckpointInfo(1, 3, settings=None)
    checkpoint.save(
        tmp_path,
        CheckpointInfo(2, 4, {"learner.steps": "9"}),
        trainer,
        Sources(ModelSection(path=str(model_path))),
        keep=1,
    )
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.info.settings == {"learner.steps": "9"}


def test_a_resumed_optimiser_has_the_run_file_s_settings(
    make_policy: Callable[..., Policy], model_path: Path, tmp_path: Path
) -> None:
    before = PolicyTrainer(make_policy(), SECTION, 64)
    _train(before, range(2))
    saved = checkpoint.save(tmp_path, CheckpointInfo(2, 2), before, Sources(ModelSection(path=str(model_path))), keep=1)
    changed = LearnerSection(learning_rate=4e-3, warmup_steps=5, weight_decay=0.2, betas=(0.8, 0.9))
    resumed = PolicyTrainer(make_policy(), changed, 64)
    checkpoint.restore(saved, resumed)
    samples = [sample(12, 3, 0)]
    rates = [resumed.step(pack(samples, 32), step_rollouts(samples)).learning_rate for _ in range(4)]
    assert rates == pytest.approx([4e-3 * 3 / 5, 4e-3 * 4 / 5, 4e-3, 4e-3])
    matrices, vectors = resumed.optimiser.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.2, 0.0)
    assert tuple(matrices["betas"]) == (0.8, 0.9)
    assert resumed.state()["optimiser"]["state"][0]["step"] == 6


def test_a_checkpoint_holds_the_tokenizer_and_the_template_that_the_run_used(
    make_policy: Callable[..., Policy], model_path: Path, tmp_path: Path
) -> None:
    """The files are not those of the model's folder."""
    other = tmp_path / "tokenizer"
    build_tokenizer("a template of the tokenizer's").save_pretrained(other)
    (other / "generation_config.json").write_text('{"top_k": 7}', encoding="utf-8")
    (template := tmp_path / "mine.jinja").write_text("a template of the run's", encoding="utf-8")
    model = ModelSection(path=str(model_path), tokenizer=str(other))
    trainer = PolicyTrainer(make_policy(), SECTION, 64)
    for chosen, text in ((None, "a template of the tokenizer's"), (template, "a template of the run's")):
        sources = Sources(model, chosen)
        saved = checkpoint.save(tmp_path, CheckpointInfo(1, 1), trainer, sources, keep=1).model_path
        assert PreTrainedTokenizerFast.from_pretrained(saved).chat_template == text
        assert (saved / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()
        assert "top_k" not in (saved / "generation_config.json").read_text()


def test_a_checkpoint_of_a_model_that_sees_holds_its_image_processor(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (model / "preprocessor_config.json").write_text('{"patch_size": 8}', encoding="utf-8")
    (saved := tmp_path / "saved").mkdir()
    checkpoint.copy_sources(Sources(ModelSection(path=str(model)), None), saved)
    assert (saved / "preprocessor_config.json").read_text(encoding="utf-8") == '{"patch_size": 8}'


def test_what_is_on_the_hub_is_taken_at_the_run_s_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(name: str, revision: str | None, ignore_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert "*.safetensors" in ignore_patterns
        return str(tmp_path)

    monkeypatch.setattr(model_folder, "snapshot_download", snapshot_download)
    for tokenizer in (None, "org/tokenizer"):
        model = ModelSection(path="org/model", revision="abc", tokenizer=tokenizer)
        checkpoint.copy_sources(Sources(model), tmp_path)
    assert asked == [("org/model", "abc"), ("org/model", "abc"), ("org/tokenizer", None)]


def saved_from(folder: Path, run_dir: Path, **files: Any) -> Path:
    """Write files into a model's folder, train nothing, and return the model folder of its checkpoint."""
    for name, content in files.items():
        (folder / name.replace("__", "/")).write_text(json.dumps(content), encoding="utf-8")
    model = ModelSection(path=str(folder))
    trainer = PolicyTrainer(load_policy(str(folder), model, Scoring(1.0, 16)), SECTION, 64)
    checkpoint.try_files(run_dir, trainer, Sources(model))
    assert not list((run_dir / "checkpoints").iterdir()), "a trial leaves nothing"
    return checkpoint.save(run_dir, CheckpointInfo(1, 1), trainer, Sources(model), keep=1).model_path


@pytest.fixture
def own_model(model_path: Path, tmp_path: Path) -> Path:
    """A copy of the model's folder, to be changed."""
    return Path(shutil.copytree(model_path, tmp_path / "own"))


@pytest.mark.parametrize(
    "generation",
    [{"top_k": 20}, {"temperature": 0.6, "top_p": 0.95}, {"min_p": 0.1}, {"pad_token_id": -1}, {"num_beams": 0}],
    ids=str,
)
def test_what_transformers_reads_and_refuses_to_write_is_copied(
    own_model: Path, tmp_path: Path, generation: dict[str, Any]
) -> None:
    path = own_model / "generation_config.json"
    path.write_text(json.dumps(generation), encoding="utf-8")
    saved = saved_from(own_model, tmp_path)
    assert json.loads((saved / "generation_config.json").read_bytes()) == generation


def test_generation_settings_in_the_model_s_config_are_kept_there(own_model: Path, tmp_path: Path) -> None:
    (own_model / "generation_config.json").unlink(missing_ok=True)
    facts = json.loads((own_model / "config.json").read_bytes())
    saved = saved_from(own_model, tmp_path, **{"config.json": {**facts, "temperature": 0.5, "top_k": 3}})
    assert json.loads((saved / "config.json").read_bytes())["temperature"] == 0.5
    assert not (saved / "generation_config.json").exists()


def test_a_config_keeps_the_keys_of_its_source_and_names_the_served_type_under_both_names(
    own_model: Path, tmp_path: Path
) -> None:
    facts = json.loads((own_model / "config.json").read_bytes())
    facts.pop("rope_parameters", None)
    given = {**facts, "rope_theta": 1_000_000.0, "torch_dtype": "float16", "my_own_key": {"a": [1]}}
    saved = saved_from(own_model, tmp_path, **{"config.json": given})
    written = json.loads((saved / "config.json").read_bytes())
    assert (written["rope_theta"], written["my_own_key"]) == (1_000_000.0, {"a": [1]})
    assert written["rope_parameters"]["rope_theta"] == 1_000_000.0
    assert written["torch_dtype"] == written["dtype"]
    again = load_policy(str(saved), ModelSection(path=str(saved)), Scoring(1.0, 16))
    assert again.model.config.rope_parameters["rope_theta"] == 1_000_000.0


def test_a_config_names_no_quantisation_of_the_source_at_any_depth(tmp_path: Path) -> None:
    """The weights are written whole."""
    (model := tmp_path / "model").mkdir()
    (saved := tmp_path / "saved").mkdir()
    quantised = {"hidden_size": 8, "quantization_config": {"quant_method": "fp8"}}
    (model / "config.json").write_text(json.dumps({**quantised, "language_config": quantised}), encoding="utf-8")
    (saved / "config.json").write_text('{"language_config": {"hidden_size": 8}}', encoding="utf-8")
    checkpoint.copy_sources(Sources(ModelSection(path=str(model))), saved)
    written = json.loads((saved / "config.json").read_bytes())
    assert written == {"hidden_size": 8, "language_config": {"hidden_size": 8}}


def test_weights_are_readable_for_whom_the_umask_lets_read(own_model: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        saved = saved_from(own_model, tmp_path)
    finally:
        os.umask(before)
    files = [file for file in saved.parent.rglob("*") if file.is_file()]
    assert "model.safetensors" in [file.name for file in files]
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o640"}


def test_everything_beside_the_weights_is_copied_and_weights_are_not(own_model: Path, tmp_path: Path) -> None:
    (own_model / "additional_chat_templates").mkdir()
    kept = {
        "tokenization_own.py": "from .own_vocabulary import WORDS",
        "own_vocabulary.py": "WORDS = []",
        "tekken.json": "{}",
        "additional_chat_templates__rag.jinja": "{{ messages }}",
        "LICENSE": "mine",
    }
    dropped = ("pytorch_model.bin", "model.gguf", "optimizer.pt", "pytorch_model.bin.index.json", "README.md")
    for name in (*kept, *dropped):
        (own_model / name.replace("__", "/")).write_text(kept.get(name, "{}"), encoding="utf-8")
    saved = saved_from(own_model, tmp_path)
    assert {name: (saved / name.replace("__", "/")).read_text(encoding="utf-8") for name in kept} == kept
    assert not [name for name in dropped if (saved / name).exists()]


def test_whatever_a_save_raises_is_a_checkpoint_error_before_the_first_step_as_well(
    own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelSection(path=str(own_model))
    trainer = PolicyTrainer(load_policy(str(own_model), model, Scoring(1.0, 16)), SECTION, 64)

    def refuse(*args: Any, **options: Any) -> None:
        raise KeyError("a library's own")

    monkeypatch.setattr(trainer.policy.model, "save_pretrained", refuse)
    with pytest.raises(CheckpointError, match=r"no checkpoint of this model can be written .*a library's own"):
        checkpoint.try_files(tmp_path, trainer, Sources(model))
    with pytest.raises(CheckpointError, match="a library's own"):
        checkpoint.save(tmp_path, CheckpointInfo(1, 1), trainer, Sources(model), keep=1)
    assert not list((tmp_path / "checkpoints").iterdir())


OWN_CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class OwnConfig(Qwen3Config):
    model_type = "own"


class Own(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_with_code_of_its_own_is_resumed_from_its_checkpoint(model_path: Path, tmp_path: Path) -> None:
    """The checkpoint holds the code too; without model.trust_remote_code none of it is run."""
    folder = tmp_path / "own"
    shutil.copytree(model_path, folder)
    (folder / "own.py").write_text(OWN_CODE, encoding="utf-8")
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    facts |= {
        "model_type": "own",
        "architectures": ["Own"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
    }
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"model.trust_remote_code = False: the model cannot be loaded: .*custom code"
    ):
        load_policy(str(folder), ModelSection(path=str(folder)), Scoring(1.0, 16))
    model = ModelSection(path=str(folder), trust_remote_code=True)
    trainer = PolicyTrainer(load_policy(str(folder), model, Scoring(1.0, 16)), SECTION, 64)
    assert type(trainer.policy.model).__name__ == "Own"
    saved = checkpoint.save(tmp_path, CheckpointInfo(1, 1), trainer, Sources(model), keep=1)
    shutil.rmtree(folder)
    again = load_policy(str(saved.model_path), model, Scoring(1.0, 16))
    assert type(again.model).__name__ == "Own"


@pytest.mark.parametrize("of_a_checkpoint", [False, True])
def test_a_revision_is_the_model_s_and_not_a_checkpoint_s(
    of_a_checkpoint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, bool]] = []

    def config(path: str, revision: str, trust_remote_code: bool) -> Qwen3Config:
        asked.append((path, revision, trust_remote_code))
        return Qwen3Config()

    def weights(path: str, revision: str, trust_remote_code: bool, **_: object) -> None:
        asked.append((path, revision, trust_remote_code))
        raise OSError("no")

    monkeypatch.setattr(AutoConfig, "from_pretrained", config)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", weights)
    path = str(tmp_path) if of_a_checkpoint else "org/model"
    with pytest.raises(ConfigError):
        load_policy(path, ModelSection(path="org/model", revision="abc", trust_remote_code=True), Scoring(1.0, 16))
    assert asked == 2 * [(path, "main" if of_a_checkpoint else "abc", True)]
