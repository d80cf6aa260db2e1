"""Finds where a run starts (at the initial model or a checkpoint), and declares the session to the queue."""

from __future__ import annotations

import ast
import hashlib
import os
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from slipstream.learner.checkpoints import resuming
from slipstream.learner.checkpoints.checkpoint import Checkpoint, CheckpointInfo
from slipstream.learner.report.journal import newest_version
from slipstream.learner.training import optimiser
from slipstream.protocol import checkpoints as places
from slipstream.protocol.config import ConfigError, LearnerSection, ModelSection, RunConfig, fingerprint
from slipstream.protocol.config.machine import fast_types
from slipstream.protocol.config.sections.base import toml_value
from slipstream.protocol.messages import BeginSession, LearnerProcess, RunPosition

# Set by a program that starts a learner: the command that the person typed.
COMMAND_VARIABLE = "SLIPSTREAM_COMMAND"
# Set by a script: the argument of its train() that resumes the run.
RESUME_VARIABLE = "SLIPSTREAM_RESUME"
# A learner asks the queue for groups at least every 30 s.
SILENT_S = 45.0


def with_served_dtype(config: RunConfig, on_gpu: bool) -> RunConfig:
    """Set `model.dtype` as the checkpoint's unless the run file sets it or this machine would compute in it slowly, as
    servers do that are started by themselves. A learner that `slipstream` starts has it already."""
    model = config.model
    fast = fast_types(on_gpu)
    if "dtype" in model.model_fields_set or not fast:
        return config
    try:
        architecture = AutoConfig.from_pretrained(
            model.path, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, ImportError):  # loading the model fails too, and says why
        return config
    parts = (architecture, architecture.get_text_config())
    named = [str(getattr(part, "dtype", None)).removeprefix("torch.") for part in parts]
    dtype = next((name for name in named if name in fast), model.dtype)
    return config.model_copy(update={"model": model.model_copy(update={"dtype": dtype})})


def starting_point(
    config: RunConfig,
    resume: bool,
    position: RunPosition | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Checkpoint | None:
    """Return the checkpoint to start from, see `resuming.choose`; None for the initial model.

    Raises:
        ConfigError: The run is not resumed but has a checkpoint, or none of its checkpoints can be used.
    """
    if resume:
        return resuming.choose(config.run_dir, position, say)
    if found := places.complete(config.run_dir):
        raise ConfigError(
            f"run.name = {config.run.name}: {found[max(found)]} holds a checkpoint already; continue from it with "
            f"--resume, or choose another run.name"
        )
    return None


def is_over(config: RunConfig, checkpoint: Checkpoint, position: RunPosition) -> bool:
    """Say whether the run has made its last step and told the queue so."""
    return checkpoint.info.step >= config.learner.steps and position.finished


def algorithm(learner: LearnerSection) -> str:
    """Describe the run's algorithm: the preset, and the run file's own values."""
    beside = [f"{name} = {toml_value(value)}" for name, value in learner.beside_preset().items()]
    return f"algorithm {learner.algorithm}{', but with ' if beside else ''}{', '.join(beside)}"


def introduction(config: RunConfig, checkpoint: Checkpoint | None, position: RunPosition) -> list[str]:
    """Say from where a run resumes, and which settings differ from those that the checkpoint was made with.

    Settings are those of this start, whatever the checkpoint holds.
    """
    if checkpoint is None:
        made = f"{position.step} steps were made and are given up" if position.step else "no step was made"
        return [f"{places.folder(config.run_dir)} holds no checkpoint, and {made}: starting at step 0"]
    info = checkpoint.info
    lines = [f"resuming from step {info.step} of {config.learner.steps}: {checkpoint.path}"]
    if info.step >= config.learner.steps:
        lines.append("no step is left to make, only the end of the run; raise learner.steps to train on")
    # An adapter continues as it was made, or not at all.
    if different := [line for line in changed(config, info) if not line.startswith("lora.")]:
        lines.append(f"changed since that checkpoint, and used from here on: {', '.join(different)}")
    then = _then(config, info)
    before, now = then.get("learner.optim", optimiser.DEFAULT), config.learner.optim
    had, has = ast.literal_eval(then.get("learner.optim_args", "{}")), config.learner.optim_args
    if optimiser.starts_anew(before, now, had, has):
        with_them = f" with learner.optim_args = {has}" if before == now else ""
        lines.append(f"learner.optim = {now}{with_them} can make nothing of what {before} kept: it starts again")
    return lines


def changed(config: RunConfig, info: CheckpointInfo) -> list[str]:
    """List the settings that a checkpoint was not made with, each with both values."""
    now, then = settings(config), _then(config, info)
    return [f"{name} = {now[name]} (was {then[name]})" for name in now if name in then and now[name] != then[name]]


def _then(config: RunConfig, info: CheckpointInfo) -> dict[str, str]:
    """Return the settings that the checkpoint was made with. One that names no learner.weights_dtype stepped on
    weights in model.dtype, which were rounded at each step."""
    then = dict(info.settings or {})
    if then and then.get("model.dtype") != "float32" and config.model.dtype != "float32":
        then.setdefault("learner.weights_dtype", "model")
    return then


def settings(config: RunConfig) -> dict[str, str]:
    """Return every setting by its name, as text, without the token. `demonstrations.data` is a digest of the file."""
    sections = config.model_dump(mode="json")
    found = {
        f"{section}.{name}": str(value)
        for section, values in sections.items()
        for name, value in values.items()
        if name != "token"
    }
    data = config.demonstrations.path and _digest_of(Path(config.demonstrations.path))
    return found | ({"demonstrations.data": data} if data else {})


@lru_cache(maxsize=4)
def _digest_of(path: Path) -> str | None:
    """Return a digest of a file, as this process has found it first; None for a folder, or a name on the hub."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:
        return None


def session(
    config: RunConfig, done: CheckpointInfo | None, resume: bool, vocabulary: int, after: int | None = None
) -> BeginSession:
    """Make the learner's declaration to the queue: where it starts, and the fingerprint of the rollouts it accepts.

    Args:
        done: The checkpoint that it continues from; None for the initial model.
        vocabulary: Token ids that the model knows.
        after: The newest session when it looked whether it is alone; None: it begins whoever else has.

    Raises:
        ConfigError: No tokenizer can be loaded.
    """
    others = changed(config, done) if done else []
    done = done or CheckpointInfo(step=0, version=0)
    # The queue may have lost its store, and the steps since the checkpoint made versions that servers know.
    version = max(done.version, newest_version(config.run_dir / "metrics.jsonl")) if resume else 0
    expected = fingerprint.of(config, tokenizer(config.model))
    process = this_process()
    return BeginSession(done.step, version, config.learner.steps, resume, expected, vocabulary, others, process, after)


def this_process() -> LearnerProcess:
    """Describe this process to the queue."""
    return LearnerProcess(socket.gethostname(), os.getpid(), psutil.Process().create_time())


def check_alone(position: RunPosition, take_over: bool) -> None:
    """Check that no other learner of this run lives, which a new session would end.

    On this machine the process is looked up; on another one it lives if the queue has heard from it of late.

    Raises:
        ConfigError: One does, with its host and process id.
    """
    other, here = position.learner, this_process()
    if other is None or take_over or position.finished:
        return
    if other.host != here.host:
        alive = other.seen_s_ago is not None and other.seen_s_ago < SILENT_S
    elif other.pid == here.pid:
        return  # this process, or one before a restart of its container
    else:
        try:
            alive = abs(psutil.Process(other.pid).create_time() - other.started) < 1.0
        except psutil.Error:
            alive = False
    if alive:
        heard = "" if other.seen_s_ago is None else f", heard from {other.seen_s_ago:.0f} s ago"
        raise ConfigError(
            f"--resume: the learner of this run lives: process {other.pid} on {other.host}{heard}. A second one would "
            f"end it and its run; stop it first, or take the run from it with --resume --take-over"
        )


def tokenizer(model: ModelSection) -> Any:
    """Load the tokenizer as the workers do, so that the same files have the same fingerprint."""
    path, revision = model.tokenizer_path, model.tokenizer_revision
    try:
        try:
            return PreTrainedTokenizerFast.from_pretrained(path, revision=revision or "main")
        except Exception:
            if not model.trust_remote_code:
                raise
            return AutoTokenizer.from_pretrained(path, revision=revision or "main", trust_remote_code=True)
    except Exception as error:  # the type depends on what is missing or broken
        first = str(error).strip().partition("\n")[0]
        setting = "model.path" if model.tokenizer is None else "model.tokenizer"
        raise ConfigError(
            f"{setting} = {path}: no tokenizer can be loaded from it ({type(error).__name__}: {first}); save the "
            f"tokenizer there with tokenizer.save_pretrained"
        ) from error


def token_texts(tokenizer: Any) -> Callable[[Sequence[int]], list[str]]:
    """Return a function from token ids to the text of each."""

    @lru_cache(maxsize=65_536)
    def text(token_id: int) -> str:
        return str(tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return lambda token_ids: [text(token_id) for token_id in token_ids]


def command() -> str:
    """Return the command that started this run."""
    if given := os.environ.get(COMMAND_VARIABLE):
        return given
    program, *arguments = sys.argv
    name = "python -m slipstream.learner" if Path(program).parent.name == "learner" else "slipstream"
    return f"{name} {shlex.join(arguments)}"


def resume_command(learning_rate: float | None = None) -> str:
    """Return the command that resumes this run, as it was started; with another `learning_rate` if that is given."""
    if command().startswith("python ") and not command().startswith("python -m"):
        rate = "" if learning_rate is None else f" and a learning rate of {learning_rate:g}"
        return f"{command()}, with {os.environ.get(RESUME_VARIABLE, 'resume=True')}{rate} given to train()"
    words = shlex.split(command())
    if learning_rate is not None:
        setting = "--learner.learning_rate"
        words = [
            word
            for before, word in zip(["", *words], words, strict=False)
            if before != setting and word != setting and not word.startswith(f"{setting}=")
        ]
    resume = [] if "--resume" in words else ["--resume"]
    return shlex.join([*words, *resume, *([] if learning_rate is None else [setting, f"{learning_rate:g}"])])
