from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.model.policy import Policy, Scoring, load_policy
from protocol.config import ModelSection
from tests.kit.learner import VOCABULARY


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Qwen3 and the name of a tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture
def make_policy(model_path: Path) -> Callable[..., Policy]:
    def make(attention: str = "varlen_sdpa", temperature: float = 1.0, chunk_tokens: int = 16) -> Policy:
        model = ModelSection(path=str(model_path), attention=attention)
        return load_policy(str(model_path), model, Scoring(temperature, chunk_tokens))

    return make
