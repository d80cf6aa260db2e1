"""Limits of a new run file, from its model's template, its tools and its prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.deploy.checks.first_limits import choose
from slipstream.protocol.config import RunConfig
from slipstream.rollout_worker.task.task import Task
from tests.kit import config
from tests.kit.fake_vllm.tokenizer import CHAT_TEMPLATE, THINKING_TEMPLATE, save_model_folder
from tests.kit.worker import multiply

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TASK = Task(
    dataset=[{"prompt": [{"role": "user", "content": "Multiply 2 by 3."}]}],
    tools=[multiply],
    rewards=[lambda completions, **columns: [0.0] * len(completions)],
)


def run_file(folder: Path, template: str, **vllm: int) -> RunConfig:
    save_model_folder(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    limits = {"vllm": {"max_model_len": 4096, **vllm}, "rollout": {"max_turn_tokens": 512, "max_turns": 4}}
    return config(limits, model={"path": str(folder)})


@pytest.mark.parametrize(
    ("template", "tools", "turn"),
    [(CHAT_TEMPLATE, "template", 128), (THINKING_TEMPLATE, "template", 512), (PLAIN, "prompt", 128)],
)
def test_a_context_for_the_prompt_and_all_turns(tmp_path: Path, template: str, tools: str, turn: int) -> None:
    found = choose(run_file(tmp_path, template), TASK)
    assert found is not None
    assert (found.tools, found.max_turn_tokens) == (tools, turn)
    turns = 4 * (turn + 64)
    assert turns + 16 < found.max_model_len < turns + 1024  # the prompt with its tools, in this tokenizer
    assert found.max_model_len % 128 == 0


def test_a_context_within_the_models(tmp_path: Path) -> None:
    found = choose(run_file(tmp_path, CHAT_TEMPLATE, max_model_len=600), TASK)
    assert found is not None
    assert found.longest_prompt < found.max_model_len == 600 < found.needed


def test_nothing_for_a_template_that_shows_tools_in_no_way(tmp_path: Path) -> None:
    assert choose(run_file(tmp_path, "{{ raise_exception('no') }}"), TASK) is None
