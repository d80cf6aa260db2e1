"""The runner of TRL's own tests: which apply, what the page says of them, and what stands in for the hub."""

from __future__ import annotations

import pytest

from benchmarks.trl_tests import REASONS, model_of, page, reason_of, without_internals
from benchmarks.trl_tests_kit import zen


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_grpo_trainer.py::TestGRPOTrainer::test_train_reward_func_standard", None),
        ("test_grpo_trainer.py::TestGRPOTrainer::test_train_loss_types[cispo-False]", None),
        ("test_grpo_trainer.py::TestGRPOTrainer::test_train_loss_types[cispo-True]", "Liger"),
        (
            "experimental/test_async_grpo_trainer.py::TestAsyncGRPOTrainer::test_dataset_required_without",
            None,
        ),
        ("experimental/test_async_grpo_trainer.py::TestReconciler::test_single_turn", "rollout worker"),
        ("test_rloo_trainer.py::TestRLOOTrainer::test_train_multiple_iterations", None),
        ("test_grpo_trainer.py::TestGRPOTrainer::test_train_with_adaptive_entropy", "refused"),
        ("test_chat_template_utils.py::TestParseResponse::test_vlm[x]", "chat_template_utils"),
    ],
)
def test_a_test_applies_or_has_a_reason(name: str, reason: str | None) -> None:
    found = reason_of(f"trl_tests/{name}")
    assert (found is None) if reason is None else reason in (found or "")


def test_every_reason_is_one_line() -> None:
    assert all(reason and len(reason) < 120 and "\n" not in reason for reason in REASONS.values())


def test_what_is_imported_from_inside_the_trainer_is_none() -> None:
    text = "import trl.experimental.async_grpo.async_rollout_worker as worker\nfrom trl.experimental.async_grpo.x import (\n    a,\n    b as c,\n)\nfrom trl import d\n"  # noqa: E501
    assert without_internals(text) == "worker = None\na = c = None\nfrom trl import d\n"


def test_the_page_counts_each_test_once() -> None:
    results = {
        "trl_tests/test_grpo_trainer.py::T::test_a[/w/models/tiny]": ["passed", "", "3"],
        "trl_tests/test_grpo_trainer.py::T::test_b": ["failed", "KeyError | at\n/w/runs/b", "3"],
        "trl_tests/test_rloo_trainer.py::T::test_c": ["not applicable", "no reason", ""],
    }
    text = page(results, 5, "1.16")
    assert "Of 5 tests, 1 are not applicable. 2 ran: **1 passed**, 1 failed; 2 have not been run." in text
    assert "| test_grpo_trainer.py | 1 | 1 | 0 |" in text
    assert "| no reason | 1 |" in text
    assert r"| `test_grpo_trainer.py::T::test_b` | KeyError \| at b |" in text


def test_the_data_set_has_the_columns_of_its_name() -> None:
    pytest.importorskip("datasets")
    assert zen("standard_prompt_only", "train").column_names == ["prompt"]
    assert zen("conversational_prompt_completion", "test")[0]["completion"][0]["role"] == "assistant"
    assert [*zen("standard_prompt_only", streaming=True)] == ["train", "test"]
    assert model_of("x::test_train_with_chat_template_kwargs") == "tiny-Qwen3ForCausalLM"
