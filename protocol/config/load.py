"""The run file: one TOML file, read with its overrides into a `RunConfig` (its settings stand in `schema`).

Paths: `run.dir` is taken from the working directory; `task.path`, `model.path`, `model.tokenizer`, `teacher.path`,
`demonstrations.path` and the files of [chat] and `learner.callbacks` from the folder of the run file. Any field may be
given as `--section.key value` on every command; such paths are taken from the working directory. A loaded run file
holds all but `run.dir` as absolute ones.

Whether task and model are there is checked only where a process needs them: a queue starts without either.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from slipstream.protocol.config import text as config_text
from slipstream.protocol.config.schema import RunConfig
from slipstream.protocol.config.sections.algorithm import AlgorithmSection
from slipstream.protocol.config.sections.presets import PRESETS
from slipstream.protocol.config.sections.run import file_of

# Files named by a run file that a process needs. `tokenizer`: the model's folder, whatever it holds; `chat`: the files
# of [chat], which workers use and the learner compares; `callbacks`: those of learner.callbacks.
Need = Literal["task", "tokenizer", "model", "chat", "callbacks"]

OPTION = re.compile(r"--([a-z_]+)\.([a-z0-9_]+)(?:=(.*))?", re.DOTALL)

# Settings of [learner] that exclude each other: an override of one removes the run file's other.
_WHEN_IT_ENDS = ("steps", "epochs")

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


class ConfigError(ValueError):
    """The run file cannot be used; the text names the value and the remedy."""


def load(path: str | Path, overrides: list[str] | None = None, needs: Collection[Need] = ()) -> RunConfig:
    """Read the run file at `path`.

    Args:
        overrides: Arguments `--section.key value`.
        needs: Files that must be there.

    Raises:
        ConfigError: The run file cannot be used, or a needed file is missing.
    """
    return resolve(path, parse_overrides(overrides or []), "command line", needs)


def resolve(
    path: str | Path | None, given: Mapping[tuple[str, str], Any], giver: str, needs: Collection[Need] = ()
) -> RunConfig:
    """Read the run file at `path` (None: an empty one), with the settings `given` over its own.

    Args:
        given: {(section, key): value}.
        giver: Names where these come from, for messages.

    Raises:
        ConfigError: As `load`.
    """
    values = {} if path is None else _read(Path(path))
    path = Path(giver if path is None else path)
    tables: dict[str, Any] = {}
    for (section, key), value in given.items():
        tables.setdefault(section, {})[key] = value
    _anchor(values, path.parent)
    _anchor(tables, Path())
    for section, table in tables.items():
        if not isinstance(values.setdefault(section, {}), dict):
            raise ConfigError(f"{path}: {section} must be a table, written [{section}]")
        if section == "learner" and "algorithm" in table:
            _forget_preset(values[section])
        values[section].update(table)
        if given_one := [key for key in _WHEN_IT_ENDS if section == "learner" and key in table]:
            for key in set(_WHEN_IT_ENDS) - {*given_one}:
                values[section].pop(key, None)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(config_text.explain(path, error, given, giver)) from None
    if faults := missing_files(config, needs):
        raise ConfigError("\n".join(faults))
    return config


def _forget_preset(learner: dict[str, Any]) -> None:
    """Remove settings that equal those of the file's own preset or the default, as in a file printed in full.

    Another preset on the command line would otherwise change nothing.
    """
    own = PRESETS.get(str(learner.get("algorithm", "grpo")), {})
    for name, field in AlgorithmSection.model_fields.items():
        if name in learner and learner[name] == own.get(name, field.default):
            del learner[name]


def _gguf(model: Path) -> Path | None:
    """Return the GGUF file that a model path is, or that stands there without a config.json; None if there is none."""
    if not model.is_absolute() or (model / "config.json").is_file():
        return None
    files = [model] if model.is_file() else sorted(model.glob("*.gguf"))
    return next((file for file in files if file.suffix == ".gguf"), None)


def missing_files(config: RunConfig, needs: Collection[Need]) -> list[str]:
    """Return one line for each needed file that is missing. Hub names are not looked up."""
    faults = []
    model, task = Path(config.model.path), config.task.file
    if {"model", "tokenizer"} & {*needs} and (gguf := _gguf(model)) is not None:
        faults.append(
            f"model.path = {model}: {gguf.name} is a GGUF file, which cannot be trained; give a folder that "
            f"save_pretrained wrote (examples/pretrained/build_model.py makes one from a GGUF file)"
        )
    elif {"model", "tokenizer"} & {*needs} and model.is_absolute() and not model.is_dir():
        faults.append(f"model.path = {model}: there is no such folder; give an existing model folder or a hub name")
    elif "model" in needs and model.is_absolute() and not (model / "config.json").is_file():
        faults.append(f"model.path = {model}: the folder holds no config.json; save a model there with save_pretrained")
    tokenizer = Path(config.model.tokenizer or "")
    if {"model", "tokenizer"} & {*needs} and tokenizer.is_absolute() and not tokenizer.is_dir():
        faults.append(
            f"model.tokenizer = {tokenizer}: there is no such folder; give the folder of a tokenizer or a hub name"
        )
    if "task" in needs and not task.is_file():
        faults.append(f"task.path = {config.task.path}: there is no file {task}; write it as path/to/file.py:name")
    for setting, file in config.chat.files.items() if "chat" in needs else ():
        if not file.is_file():
            faults.append(
                f"{setting} = {file}: there is no such file; give the path of one, from the run file's folder"
            )
    script = config.learner.script
    if "callbacks" in needs and script is not None and not Path(script).is_file():
        faults.append(f"learner.script = {script}: there is no such file; give its path from the run file's folder")
    for callback in config.learner.callbacks if "callbacks" in needs else ():
        file = Path(callback.rpartition(":")[0])
        if not file.is_file():
            faults.append(
                f"learner.callbacks = {callback}: there is no file {file}; write it as path/to/file.py:name, from the "
                f"run file's folder"
            )
    return faults


def parse_overrides(arguments: list[str]) -> dict[tuple[str, str], Any]:
    """Parse `--section.key value` and `--section.key=value`; values as in TOML, else text. Raises `ConfigError`."""
    found: dict[tuple[str, str], Any] = {}
    rest = iter(arguments)
    for argument in rest:
        match = OPTION.fullmatch(argument)
        if not match:
            meant = config_text.named(argument.lstrip("-"))
            hint = f"; did you mean --{' or --'.join(meant)}?" if meant else ""
            raise ConfigError(f"{argument}: not understood; settings are given as --section.key value{hint}")
        section, key, text = match.groups()
        if text is None:
            text = next(rest, None)
            if text is None or OPTION.fullmatch(text):
                raise ConfigError(f"{argument}: a value is missing; write {argument} value")
        found[section, key] = _override(section, key, text)
    return found


def _read(path: Path) -> dict[str, Any]:
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except FileNotFoundError:
        hint = "; the URL of a queue is given with --queue" if str(path).startswith(("http:/", "https:/")) else ""
        raise ConfigError(f"{path}: there is no such run file; give the path of a TOML file{hint}") from None
    except IsADirectoryError:
        hint = f", such as {path / 'run.toml'}" if (path / "run.toml").is_file() else ""
        raise ConfigError(f"{path}: is a folder; give the path of a TOML file{hint}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}{_unquoted(text, str(error))}") from None


def _unquoted(text: str, error: str) -> str:
    """Return the remedy of the commonest mistake, to stand behind tomllib's error; "" if it is another one.

    The key is named without its value, which may be a secret.
    """
    place = re.match(r"Invalid value \(at line (\d+),", error)
    key, equals, _ = text.split("\n")[int(place[1]) - 1].partition("=") if place is not None else ("", "", "")
    return f", that of {key.strip()}: a text stands in quotes" if equals else ""


def _override(section: str, key: str, text: str) -> Any:
    """Parse `text` as a TOML value; return the text itself if it is none, or the setting is a text."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = document.pop("value")
    field = config_text.find_field(section, key)
    wants_text = field is not None and field.annotation in (str, str | None, Path)
    return text if document or (wants_text and not isinstance(value, str)) else value


def _anchor(values: dict[str, Any], folder: Path) -> None:
    """Make the paths of task, local models, tokenizer, demonstrations, chat format and callbacks absolute, relative to
    `folder`.

    Hub names stay as they are.
    """
    _anchor_chat(values.get("chat"), folder)
    learner = values.get("learner")
    if isinstance(learner, dict) and isinstance(named := learner.get("callbacks"), list):
        learner["callbacks"] = [str(_absolute(name, folder)) if file_of(name) else name for name in named]
    if isinstance(learner, dict) and isinstance(script := learner.get("script"), str):
        learner["script"] = str((folder / Path(script).expanduser()).absolute())
    models = (("model", "path"), ("model", "tokenizer"), ("teacher", "path"))
    for section, key in (("task", "path"), *models, ("demonstrations", "path")):
        table = values.get(section)
        if not isinstance(table, dict) or not isinstance(table.get(key), str):
            continue
        anchored = folder / Path(table[key]).expanduser()
        # "models/tiny" could be a hub name, but not where a folder "models" lies next to the run file.
        in_known_folder = anchored.parent != folder and anchored.parent.is_dir()
        if section == "task" or not _HUB_NAME.fullmatch(table[key]) or anchored.exists() or in_known_folder:
            table[key] = str(anchored.absolute())


def _anchor_chat(chat: Any, folder: Path) -> None:
    if not isinstance(chat, dict):
        return
    if isinstance(template := chat.get("template"), str) and template:
        chat["template"] = str(_absolute(template, folder))
    options = chat.get("renderer_options")
    for table, key in ((chat, "parser"), (options, "import_path")):
        if isinstance(table, dict) and file_of(table.get(key)) is not None:
            table[key] = str(_absolute(table[key], folder))


def _absolute(path: str, folder: Path) -> Path:
    return (folder / Path(path).expanduser()).absolute()
