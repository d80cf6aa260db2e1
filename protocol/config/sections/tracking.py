"""Where figures and models go beside the run directory: trackers, and the hub."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from protocol.config.sections.base import CountOrZero, Seconds, Section, setting

# Those that accelerate has, by the names that transformers gives them.
TRACKERS = ("tensorboard", "wandb", "trackio", "comet_ml", "mlflow", "aim", "clearml", "dvclive", "swanlab")
ALL = "all"


class TrackingSection(Section):
    report_to: list[str] = setting(
        [],
        description=f"trackers that get each step's figures: {', '.join(TRACKERS)}; all: those that are installed",
        why="metrics.jsonl and /metrics need no package and no account",
    )
    project: str = setting(
        "slipstream",
        min_length=1,
        description="project of the trackers that have projects; mlflow calls it experiment",
        why="runs that belong together stand together",
    )
    run_name: str | None = setting(
        None, min_length=1, description="the run's name at the trackers", why="that of the run"
    )
    rollouts_every: CountOrZero = setting(
        0,
        description="steps between tables of rollouts for trackers that show tables or texts (wandb, clearml, trackio, "
        "tensorboard); 0: none. They hold learner.sample_rollouts of the step's",
        why="prompts and answers stay on this machine unless you send them",
    )
    options: dict[str, dict[str, Any]] = setting(
        {},
        description='what a tracker\'s own start takes, by tracker, as in [tracking.options.wandb] entity = "team"; '
        "accelerate's init_kwargs",
        why="their own defaults",
    )

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        """transformers takes a single name, too, and "none" for none."""
        if isinstance(value, str):
            value = [value]
        return [] if value == ["none"] else value

    @field_validator("report_to")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in (*TRACKERS, ALL):
                raise ValueError(f"there is no tracker {name!r}: choose among {', '.join(TRACKERS)}, all, none")
        return list(dict.fromkeys(value))

    @field_validator("options")
    @classmethod
    def _of_trackers(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name in value:
            if name not in TRACKERS:
                raise ValueError(f"there is no tracker {name!r}: its options stand under one of {', '.join(TRACKERS)}")
        return value


class HubSection(Section):
    push_to_hub: bool = setting(
        False,
        description="send checkpoints' models to the Hugging Face hub, with a model card; the token is HF_TOKEN's, or "
        "that of `hf auth login`",
        why="nothing is sent anywhere unless you ask for it",
    )
    hub_model_id: str | None = setting(
        None,
        pattern=r"^[\w.-]+(/[\w.-]+)?$",
        description="name of the model on the hub, owner/name or a name of your own account's",
        why="that of the run, in your account",
    )
    hub_private_repo: bool | None = setting(
        None,
        description="whether the model is private, where it is not on the hub yet",
        why="your account's own default, which is public unless your organisation says otherwise",
    )
    hub_strategy: Literal["end", "every_save"] = setting(
        "every_save",
        description="end: the last checkpoint alone; every_save: each, but for those that come while one is on its way",
        why="transformers' default; a machine that goes away leaves something behind",
    )
    hub_timeout_s: Seconds = setting(
        3600.0,
        description="seconds that the learner waits for the last upload, when the run is over",
        why="workers and queue have ended by then; a model of 7 B takes minutes",
    )
