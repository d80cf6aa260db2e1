"""Prepares the run directory for a start: checks and locks it, moves failed starts aside, writes the run file.

One launcher holds the directory at a time. `learner.epochs` becomes `learner.steps` here, once the data set is known.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Collection, Iterator
from fractions import Fraction
from pathlib import Path

from slipstream.protocol import checkpoints
from slipstream.protocol.config import ConfigError, RunConfig, to_toml
from slipstream.rollout_queue.store import base, check_beside_run, open_for_reading

# Prefix of the folders for files of a start that made no step.
FAILED = "failed-start-"

# Another launcher holds the first, a queue the second.
LAUNCHER_LOCK, QUEUE_LOCK = "launcher.lock", "queue.lock"

_KEPT = (FAILED, LAUNCHER_LOCK, QUEUE_LOCK)


def check_run_directory(config: RunConfig, resume: bool) -> None:
    """Check that the run can start in its directory.

    Raises:
        ConfigError: The directory cannot be written, holds a run that would be overwritten or whose store is lost, or
            holds none to `resume`.
    """
    _check_writable(config)
    name, folder = config.run.name, config.run_dir
    stored = open_for_reading(config).run_state()
    if resume or not has_checkpoint(config):
        check_beside_run(config, stored)
    steps = stored.version
    if resume and not has_checkpoint(config) and not steps:
        raise ConfigError(
            f"--resume: {folder} holds nothing to continue from, neither a checkpoint nor a step; start it without "
            f"--resume"
        )
    if not resume and has_checkpoint(config):
        raise ConfigError(
            f"run.name = {name}: {folder} already holds a run; continue with it by --resume, or choose another name: "
            f"--run.name {name}-2"
        )
    if not resume and steps:
        own = config.learner.script is not None
        how = (
            "; continue from your script's own checkpoint by --resume"
            if own
            else ", without a checkpoint; begin again at its first step by --resume"
        )
        raise ConfigError(
            f"run.name = {name}: {folder} already holds a run of {steps} steps{how}, or "
            f"choose another name: --run.name {name}-2"
        )


def to_go_on(config: RunConfig, resume: str) -> str:
    """Say what to do after the learner has failed. `resume`: what continues the run."""
    if has_checkpoint(config):
        return f"continue from its newest checkpoint with {resume}"
    if _steps(config) and config.learner.script is not None:
        return f"mend it and start again with {resume}: it continues from the step that it gives to join(step=)"
    if _steps(config):
        return f"it made no checkpoint: begin again at its first step with {resume}"
    return "fix it and start again: it made no step, so the run's name is free"


def has_checkpoint(config: RunConfig) -> bool:
    """Tell whether the directory holds a complete checkpoint."""
    return bool(checkpoints.complete(config.run_dir))


def finished(config: RunConfig) -> int | None:
    """Return the steps of a run that has ended after all of `learner.steps`.

    Returns:
        None if the run has more to do, or if its queue must run before that is known.

    Raises:
        ConfigError: The run's store cannot be read.
    """
    kept = checkpoints.complete(config.run_dir)
    if not kept or max(kept) < config.learner.steps or not open_for_reading(config).run_state().finished:
        return None
    return max(kept)


def clear(config: RunConfig) -> Path | None:
    """Move the files of a start that made no step into their own folder, and what its queue has stored with them.

    Call it for a run that is not resumed, after `check_run_directory` and with the directory held.

    Returns:
        The new folder; None if there was nothing to move.

    Raises:
        ConfigError: A queue still runs on the directory.
    """
    folder = config.run_dir
    stored = open_for_reading(config)
    if not stored.exists():
        return None
    taken = [path.name.removeprefix(FAILED) for path in folder.glob(f"{FAILED}*")]
    aside = folder / f"{FAILED}{1 + max((int(number) for number in taken if number.isdigit()), default=0)}"
    try:
        aside.mkdir()
        try:
            stored.set_aside(aside)
        except ConfigError:
            aside.rmdir()
            raise
        for path in list(folder.iterdir()):
            if not path.name.startswith(_KEPT):
                path.rename(aside / path.name)
    except OSError as error:
        raise _unwritable(config, aside, error) from None
    return aside


def check_unused(config: RunConfig) -> None:
    """Raise `ConfigError` if another launcher holds the run directory. Creates nothing."""
    if (config.run_dir / LAUNCHER_LOCK).exists():
        with held_alone(config):
            pass


@contextlib.contextmanager
def held_alone(config: RunConfig) -> Iterator[None]:
    """Hold the run directory against other launchers. Raises `ConfigError` if one holds it.

    A second launcher would overwrite the run file that the first restarts its processes with.
    """
    with _held(
        config,
        config.run_dir / LAUNCHER_LOCK,
        f"run.name = {config.run.name}: {config.run_dir} is in use by another launcher; stop that one, or choose "
        f"another name: --run.name {config.run.name}-2",
    ):
        yield


def resolved(config: RunConfig, to_be_set: Collection[tuple[str, str]] = ()) -> str:
    """Return the resolved run file, valid from any folder. It holds neither the token nor the password of a database:
    the environment carries them.

    Args:
        config: The run file.
        to_be_set: (section, key) of settings that stay open.
    """
    run = config.run.model_copy(update={"dir": config.run.dir.absolute()})
    queue = config.queue.model_copy(update={"token": None})
    return to_toml(config.model_copy(update={"run": run, "queue": queue}), to_be_set=to_be_set)


@contextlib.contextmanager
def kept_if_no_step_is_made(config: RunConfig) -> Iterator[None]:
    """Restore the present run file at the end if no step was made meanwhile.

    The file says with which settings the run's steps were made, and a start that failed has made none.
    """
    path = config.run_file
    before = path.read_bytes() if path.exists() else None
    made = _newest_version(config)
    try:
        yield
    finally:
        if before is not None and _newest_version(config) == made:
            path.write_bytes(before)


def write_resolved(config: RunConfig) -> Path:
    """Write the resolved run file into the run directory, where all processes of the run read it."""
    path = config.run_file
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(resolved(config), encoding="utf-8")
    except OSError as error:
        raise _unwritable(config, path, error) from None
    return path


def _newest_version(config: RunConfig) -> int:
    """Return the newest version in the learner's metrics: the queue may keep nothing."""
    from slipstream.learner.report.journal import newest_version

    path = config.run_dir / "metrics.jsonl"
    try:
        return newest_version(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; move it away, or choose another run.name"
        ) from None


def _steps(config: RunConfig) -> int:
    """Return the optimiser steps made over all starts: the version, since a resume may begin the steps again."""
    return open_for_reading(config).run_state().version


def _check_writable(config: RunConfig) -> None:
    """Try to write: permissions do not show that a file system is full or mounted read-only."""
    folder = config.run_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".slipstream-", dir=existing):
            pass
    except OSError as error:
        raise _unwritable(config, folder, error) from None


def _unwritable(config: RunConfig, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.dir = {config.run.dir}: {path} cannot be written: {error.strerror}; choose another run.dir"
    )


@contextlib.contextmanager
def _held(config: RunConfig, path: Path, in_use: str) -> Iterator[None]:
    """Hold the lock file `path`. Raises `ConfigError` with the text `in_use` if another process holds it."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(base.hold_lock_file(path))
        except BlockingIOError:
            raise ConfigError(in_use) from None
        except OSError as error:
            raise _unwritable(config, path, error) from None
        yield


def steps_for_epochs(epochs: float, rows: int, groups_per_step: int) -> int:
    """Return the optimiser steps for `epochs` passes over `rows`, rounded up. One row is one group."""
    return math.ceil(Fraction(repr(epochs)) * rows / groups_per_step)


def with_steps_for_epochs(config: RunConfig, rows: int | None) -> RunConfig:
    """Replace `learner.epochs` by the steps they take; returns `config` as it is if it has none.

    Args:
        config: The run file.
        rows: Rows of the data set; None if their number is not known.

    Raises:
        ConfigError: There are epochs, and `rows` is None.
    """
    learner = config.learner
    if learner.epochs is None:
        return config
    if rows is None:
        raise ConfigError(
            f"learner.epochs = {learner.epochs:g}: the data set is an iterable, whose number of rows is not known; "
            f"give learner.steps instead"
        )
    steps = steps_for_epochs(learner.epochs, rows, learner.groups_per_step)
    return config.model_copy(update={"learner": learner.model_copy(update={"steps": steps, "epochs": None})})


def describe_steps(config: RunConfig, rows: int) -> str:
    """Explain how many steps the epochs of `config` are."""
    learner = with_steps_for_epochs(config, rows).learner
    return (
        f"learner.epochs = {config.learner.epochs:g}: {rows} rows in steps of {learner.groups_per_step} groups are "
        f"{learner.steps} steps"
    )
