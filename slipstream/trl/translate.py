"""Translates a TRL config into sections of a run file, and checks these. Pure: no files, no network, no processes.

Each `_function` translates one subject: it reads fields of the config, fills sections, and adds notes for the reader.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from slipstream.protocol.config import ConfigError, resolve
from slipstream.protocol.config.sections import (
    LearnerSection,
    ModelSection,
    RolloutSection,
    VllmSection,
    WorkerSection,
)
from slipstream.script import overrides
from slipstream.trl.configs import _Config
from slipstream.trl.fields import FIELDS, Field
from slipstream.trl.learner_settings import learner_settings, number, optimiser_settings, truth, whole

# Keeps the launcher's number of processes once its own variables are hidden from the run.
PROCESSES = "SLIPSTREAM_LAUNCHED_PROCESSES"

Sections = dict[str, dict[str, Any]]

# Entries of model_init_kwargs that only matter to transformers' own loading.
_NO_MEANING = ("device_map", "low_cpu_mem_usage", "use_cache", "use_safetensors")

_DEFAULT_PORT = 8000

# TRL's default of logging_steps, which is also the distance of evaluations if eval_steps is left out.
_LOGGING_STEPS = 10

# Fields whose default is not TRL's: what it is there, and here.
_OTHER_DEFAULTS = {
    "bf16": f"True there; here model.dtype = {ModelSection.model_fields['dtype'].default}",
    "gradient_checkpointing": "True there, False here",
    "save_total_limit": f"all checkpoints there, {LearnerSection.model_fields['keep_checkpoints'].default} here",
}

# Tokens that are left at most where the script bounds them by their probability alone.
_TOP_K = 64

# Rows that fail, before any has succeeded, with which a run ends. TRL ends at a reward's first error, and its steps are
# often of a single row, so that a run file's number would take minutes.
_GIVE_UP_AFTER = 4

# Remedies for values that belong to another field.
_ELSEWHERE = {("loss_type", "gspo"): "write importance_sampling_level='sequence', with loss_type='grpo'"}


@dataclass(slots=True)
class Translation:
    """A translated config.

    Attributes:
        sections: Sections of a run file, without the task's path.
        notes: Sentences for the script's reader.
        reward_weights: Weights of the task's rewards; None for equal ones.
    """

    sections: Sections
    notes: list[str] = field(default_factory=list)
    reward_weights: list[float] | None = None


def translate(config: _Config, model: str, context: int | None, rows: int | None = None) -> Translation:
    """Translate a trainer's config and model.

    Args:
        config: The script's config.
        model: Folder or hub name of the model.
        context: The model's context in tokens; None if unknown.
        rows: Rows of the data set; None if unknown.

    Raises:
        ConfigError: A field is not supported; the text names the field and the remedy.
    """
    sections: Sections = defaultdict(dict)
    sections["model"]["path"] = model
    notes: list[str] = []
    ignored = []
    for name in config.names():
        value = plain(config.field(name))
        given = name in config.given
        known = FIELDS[name]
        unsaid = value is None and config.default(name) is None
        if known.how == "only" and not unsaid and value not in known.fine:
            raise ConfigError(_refusal(config, known, value, given))
        if known.how == "noted" and given and value not in known.fine:
            notes.append(f"{name}={value!r} has no effect here: {known.note}")
        if known.how == "idle" and given and value is not None:
            ignored.append(name)
        if known.how == "set" and value is not None:
            section, key = known.setting
            sections[section][key] = value
    if ignored:
        notes.append(f"taken, and without a meaning here: {', '.join(ignored)} (docs/from_trl.md says why)")
    for work in (
        _model,
        _sharding,
        _place,
        _steps,
        _training,
        _objective,
        _episodes,
        _tokens,
        _servers,
        _logging,
        _hub,
    ):
        work(config, sections, notes, context)
    weights = config.field("reward_weights")
    if weights is not None and (isinstance(weights, str) or not isinstance(weights, Sequence)):
        raise ConfigError(
            f"{type(config).__name__}(reward_weights={weights!r}): give a number for each reward function, such as "
            f"[1.0, 0.5]"
        )
    epoch = None if rows is None else max(1, math.ceil(rows / sections["learner"]["groups_per_step"]))
    _checkpoints(config, sections, epoch)
    _evaluation(config, sections, epoch)
    _differences(config, sections, notes)
    for section, settings in config.slipstream.items():
        sections[section].update(settings)
    return Translation(dict(sections), notes, None if weights is None else list(weights))


def _model(config: _Config, sections: Sections, notes: list[str], context: int | None) -> None:
    given = config.field("model_init_kwargs") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"model_init_kwargs={given!r}: give a dict, such as {{'dtype': 'bfloat16'}}")
    left = {name: value for name, value in given.items() if name not in _NO_MEANING}
    dtype = left.pop("dtype", left.pop("torch_dtype", None)) or config.field("dtype")
    bf16, fp16 = truth(config, "bf16"), truth(config, "fp16")
    if bf16 and fp16:
        raise ConfigError(f"{type(config).__name__}(bf16=True, fp16=True): the weights have one type; leave one out")
    if dtype in (None, "auto") and (bf16 or fp16):
        dtype = "bfloat16" if bf16 else "float16"
    settings = {
        "dtype": None if dtype in (None, "auto") else str(dtype).removeprefix("torch."),
        "revision": left.pop("revision", None),
        "trust_remote_code": left.pop("trust_remote_code", None),
        "attention": left.pop("attn_implementation", None),
    }
    if settings["attention"] in ("eager", "sdpa"):  # the learner's default gives the same results, and packs
        del settings["attention"]
    sections["model"].update({key: value for key, value in settings.items() if value is not None})
    if left:
        raise ConfigError(
            f"model_init_kwargs={left!r} is not supported; leave it out, and save the model as it is to be loaded"
        )


def _sharding(config: _Config, sections: Sections, notes: list[str], context: int | None) -> None:
    asked = config.field("fsdp") or False
    words = (
        [] if isinstance(asked, bool) else asked.split() if isinstance(asked, str) else [str(word) for word in asked]
    )
    if set(words) - {"full_shard", "auto_wrap"}:
        raise ConfigError(f"fsdp={asked!r} is not supported: weights are shared out over all ranks; write fsdp=True")
    if asked:
        sections["learner"]["shard_weights"] = True


def _place(config: _Config, sections: Sections, notes: list[str], context: int | None) -> None:
    path = Path(config.field("output_dir") or "trainer_output").expanduser()
    if path.name in ("", ".."):
        raise ConfigError(f"output_dir={str(path)!r}: give a folder for the run, such as 'runs/mine'")
    sections["run"] |= {"dir": str(path.parent), "name": path.name.lstrip(".") or "run"}


def launched_processes() -> int:
    """Return the number of processes that accelerate launch or torchrun has started the script in; 1 without.

    A step has the completions of all, as in TRL.
    """
    return int(os.environ.get(PROCESSES) or os.environ.get("WORLD_SIZE") or 1)


def _steps(config: _Config, sections: Sections, notes: list[str], context: int | None) -> None:
    size = whole(config, "num_generations")
    if size < 2:
        raise ConfigError(
            f"{type(config).__name__}(num_generations={size}): must be at least 2, as a completion is judged by the "
            f"others of its prompt; write num_generations={_default(RolloutSection, 'group_size')}"
        )
    processes = launched_processes()
    completions = whole(config, "per_device_train_batch_size") * whole(config, "gradient_accumulation_steps")
    completions *= processes
    if completions < 1 or completions % size:
        of_launcher = f" x {processes} processes" if processes > 1 else ""
        raise ConfigError(
            f"per_device_train_batch_size x gradient_accumulation_steps{of_launcher} = {completions} completions a "
            f"step are not a multiple of num_generations = {size}, and a step is made of whole groups here; make it "
            f"one, such as per_device_train_batch_size={size}"
        )
    sections["learner"]["groups_per_step"] = completions // size
    if size > _default(WorkerSection, "episodes"):
        sections["worker"]["episodes"] = size
    # As in TRL, a group without variance takes part in the step. Otherwise a run whose reward is constant would make no
    # step at all.
    sections["learner"]["zero_variance"] = "keep"
    updates = _updates(config)
    if updates > 1:
        sections["learner"]["num_iterations"] = updates
        notes.append(
            f"num_iterations={updates}: a step here makes that many updates, where TRL counts as many steps; max_steps "
            f"and other numbers of steps are divided by it"
        )
    steps = whole(config, "max_steps")
    if steps > 0:
        sections["learner"]["steps"] = _in_steps(config, steps)
    else:
        sections["learner"]["epochs"] = float(number(config, "num_train_epochs"))
    inflight, queued = number(config, "max_inflight_tasks"), number(config, "queue_maxsize")
    if inflight is not None and inflight > 0:
        sections["worker"]["episodes"] = max(inflight, size)
    if queued:
        sections["queue"]["capacity_groups"] = max(math.ceil(queued / size), completions // size)


def _updates(config: _Config) -> int:
    given = number(config, "num_iterations") if "num_iterations" in config.names() else None
    if given is not None and (given < 1 or given != int(given)):
        raise ConfigError(f"{type(config).__name__}(num_iterations={given:g}): must be a whole number of at least 1")
    return int(given or 1)


def _in_steps(config: _Config, updates: float) -> int:
    """Return the steps in which TRL's steps, which are updates of the weights, are made here, rounded up."""
    return math.ceil(updates / _updates(config))


def _training(config: _Config, sections: Sections, notes: list[str], context: int | None) -> None:
    learner = sections["learner"]
    learner |= optimiser_settings(config, number(config, "max_steps"), notes)
    learner["warmup_steps"] = _in_steps(config, learner["warmup_steps"])


def _checkpoints(config: _Config, sections: Sections, epoch: int | None) -> None:
    strategy, every = plain(config.field("save_strategy")), number(config, "save_steps")
    if config.field("load_best_model_at_end"):
        if "no" in (strategy, plain(config.field("eval_strategy")) or "no"):
            raise ConfigError(
                f"{type(config).__name__}(load_best_model_at_end=True): the best checkpoint is told by the evaluation "
                f"of its own step; write eval_strategy='steps' and save_strategy='steps', with one of eval_steps and "
                f"save_steps a multiple of the other"
            )
        sections["learner"]["keep_best"] = True
    if strategy == "no":
        sections["learner"] |= {"checkpoint_every": 0, "checkpoint_minutes": 0}
    elif strategy in (None, "steps"):
        if every is not None:
            sections["learner"]["checkpoint_every"] = _in_steps(config, _count_of(config, "save_steps", every))
    elif strategy == "epoch":
        sections["learner"]["checkpoint_every"] = _each_epoch(config, "save_strategy", "save_steps", epoch)
    else:
        raise ConfigError(f"save_strategy={strategy!r} is not supported; write 'steps' with save_steps, or 'no'")


def _each_epoch(config: _Config, name: str, steps: str, epoch: int | None) -> int:
    """Return the steps of an epoch. Raises `ConfigError` where they are not known."""
    if epoch is None:
        raise ConfigError(
            f"{type(config).__name__}({name}='epoch') is not supported for this data set, whose rows are counted when "
            f"it is read; write {name}='steps' with {steps}"
        )
    return epoch


def _objective(config: _Config, sections: Sections, notes: list[str], context: int | None) -> None:
    sections["learner"] |= (learner := learner_settings(config, notes))
    if "reference_sync_steps" in learner:
        sections["learner"]["reference_sync_steps"] = _in_steps(config, learner["reference_sync_steps"])


def _episodes(config: _Config, sections: Sections, notes: list[str], context: int | None) -> None:
    if "shuffle_dataset" in config.names():
        sections["task"]["order"] = "shuffled" if truth(config, "shuffle_dataset") else "as_given"
    calls, top_k = number(config, "max_tool_calling_iterations"), number(config, "top_k")
    sections["rollout"]["max_turns"] = 0 if calls is None else calls + 1
    sections["rollout"]["give_up_after"] = _GIVE_UP_AFTER
    if top_k is not None:
        sections["rollout"]["top_k"] = max(top_k, 0)  # TRL and vLLM write -1 for all tokens, Slipstream 0
    given = {name: config.field(name) for name in ("top_p", "min_p")}
    cut = [f"{name}={value}" for name, value in given.items() if value not in (None, 1 if name == "top_p" else 0)]
    if regex := config.field("vllm_structured_outputs_regex"):
        cut.append("vllm_structured_outputs_regex")
        kwargs = sections["rollout"].get("generation_kwargs") or {}
        sections["rollout"]["generation_kwargs"] = {**kwargs, "structured_outputs": {"regex": regex}}
    if cut and (top_k is None or top_k <= 0):
        sections["rollout"]["top_k"] = _TOP_K
        notes.append(
            f"{', '.join(cut)}: top_k={_TOP_K} is set next to it, so that the learner can follow what is sampled; it "
            f"leaves fewer tokens only where there would be more than {_TOP_K}"
        )


def _tokens(config: _Config, sections: Sections, notes: list[str], context: int | None) -> None:
    """Set the context to a prompt next to the longest completion, as far as the model's context allows."""
    completion, length = number(config, "max_completion_length"), number(config, "vllm_max_model_length")
    if length is None:
        length = max(_default(VllmSection, "max_model_len"), 2 * (completion or 0))
        length = length if context is None else min(length, context)
    budget = number(config, "token_budget")
    sections["vllm"]["max_model_len"] = length
    sections["rollout"]["max_episode_tokens"] = length if completion is None else completion
    sections["rollout"]["max_turn_tokens"] = min(length - 1, completion or length)
    sections["learner"]["token_budget"] = (
        budget if budget is not None and budget > 0 else max(_default(LearnerSection, "token_budget"), length)
    )


def _servers(config: _Config, sections: Sections, notes: list[str], context: int | None) -> None:
    vllm = sections["vllm"]
    url, host, port = (config.field(f"vllm_server_{part}") for part in ("base_url", "host", "port"))
    if url is None and (host is not None or port is not None):
        host = "127.0.0.1" if host in (None, "0.0.0.0") else host
        url = f"http://{host}:{_DEFAULT_PORT if port is None else port}"
    if url is not None:
        vllm["servers"] = [url]
        notes.append(f"{url} must be a server that was started with: slipstream vllm")
    arguments = {
        "--model-impl": config.field("vllm_model_impl"),
        "--gpu-memory-utilization": config.field("vllm_gpu_memory_utilization"),
        "--tensor-parallel-size": config.field("vllm_tensor_parallel_size"),
    }
    if given := [[name, str(value)] for name, value in arguments.items() if value is not None]:
        vllm["args"] = [part for pair in given for part in pair]


def _logging(config: _Config, sections: Sections, notes: list[str], context: int | None) -> None:
    if config.field("log_completions"):
        every = number(config, "logging_steps") or 1
        sections["learner"]["show_rollout_every"] = max(1, int(every))
        sections["tracking"]["rollouts_every"] = max(1, int(every))
    trackers = config.field("report_to")
    if trackers is not None:
        trackers = [trackers] if isinstance(trackers, str) else trackers
        if not isinstance(trackers, list | tuple):
            raise ConfigError(
                f"{type(config).__name__}(report_to={trackers!r}): give a tracker's name or several, such as 'wandb', "
                f"or 'none'"
            )
        if len(trackers) > 1 and "none" in trackers:
            raise ConfigError(
                f"{type(config).__name__}(report_to={[*trackers]!r}) says both none and some; leave 'none' out, or "
                f"write report_to='none'"
            )
        sections["tracking"]["report_to"] = list(trackers)
    given = {name: config.field(f"trackio_{name}") for name in ("space_id", "bucket_id")}
    if own := {name: value for name, value in given.items() if value is not None}:
        sections["tracking"]["options"] = {"trackio": own}


def _hub(config: _Config, sections: Sections, notes: list[str], context: int | None) -> None:
    strategy = plain(config.field("hub_strategy"))
    if strategy not in (None, "end", "every_save"):
        raise ConfigError(
            f"{type(config).__name__}(hub_strategy={strategy!r}) is not supported: models go to the hub, without what "
            f"a resume needs; write hub_strategy='every_save' or 'end'"
        )
    if strategy is not None:
        sections["hub"]["hub_strategy"] = strategy


def _evaluation(config: _Config, sections: Sections, epoch: int | None) -> None:
    strategy, at_start = config.field("eval_strategy") or "no", bool(config.field("eval_on_start"))
    strategy = plain(strategy)
    if strategy not in ("no", "steps", "epoch"):
        raise ConfigError(
            f"{type(config).__name__}(eval_strategy={strategy!r}) is not known; write eval_strategy='steps' with "
            f"eval_steps, 'epoch', or 'no'"
        )
    every = 0
    if strategy == "steps":
        every = _in_steps(config, _eval_steps(config))
    if strategy == "epoch":
        every = _each_epoch(config, "eval_strategy", "eval_steps", epoch)
    if every or at_start:
        sections["eval"] |= {"every": every, "at_start": at_start, "group_size": _eval_generations(config)}


def _eval_generations(config: _Config) -> int:
    given: float | None = number(config, "num_generations_eval")
    if given is None:
        return int(number(config, "num_generations"))
    if given < 1 or given != int(given):
        raise ConfigError(
            f"{type(config).__name__}(num_generations_eval={given:g}): must be a whole number of at least 1; leave it "
            f"out for as many as num_generations"
        )
    return int(given)


def _eval_steps(config: _Config) -> int:
    """Return the optimiser steps between evaluations; as in transformers, those between logs if none are given."""
    name = "logging_steps" if number(config, "eval_steps") is None else "eval_steps"
    found: float | None = number(config, name)
    given = _LOGGING_STEPS if found is None else found
    return _count_of(config, name, given)


def _count_of(config: _Config, name: str, given: float) -> int:
    """Return a number of steps that may be given as a share of `max_steps`."""
    steps: float | None = number(config, "max_steps")
    if not (0 < given < 1 or (given >= 1 and given == int(given))):
        strategy, usual = ("save_strategy", 50) if name == "save_steps" else ("eval_strategy", 20)
        raise ConfigError(
            f"{type(config).__name__}({name}={given:g}) with {strategy}='steps': must be a whole number of steps of "
            f"at least 1, or a share of max_steps between 0 and 1; write {strategy.split('_')[0]}_steps={usual}, or "
            f"{strategy}='no'"
        )
    if given >= 1:
        return int(given)
    if steps is None or steps < 1:
        raise ConfigError(
            f"{type(config).__name__}({name}={given:g}) is a share of the steps, and how many they are is not known "
            f"before the data set is; give a whole number, or max_steps"
        )
    return max(1, math.ceil(given * steps))


def _differences(config: _Config, sections: Sections, notes: list[str]) -> None:
    """Add notes on differences that no field expresses, and on defaults that are not TRL's."""
    names = [name for name in _OTHER_DEFAULTS if config.field(name) is None]
    names = [name for name in names if name != "bf16" or "dtype" not in sections["model"]]
    if left := [f"{name} ({_OTHER_DEFAULTS[name]})" for name in names]:
        notes.append(f"left out, and by default not as in TRL: {', '.join(left)}")
    if config.letter in "GR":
        notes.append(
            "generation and training run at once: tokens may be queue.max_staleness = 4 versions old; for strict "
            f"turns write {type(config).__name__}(slipstream={{'queue': {{'max_staleness': 0}}}})"
        )


def _refusal(config: _Config, known: Field, value: Any, given: bool) -> str:
    fine = " or ".join(f"{known.name}={value!r}" for value in known.fine if value not in (None, "", []))
    default = "" if given else ", TRL's default,"
    # Where there are several values to choose from, the note says what each becomes, and not why another is refused.
    several = fine.count(" or ") > 0
    why = f": {known.note}" if known.note and not several and not known.here.endswith("always") else ""
    remedy = known.remedy or (f"write {fine}" if fine else "leave it out")
    if isinstance(value, str):
        remedy = _ELSEWHERE.get((known.name, value), remedy)
    return f"{type(config).__name__}({known.name}={value!r}){default} is not supported{why}; {remedy}"


def plain(value: Any) -> Any:
    """Unwrap a value of one of transformers' enumerations."""
    return value.value if isinstance(value, Enum) else value


def _default(section: Any, key: str) -> Any:
    return section.model_fields[key].default


def check_fields(config: _Config, sections: Sections) -> None:
    """Raise `ConfigError` for a field whose setting is out of bounds.

    Settings of `config.slipstream` are left to the start of the run, whose messages name settings.
    """
    kind = type(config).__name__
    task = {"path": "script.py:task", **sections.get("task", {})}
    try:
        resolve(None, overrides({**sections, "task": task}), kind)
    except ConfigError as error:
        lines = [_of_fields(config, line.removeprefix(f"{kind}: ")) for line in str(error).splitlines()]
        if text := "\n".join(filter(None, lines)):
            raise ConfigError(text) from None


def in_fields(config: _Config, text: str) -> str:
    """Put the script's fields before each line of a message that begins with their setting."""
    return "\n".join(_of_fields(config, line) or line for line in text.splitlines())


def _of_fields(config: _Config, line: str) -> str | None:
    """Put the script's fields before a message that begins with their setting; None if the script set none."""
    match = re.match(r"([a-z_]+)\.([a-z_]+)(?:\[\d+\])? = ", line)
    if match is None or match[2] in config.slipstream.get(match[1], {}):
        return None
    setting = f"`{match[1]}.{match[2]}`"
    given = {name: value for name, value in config.given.items() if value is not None and setting in FIELDS[name].here}
    fields = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"{type(config).__name__}({fields}): {line}" if fields else None
