from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.protocol.config import ModelSection
from tests.kit.fake_vllm.tokenizer import tiny_tokenizer
from tests.kit.model import save_tiny_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_policy(model_path: Path) -> Callable[..., Policy]:
    def make(attention: str = "varlen_sdpa", temperature: float = 1.0, logits_mib: int = 16) -> Policy:
        model = ModelSection(path=str(model_path), attention=attention)
        return load_policy(str(model_path), model, Scoring(temperature, logits_mib))

    return make
