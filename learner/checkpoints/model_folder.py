"""Completes a checkpoint's model folder: copies all files of its sources but the weights, so that it can be loaded and
served as they can.

The files of the sources are copied as they are. transformers would rewrite them in the form of its own release, and
refuses values that it has read itself: a `top_k` without `do_sample` in generation_config.json, for example.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from slipstream.protocol.config import ModelSection

CHAT_TEMPLATE = "chat_template.jinja"

# What a tokenizer of its own replaces: files of the model's that would be taken for a part of it.
TOKENIZER_FILES = (
    "tokenizer*",
    "tokenization*",
    "*.model",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "tekken.json",
)

# The folder of a tokenizer's further chat templates.
TEMPLATES = "additional_chat_templates"

# Weights, in any form, and what belongs to another run or to the source's page.
NOT_COPIED = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.npz", "*.npy"),
    *("*.safetensors.index.json", "*.bin.index.json", "*.onnx_data", "*.tar*", "*.zip", "*.parquet", "*.arrow"),
    *("README*", ".*", "training_args*", "trainer_state.json", "adapter_config.json", "events.out.*", "*.log"),
)

# Of the model alone, if the tokenizer stands elsewhere.
OF_THE_MODEL = ("config.json", "generation_config.json", "*processor_config.json", "modeling*", "configuration*")

# Keys of config.json that are the checkpoint's own. Its type is the servers', under both names that there are.
_TYPES = ("dtype", "torch_dtype")
_OWN = ("architectures", "transformers_version", *_TYPES)

# Keys of the source that are not true of the checkpoint, whose weights are written whole.
_NOT_KEPT = ("quantization_config",)


@dataclass(frozen=True)
class Sources:
    """Names the sources of all files but the weights.

    Attributes:
        model: Names the tokenizer that the run uses.
        chat_template: File that replaces the tokenizer's chat template; None to keep that.
    """

    model: ModelSection
    chat_template: Path | None = None


def copy_sources(sources: Sources, target: Path) -> None:
    """Copy the files of the sources, but for the weights, into `target`, and add their keys to its config.json."""
    model = sources.model
    folder = _folder(model.path, model.revision)
    apart = model.tokenizer_path != model.path
    if sources.chat_template is not None:
        shutil.copyfile(sources.chat_template, target / CHAT_TEMPLATE)
    if apart:
        _copy(_folder(model.tokenizer_path, model.tokenizer_revision), target, (*NOT_COPIED, *OF_THE_MODEL))
    _copy(folder, target, (*NOT_COPIED, *TOKENIZER_FILES) if apart else NOT_COPIED, templates=not apart)
    if (target / "config.json").is_file() and (folder / "config.json").is_file():
        _keep_keys(folder / "config.json", target / "config.json")


def _folder(source: str, revision: str | None) -> Path:
    folder = Path(source)
    if folder.is_dir():
        return folder
    return Path(snapshot_download(source, revision=revision, ignore_patterns=list(NOT_COPIED)))


def _copy(source: Path, target: Path, left_out: tuple[str, ...], templates: bool = True) -> None:
    """Copy the files of `source`; those that are there already stay."""
    for path in _files(source, templates):
        copied = target / path.relative_to(source)
        if not copied.exists() and not any(fnmatch(path.name, pattern) for pattern in left_out):
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copied)


def _files(source: Path, templates: bool) -> Iterator[Path]:
    yield from (path for path in source.iterdir() if path.is_file())
    if templates and (source / TEMPLATES).is_dir():
        yield from (path for path in (source / TEMPLATES).iterdir() if path.is_file())


def _keep_keys(source: Path, target: Path) -> None:
    """Put the keys of the source's config.json into the checkpoint's.

    Each release of transformers and of other readers knows keys of its own: 4.57 reads `rope_theta` and takes 10,000
    where only `rope_parameters` stands.
    """
    ours = json.loads(target.read_text(encoding="utf-8"))
    theirs = json.loads(source.read_text(encoding="utf-8"))
    text = json.dumps(_merged(ours, theirs, ours.get("dtype")), indent=2, sort_keys=True)
    target.write_text(text + "\n", encoding="utf-8")


def _merged(ours: dict[str, Any], theirs: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Return the keys of both. Where both have one, the source's value stays, but for `_OWN`."""
    found = dict(ours)
    for key, value in theirs.items():
        mine = ours.get(key)
        if key in _NOT_KEPT:
            continue
        if isinstance(value, dict) and isinstance(mine, dict):
            found[key] = _merged(mine, value, mine.get("dtype", dtype))
        elif key in _TYPES:
            found[key] = ours.get("dtype", dtype)
        elif key not in _OWN or key not in ours:
            found[key] = value
    return found
