"""`slipstream init`: a run file, a task and its data to start from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

from protocol.config import ConfigError, ModelSection, RunSection
from protocol.config.sections.base import toml_value

TEMPLATES = Path(__file__).parent / "templates"
# As .txt: they are written out, not run or checked with the packages.
FILES = {"run.toml": "run.toml.txt", "task.py": "task.py.txt", "data.jsonl": "data.jsonl"}
MAX_MODEL_LEN = 4096
MAX_TURN_TOKENS = 512


def write(folder: Path, model: str) -> None:
    """Write the files into `folder`, and say what to do next. Raises `ConfigError`; overwrites nothing."""
    if taken := [str(folder / name) for name in FILES if (folder / name).exists()]:
        raise ConfigError(f"{', '.join(taken)}: already there, and nothing is overwritten; give another folder")
    settings = {"name": _run_name(folder), **_model_settings(model)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, template in FILES.items():
            text = (TEMPLATES / template).read_text(encoding="utf-8")
            if name == "run.toml":
                text = text.format_map({key: toml_value(value) for key, value in settings.items()})
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}; give another folder") from None
    run_file = folder / "run.toml"
    print(f"wrote {', '.join(str(folder / name) for name in FILES)}; next:")
    print(f"  slipstream up {run_file}          # vLLM, queue, workers and learner on this machine")
    print(f"  slipstream rollouts {run_file}    # meanwhile or later: what the policy says")


def _run_name(folder: Path) -> str:
    """The folder's, where a run may be called so."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name).lstrip(".")
    return name or str(RunSection.model_fields["name"].default)


def _model_settings(model: str) -> dict[str, object]:
    """A local model's type and context; of a hub's, which is not looked up, what most have. Raises `ConfigError`."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if model.startswith((".", "/", "~")):
            raise ConfigError(f"--model {model}: there is no such folder; give an existing model folder or a hub name")
        return {"path": model, **_fitting("bfloat16", MAX_MODEL_LEN)}
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        dtype = config.get("dtype") or config.get("torch_dtype")
        context = int(config.get("max_position_embeddings") or MAX_MODEL_LEN)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--model {model}: {file} cannot be read: {error}; save a model there") from None
    known = ModelSection.model_fields["dtype"].annotation
    return {"path": str(folder.absolute()), **_fitting(dtype if dtype in get_args(known) else "bfloat16", context)}


def _fitting(dtype: str, context: int) -> dict[str, object]:
    max_model_len = min(context, MAX_MODEL_LEN)
    return {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_turn_tokens": min(MAX_TURN_TOKENS, max_model_len // 4),
    }
