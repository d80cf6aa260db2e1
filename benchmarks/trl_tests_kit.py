"""What stands in for the hub when TRL's own tests run: models of its tiny ones' architectures, and data sets.

A pytest plugin as well: `python -m pytest -p benchmarks.trl_tests_kit`, for a copy of TRL's tests that
`benchmarks.trl_tests` made.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest

# A server and the settings of the runs that go through it, from `benchmarks.trl_tests`.
MODELS, SERVER, QUEUE_PORT, SEED_FOLDER = "TRL_TESTS_MODELS", "TRL_TESTS_SERVER", "TRL_TESTS_QUEUE", "TRL_TESTS_FOLDER"

CONTEXT = 1024

# Tiny models that are built here: class and fields of their configuration.
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
_ARCHITECTURES = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2", "ForCausalLM", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3", "ForCausalLM", {"head_dim": 32}),
    "tiny-LlamaForCausalLM-3.2": ("Llama", "ForCausalLM", {}),
    "tiny-Gemma2ForCausalLM": ("Gemma2", "ForCausalLM", {"head_dim": 32}),
    "tiny-Cohere2ForCausalLM": ("Cohere2", "ForCausalLM", {"head_dim": 32}),
    "tiny-Qwen3MoeForCausalLM": (
        *("Qwen3Moe", "ForCausalLM"),
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2", "ForSequenceClassification", {"num_labels": 1}),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3", "ForSequenceClassification", {"num_labels": 1, "head_dim": 32}),
    "tiny-LlamaForSequenceClassification-3.2": ("Llama", "ForSequenceClassification", {"num_labels": 1}),
}

_ROWS = (
    ("Beautiful is better than", "ugly."),
    ("Explicit is better than", "implicit."),
    ("Simple is better than", "complex."),
    ("Complex is better than", "complicated."),
)


def build_models(folder: Path) -> None:
    """Build the tiny models that are not there yet, each with the tests' tokenizer."""
    import torch
    import transformers

    from tests.kit.fake_vllm.tokenizer import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    for name, (family, head, more) in _ARCHITECTURES.items():
        if (folder / name / "config.json").exists():
            continue
        torch.manual_seed(len(name))
        fields = {**_SIZES, "vocab_size": len(tokenizer), "initializer_range": 0.2, **more}
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
        config = getattr(transformers, f"{family}Config")(**fields, **ids)
        model = getattr(transformers, f"{family}{head}")(config)
        tokenizer.save_pretrained(folder / name)
        model.save_pretrained(folder / name)


def zen(config: str, split: str | None = None, streaming: bool = False) -> Any:
    """Make the data set that TRL's tests load from the hub, with fewer rows. Columns follow from the name `config`."""
    from datasets import Dataset, DatasetDict, IterableDatasetDict

    chat = config.startswith("conversational")

    def row(prompt: str, completion: str) -> dict[str, Any]:
        asked: Any = [{"role": "user", "content": prompt}] if chat else prompt
        said: Any = [{"role": "assistant", "content": completion}] if chat else completion
        return {"prompt": asked, **({"completion": said} if config.endswith("prompt_completion") else {})}

    parts = DatasetDict(
        {
            "train": Dataset.from_list([row(*texts) for texts in _ROWS]),
            "test": Dataset.from_list([row(*texts) for texts in _ROWS[:2]]),
        }
    )
    if streaming:
        parts = IterableDatasetDict({name: rows.to_iterable_dataset() for name, rows in parts.items()})
    return parts if split is None else parts[split]


@pytest.fixture(autouse=True)
def _trl_tests(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Give a test the stand-ins, and its runs the server."""
    import datasets

    from slipstream.trl import configs

    def load_dataset(path: str, name: str = "", **given: Any) -> Any:
        if path != "trl-internal-testing/zen":
            pytest.skip(f"the data set {path} is not built here")
        return zen(name, **given)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    if hasattr(request.module, "load_dataset"):
        monkeypatch.setattr(request.module, "load_dataset", load_dataset)
    raises = pytest.raises
    # That there is an error is compared, and not its words.
    monkeypatch.setattr(pytest, "raises", lambda kind, *given, match=None, **more: raises(kind, *given, **more))
    made = configs._Config.__init__

    def init(self: Any, *args: Any, **fields: Any) -> None:
        made(self, *args, **fields)
        self.slipstream = {
            "vllm": {"servers": [os.environ[SERVER]], "max_model_len": CONTEXT},
            "queue": {"port": int(os.environ[QUEUE_PORT])},
            "deploy": {"grace_s": 2.0},
            "worker": {"episodes": 16},
            **self.slipstream,
        }

    init.__signature__ = inspect.signature(made)  # type: ignore[attr-defined]
    monkeypatch.setattr(configs._Config, "__init__", init)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a trainer's arguments need no accelerator here."""
    for item in items:
        parent = item.parent
        if parent is not None and parent.name == "TestAsyncGRPOTrainer":
            parent.own_markers[:] = [marker for marker in parent.own_markers if marker.name != "skipif"]
