"""Loads what a script asks of its trainer: the policy as a transformers model, and the tokenizer or processor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from protocol import checkpoints
from protocol.config import ConfigError

# Suffix of the folder, beside the run directory, of a model that a script gives as an object.
SAVED = ".model"


def load_policy(base: str, checkpoint: Path | None, settings: dict[str, Any], lora: Any) -> Any:
    """Load the policy as transformers, and for an adapter peft, give it.

    Args:
        base: Folder or name of the model that the run began with.
        checkpoint: Folder of a checkpoint; None before the first.
        settings: The run's [model].
        lora: The script's `peft_config`; None for the whole model.
    """
    given: dict[str, Any] = {name: settings[name] for name in ("revision", "trust_remote_code") if name in settings}
    if lora is None:
        return _load(base if checkpoint is None else str(checkpoint / checkpoints.MODEL), given)
    import peft

    model = _load(base, given)
    if checkpoint is None:
        return peft.get_peft_model(model, lora)
    return peft.PeftModel.from_pretrained(model, str(checkpoint / checkpoints.ADAPTER), is_trainable=True)


def _load(path: str, given: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(path, **given)
    has_images = type(config) in AutoModelForImageTextToText._model_mapping
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    return kind.from_pretrained(path, **given)


def load_processing_class(path: str, trust_remote_code: bool) -> Any:
    """Load a model's processor, or its tokenizer where it has none."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)


def check_object(model: Any, kind: str) -> None:
    """Raise `ConfigError` for a model that is neither a name nor an object that can be saved."""
    if isinstance(model, str | Path):
        return
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"{kind}(model={type(model).__name__}): servers and learner load the base by its name; give that as text, "
            f"and the adapter as peft_config"
        )
    if not callable(getattr(model, "save_pretrained", None)):
        raise ConfigError(
            f"{kind}(model={type(model).__name__}): the model is loaded by the learner and by vLLM, so give its "
            f"folder or hub name as text, or an object of transformers"
        )


def save_object(model: Any, processing_class: Any, folder: Path) -> None:
    """Save a model that a script gave as an object, with its tokenizer, for the processes of the run to load."""
    aside = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    if processing_class is None:
        processing_class = load_processing_class(model.config._name_or_path, False)
    processing_class.save_pretrained(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.replace(folder)
