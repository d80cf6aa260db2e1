"""A turn ends at an id at which sampling stops; else each would run to its limit of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.rollout_worker.chat.build import build_chat_format
from tests.kit import WORKER, config
from tests.kit.fake_vllm.tokenizer import CHAT_TEMPLATE, build_tokenizer

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


def run_file(folder: Path, template: str, generation: str, **rollout: Any) -> RunConfig:
    tokenizer = build_tokenizer(template)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    (folder / "generation_config.json").write_text(generation, encoding="utf-8")
    return config(WORKER, model={"path": str(folder)}, rollout=rollout)


def test_a_template_whose_end_of_turn_does_not_stop_is_refused_for_a_task_without_tools(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends a turn with '<\|im_end\|>'.* rollout.stop = \['<\|im_end\|>'\]"):
        build_chat_format(run_file(tmp_path, CHAT_TEMPLATE, "{}"), [])


def test_a_stop_of_the_run_file_or_of_generation_config_ends_it(tmp_path: Path) -> None:
    build_chat_format(run_file(tmp_path / "stop", CHAT_TEMPLATE, "{}", stop=["<|im_end|>"]), [])
    end = build_tokenizer(CHAT_TEMPLATE).convert_tokens_to_ids("<|im_end|>")
    build_chat_format(run_file(tmp_path / "ids", CHAT_TEMPLATE, f'{{"eos_token_id": [{end}]}}'), [])


def test_a_template_that_ends_a_turn_with_plain_text_is_accepted(tmp_path: Path) -> None:
    """Nothing says what the policy has learnt to write there: its eos, as a rule."""
    build_chat_format(run_file(tmp_path, PLAIN, "{}"), [])


def test_a_stop_id_that_follows_another_special_token_is_an_end(tmp_path: Path) -> None:
    both = CHAT_TEMPLATE.replace("<|im_end|>", "<|im_end|><|endoftext|>")
    build_chat_format(run_file(tmp_path, both, "{}"), [])
