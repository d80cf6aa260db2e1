"""Loads what a script asks of its trainer: the policy as a transformers model, and the tokenizer or processor."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.protocol import checkpoints
from slipstream.protocol.config import ConfigError

# Suffixes of the folders, next to the run directory, of a model that a script gives as an object, and of a tokenizer or
# processor that it has changed.
SAVED, TOKENIZER = ".model", ".tokenizer"


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


def is_changed(processing_class: Any, path: str, trust_remote_code: bool) -> bool:
    """Tell whether a tokenizer or processor differs, in what a run reads of it, from the one that `path` names."""
    try:
        original = load_processing_class(path, trust_remote_code)
    except Exception:  # of a name that is none: the object was made by the script
        return True
    return _facts(processing_class) != _facts(original)


def _facts(processing_class: Any) -> list[Any]:
    """Return vocabulary, special tokens, templates and processing of images; padding is of no use to a run."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = {} if backend is None else json.loads(backend.to_str())
    parts = {name: part for name, part in whole.items() if name not in ("padding", "truncation")}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    images = getattr(processing_class, "image_processor", None)
    templates = [getattr(each, "chat_template", None) for each in (processing_class, tokenizer)]
    templates.append(getattr(tokenizer, "response_template", None))
    return [parts or tokenizer.get_vocab(), special, templates, images and images.to_dict()]


def save_processing_class(processing_class: Any, folder: Path) -> None:
    """Save a tokenizer or processor that a script has changed, for the processes of the run to load."""
    with _replaced(folder) as aside:
        processing_class.save_pretrained(aside)


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """Give a folder to write to, which takes the place of `folder` once it is whole."""
    aside = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    yield aside
    shutil.rmtree(folder, ignore_errors=True)
    aside.replace(folder)


def check_object(model: Any, kind: str) -> None:
    """Raise `ConfigError` for a model that is neither a name nor an object that can be saved."""
    if isinstance(model, str | Path):
        return
    if not callable(getattr(model, "save_pretrained", None)):
        raise ConfigError(
            f"{kind}(model={type(model).__name__}): the model is loaded by the learner and by vLLM, so give its "
            f"folder or hub name as text, or an object of transformers"
        )


def adapter_of(model: Any, peft_config: Any, kind: str) -> Any:
    """Return the trainer's `peft_config`, or that of a model that is one of peft's.

    Raises:
        ConfigError: Both have one, the model has several adapters, or its adapter has learnt something, which a run
            cannot continue from.
    """
    given = getattr(model, "peft_config", None)
    if not isinstance(given, Mapping):
        return peft_config
    name = type(model).__name__
    merged = "give model.merge_and_unload() as the model, and a peft_config for a new adapter"
    if peft_config is not None:
        raise ConfigError(f"{kind}(model={name}, peft_config=...): the model has an adapter already; {merged}")
    if len(given) != 1:
        raise ConfigError(f"{kind}(model={name}) has {len(given)} adapters: {', '.join(given)}; keep one of them")
    if any("lora_B" in name and bool(values.any()) for name, values in model.named_parameters()):
        raise ConfigError(
            f"{kind}(model={name}): an adapter begins at its base here, and this one has trained; {merged}"
        )
    return next(iter(given.values()))


def save_object(model: Any, processing_class: Any, folder: Path) -> None:
    """Save a model that a script gave as an object, with its tokenizer, for the processes of the run to load."""
    base = copy.deepcopy(model).unload() if hasattr(model, "peft_config") else model
    if processing_class is None:
        processing_class = load_processing_class(model.config._name_or_path, False)
    with _replaced(folder) as aside:
        save_as_it_is(base, processing_class, aside)


def save_as_it_is(model: Any, processing_class: Any, folder: Path) -> None:
    """Save a model and its tokenizer.

    transformers refuses to write generation settings that it has read, such as a temperature without do_sample, and
    safetensors lets the owner alone read its files.
    """
    settings, written = getattr(model, "generation_config", None), Path(folder, "generation_config.json")
    if settings is None:
        model.save_pretrained(folder)
    else:
        model.generation_config = type(settings)()
        try:
            model.save_pretrained(folder)
        finally:
            model.generation_config = settings
        if written.exists():
            settings.to_json_file(written)
    processing_class.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(next(folder.glob("*config.json")), weights)
