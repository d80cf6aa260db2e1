"""Optimisers, schedules and adapters of TRL scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.trl import AsyncGRPOConfig, GRPOConfig, GRPOTrainer
from slipstream.trl.learner_settings import lora_settings, quantisation_settings
from slipstream.trl.models import save_object
from slipstream.trl.translate import translate


def accuracy(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def learner_of(config: Any) -> dict[str, Any]:
    return translate(config, "org/model", None).sections["learner"]


def test_trl_s_own_schedule_holds_where_the_script_names_none() -> None:
    assert learner_of(GRPOConfig())["lr_scheduler_type"] == "linear"
    assert learner_of(AsyncGRPOConfig())["lr_scheduler_type"] == "constant"


def test_optimiser_and_schedule_keep_their_names() -> None:
    config = GRPOConfig(
        optim="paged_adamw_8bit",
        optim_args="block_wise=False, percentile_clipping=95",
        adam_epsilon=1e-6,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs='{"min_lr_rate": 0.1}',
        warmup_steps=0.1,
        max_steps=50,
    )
    learner = learner_of(config)
    assert (learner["optim"], learner["lr_scheduler_type"]) == ("paged_adamw_8bit", "cosine_with_min_lr")
    assert learner["optim_args"] == {"block_wise": False, "percentile_clipping": 95, "eps": 1e-6}
    assert (learner["lr_scheduler_kwargs"], learner["warmup_steps"]) == ({"min_lr_rate": 0.1}, 5)


def test_a_warm_up_that_trl_leaves_out_is_left_out_and_said() -> None:
    made = translate(AsyncGRPOConfig(warmup_steps=10), "org/model", None)
    assert made.sections["learner"]["warmup_steps"] == 0
    assert [note for note in made.notes if "warmup_steps=10 has no effect with lr_scheduler_type='constant'" in note]
    RunConfig.model_validate({**made.sections, "task": {"path": "task.py:trainer"}})


def test_a_lora_config_becomes_the_section() -> None:
    peft = pytest.importorskip("peft", reason="needs slipstream-rl[lora]")
    given = peft.LoraConfig(
        r=32, lora_alpha=16, target_modules=["v_proj", "q_proj"], use_rslora=True, task_type="CAUSAL_LM"
    )
    found = lora_settings(given, "GRPOTrainer")
    assert (found["r"], found["lora_alpha"], found["use_rslora"]) == (32, 16, True)
    assert found["target_modules"] == ["q_proj", "v_proj"]
    assert lora_settings(peft.LoraConfig(), "GRPOTrainer")["target_modules"] == "auto"
    assert lora_settings(peft.LoraConfig(target_modules="all-linear"), "GRPOTrainer")["r"] == 8


def test_a_trainer_takes_the_adapter_to_the_run() -> None:
    peft = pytest.importorskip("peft", reason="needs slipstream-rl[lora]")
    rows = [{"prompt": "Multiply 2 by 3."}]
    trainer = GRPOTrainer("org/model", accuracy, GRPOConfig(), rows, peft_config=peft.LoraConfig(r=4))
    assert trainer.translated(None).sections["lora"]["r"] == 4
    over = GRPOConfig(slipstream={"lora": {"r": 2}})
    assert (
        GRPOTrainer("m/m", accuracy, over, rows, peft_config=peft.LoraConfig()).translated(None).sections["lora"]["r"]
        == 2
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora_dropout": 0.05}, r"lora_dropout = 0.05 is not supported.*write lora_dropout=0.0"),
        ({"init_lora_weights": "pissa"}, r'init_lora_weights = .pissa.: .*must be true or "gaussian"'),
        ({"lora_bias": True}, r"lora_bias = True is not supported; leave it out"),
        ({"target_parameters": ["experts.gate_up_proj"]}, r"target_parameters = \['experts"),
    ],
    ids=str,
)
def test_what_of_a_lora_config_has_no_setting_is_refused(changes: dict[str, Any], says: str) -> None:
    peft = pytest.importorskip("peft", reason="needs slipstream-rl[lora]")
    with pytest.raises(ConfigError, match=says):
        lora_settings(peft.LoraConfig(**changes), "GRPOTrainer")


def test_another_adapter_than_lora_is_refused() -> None:
    peft = pytest.importorskip("peft", reason="needs slipstream-rl[lora]")
    with pytest.raises(ConfigError, match=r"peft_config=IA3Config\) is not supported: the adapter is LoRA"):
        lora_settings(peft.IA3Config(), "GRPOTrainer")


def test_a_quantised_base_becomes_settings() -> None:
    transformers = pytest.importorskip("transformers")
    four = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    assert quantisation_settings(four, "GRPOTrainer") == {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    eight = transformers.BitsAndBytesConfig(load_in_8bit=True)
    assert quantisation_settings(eight, "GRPOTrainer") == {"load_in_8bit": True}


def test_a_model_of_peft_is_its_base_and_its_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs slipstream-rl[lora]")
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=16, **small))
    weights = {name: values.clone() for name, values in base.state_dict().items()}
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    trainer = GRPOTrainer(model, accuracy, GRPOConfig(str(tmp_path / "run")), [{"prompt": "a"}])
    assert trainer.model is model
    made = trainer.translated(None).sections["lora"]
    assert (made["r"], made["target_modules"]) == (4, ["q_proj"])

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None: ...

    save_object(model, Tokenizer(), tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert set(saved) == set(weights)
    assert all(torch.equal(saved[name], weights[name]) for name in weights)
    assert any("lora_A" in name for name, _ in model.named_parameters())  # the script's own is as it was
    with torch.no_grad():
        next(values for name, values in model.named_parameters() if "lora_B" in name).fill_(0.1)
    with pytest.raises(ConfigError, match=r"this one has trained; give model\.merge_and_unload\(\) as the model"):
        GRPOTrainer(model, accuracy, GRPOConfig(), [{"prompt": "a"}])
