"""TRL's config classes: they take TRL's fields and hold the script's values.

`DEFAULTS` has TRL's defaults of the fields that shape what is trained; they apply if a script leaves such a field out.
Every other field that is left out has Slipstream's default.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, ClassVar

from slipstream.protocol.config import ConfigError
from slipstream.protocol.config.text import nearest, settings
from slipstream.script import without_frames
from slipstream.trl.fields import FIELDS, FORMER, MISTAKEN, settings_of

_COMMON: dict[str, Any] = {
    "learning_rate": 1e-6,
    "temperature": 1.0,
    "epsilon": 0.2,
    "epsilon_high": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
    "seed": 42,
}

_SYNC: dict[str, Any] = {
    **_COMMON,
    "max_completion_length": 512,
    "shuffle_dataset": True,
    "mask_truncated_completions": False,
    "num_iterations": 1,
    "lr_scheduler_type": "linear",
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "GRPOConfig": {
        **_SYNC,
        "num_generations": 8,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "multi_objective_aggregation": "sum_then_normalize",
        "delta": None,
        "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0,
        "off_policy_mask_threshold": None,
        "sync_ref_model": False,
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512,
        "use_bias_correction_kl": True,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": None,
        "max_tool_calling_iterations": None,
    },
    "RLOOConfig": {
        **_SYNC,
        "num_generations": 2,
        "beta": 0.05,
        "normalize_advantages": False,
        "reward_clip_range": None,
        "sync_ref_model": False,
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512,
    },
    "AsyncGRPOConfig": {
        **_COMMON,
        "num_generations": 8,
        "max_completion_length": 2048,
        "max_tool_calling_iterations": None,
        "max_staleness": 4,
        "weight_sync_steps": 1,
        "lr_scheduler_type": "constant",
    },
}


class _Config:
    """A config of TRL. Raises `ConfigError` for a name that is no field of TRL's.

    Attributes:
        letter: The config's letter in `fields.Field.of`.
        given: Fields that the script set.
        slipstream: Sections of a run file, {section: {key: value}}, for settings that TRL has no name for. They
            override the fields.
    """

    letter: ClassVar[str]
    given: dict[str, Any]
    slipstream: dict[str, dict[str, Any]]

    @without_frames
    def __init__(
        self, output_dir: Any = None, *, slipstream: dict[str, dict[str, Any]] | None = None, **fields: Any
    ) -> None:
        vars(self)["given"] = {}
        self.slipstream = slipstream or {}
        for name, value in (("output_dir", output_dir), *fields.items()):
            setattr(self, name, value)

    @classmethod
    def names(cls) -> list[str]:
        """List the fields that this class takes."""
        return [name for name, field in FIELDS.items() if {cls.letter, "T"} & {*field.of}]

    def field(self, name: str) -> Any:
        """Return the script's value, else `default(name)`."""
        return self.given.get(name, self.default(name))

    @classmethod
    def default(cls, name: str) -> Any:
        """Return TRL's default of a field that shapes what is trained, None for another field."""
        return DEFAULTS[cls.__name__].get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__name__
        if name == "slipstream":
            if not isinstance(value, dict) or not all(isinstance(section, dict) for section in value.values()):
                raise ConfigError(
                    f"{kind}(slipstream={value!r}): give sections, such as {{'learner': {{'steps': 100}}}}"
                )
            vars(self)[name] = value
        elif name in self.names():
            self.given[name] = value
        else:
            raise ConfigError(f"{kind}({name}=...) is not a field of TRL's {kind}: {self._meant(name)}")

    @classmethod
    def _meant(cls, name: str) -> str:
        """Say what to write in place of a name that is no field of this config."""
        if name in FORMER:
            return f"it is gone there; {FORMER[name]}"
        if name in MISTAKEN:
            return MISTAKEN[name]
        if version := _installed_with(cls.__name__, name):
            return f"TRL {version}, which is installed, has it, but it came after the releases that are known here"
        keys: dict[str, list[str]] = {}
        for section, _, key in (setting.partition(".") for setting in settings()):
            keys.setdefault(key, []).append(section)
        own = cls.names()
        close = next(iter(get_close_matches(name, [*own, *FIELDS, *keys], n=1, cutoff=0.8)), None) or nearest(name, own)
        for word, said in ((name, ""), (close or "", "did you mean {}? ")):
            if word in own:
                return f"did you mean {word}?"
            found = settings_of(word)[:1] if word in FIELDS else [(section, word) for section in keys.get(word, ())]
            if len(found) == 1:
                ((section, key),) = found
                as_ours = f"slipstream={{{section!r}: {{{key!r}: ...}}}}"
                if said:
                    return f"did you mean {word}, which is a setting here and is written {as_ours}?"
                return f"here it is a setting: {as_ours}"
            if word in FIELDS:
                return f"{said.format(word)}it is one of other configs; leave it out"
        return "settings that TRL has no name for go into slipstream={section: {key: value}}"

    def __getattr__(self, name: str) -> Any:
        if name in type(self).names():
            return self.field(name)
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.given.items() if value is not None)
        return f"{type(self).__name__}({given})"


def _installed_with(config: str, name: str) -> str | None:
    """Return the version of the installed TRL if its class of that name has the field; None otherwise."""
    try:
        trl = distribution("trl")
    except PackageNotFoundError:
        return None
    for file in trl.files or ():
        if file.name.endswith("grpo_config.py") or file.name == "rloo_config.py":
            text = Path(str(file.locate())).read_text(encoding="utf-8")
            if f"class {config}(" in text and f"\n    {name}: " in text:
                return trl.version
    return None


class GRPOConfig(_Config):
    """TRL's `GRPOConfig`."""

    letter = "G"


class RLOOConfig(_Config):
    """TRL's `RLOOConfig`."""

    letter = "R"


class AsyncGRPOConfig(_Config):
    """TRL's `AsyncGRPOConfig`."""

    letter = "A"
