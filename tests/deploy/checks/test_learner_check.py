"""What cannot be made of optimiser and adapter ends a start before any process runs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from slipstream.deploy.checks import preflight
from slipstream.protocol.config import ConfigError, RunConfig


def config_of(**sections: Any) -> RunConfig:
    model = {"path": "org/model", **sections.pop("model", {})}
    return RunConfig(model=model, task={"path": "task.py:task"}, **sections)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"learner": {"optim": "sgd", "optim_args": {"eps": 1.0}}}, "sgd takes no eps"),
        (
            {"learner": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}}},
            "lr_scheduler_type = polynomial .* cannot be made",
        ),
        ({"lora": {"r": 4}}, "needs peft.*pip install"),
        ({"lora": {"r": 4}, "model": {"load_in_4bit": True}}, "load_in_4bit = true needs a GPU"),
    ],
    ids=str,
)
def test_what_cannot_be_made_is_refused(sections: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "load_in_4bit" not in sections.get("model", {})
    monkeypatch.setattr(
        "slipstream.learner.model.adapter.find_spec", lambda name: None if missing else find_spec("torch")
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=says):
        preflight.check_learner(config_of(**sections))


def test_the_defaults_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported for them: every start would take the longer."""
    from slipstream.learner.training import optimiser

    monkeypatch.setattr(optimiser, "check_optimiser", lambda section: pytest.fail("looked at"))
    preflight.check_learner(config_of())
