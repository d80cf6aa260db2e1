"""Settings of sampled episodes, and of evaluations beside training."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from slipstream.protocol.config.sections.base import Count, CountOrZero, Seconds, Section, setting


class RolloutSection(Section):
    group_size: int = setting(
        8, ge=2, le=1024, description="episodes per prompt", why="the usual size in GRPO papers and TRL's default"
    )
    temperature: float = setting(
        1.0,
        ge=0.01,
        le=2,
        description="sampling temperature, within vLLM's bounds",
        why="samples the policy as it is; other values train a sharpened or flattened one",
    )
    max_turn_tokens: Count = setting(
        512,
        description="tokens that one turn may sample",
        why="long enough for a tool call or a short answer; reasoning models need more",
    )
    max_episode_tokens: Count = setting(
        2048,
        description="tokens that one episode may sample",
        why="TRL's max_completion_length in its asynchronous trainer",
    )
    top_p: float = setting(
        1.0,
        gt=0,
        le=1,
        description="nucleus sampling; below 1 set top_k, too",
        why="samples the policy as it is",
    )
    top_k: CountOrZero = setting(
        0,
        description="sample from the k likeliest tokens; 0: from all. Up to 128 the learner learns from the same "
        "distribution, whatever top_p, min_p and bans leave of it; above see accept_sampler_mismatch",
        why="samples the policy as it is",
    )
    min_p: float = setting(
        0.0,
        ge=0,
        le=1,
        description="leave out tokens less likely than this share of the likeliest one's probability; above 0 set "
        "top_k, too",
        why="samples the policy as it is",
    )
    repetition_penalty: float = setting(
        1.0,
        gt=0,
        le=10,
        description="vLLM's; other than 1 see accept_sampler_mismatch",
        why="samples the policy as it is",
    )
    presence_penalty: float = setting(
        0.0,
        ge=-2,
        le=2,
        description="vLLM's; other than 0 see accept_sampler_mismatch",
        why="samples the policy as it is",
    )
    frequency_penalty: float = setting(
        0.0,
        ge=-2,
        le=2,
        description="vLLM's; other than 0 see accept_sampler_mismatch",
        why="samples the policy as it is",
    )
    stop: list[str] = setting(
        [],
        description="texts that end a turn; they stay in it, and train",
        why="the model's own end of turn is enough",
    )
    generation_kwargs: dict[str, Any] = setting(
        {},
        description="further fields of vLLM's SamplingParams, such as bad_words",
        why="the usual ones have settings of their own",
    )
    accept_sampler_mismatch: bool = setting(
        False,
        description="allow settings whose log-probs the learner cannot reproduce, since it applies only the "
        "temperature; then watch sampler/kl_staleness_0",
        why="ratios would be wrong from the first step on, and nobody would see it",
    )
    max_turns: CountOrZero = setting(
        8, description="turns of the policy in one episode; 0: any number", why="seven tool calls and an answer"
    )
    max_tool_result_tokens: Count | Literal["auto"] = setting(
        "auto",
        description="maximum tokens of one tool result; the middle of a longer one is left out; auto: half the context",
        why="one long page does not end an episode",
    )
    mask_truncated: bool = setting(
        False,
        description="do not train on rollouts that ran out of tokens; TRL's mask_truncated_completions",
        why="running out of tokens is worth a low reward",
    )
    give_up_after: CountOrZero = setting(
        16,
        description="failed groups before any has succeeded after which the run is given up; 0: never",
        why="sixteen in a row are no accident, and a fault shows within a minute",
    )


# vLLM replaces lower temperatures above 0 by this one.
_MIN_TEMPERATURE = 0.01

# Settings of [eval] that turn evaluations on.
_EVALUATIONS = ("every", "at_start", "at_end")


class AgentSection(Section):
    unenforced: Literal["warn", "refuse"] = setting(
        "warn",
        description="requests of an agent that ask for another distribution than the run's (temperature, top_p, seed, "
        "strict, tool_choice, ...): warn samples the run's, counts them as agent/unenforced/NAME and says so once; "
        "refuse answers 400",
        why="programs name a temperature of their own by default, and what is trained is right either way",
    )


class ImagesSection(Section):
    enabled: bool = setting(
        False,
        description="prompts, tools and environments may show images; needs a model that sees and Pillow "
        "(slipstream-rl[vision])",
        why="a run on text alone needs no image processor, and its rows share prefixes",
    )
    max_per_episode: Count = setting(
        16,
        description="images that one conversation may show; the servers are started with it",
        why="enough for a prompt and some screenshots",
    )
    max_pixels: Count = setting(
        2**24,
        description="width times height of an image as it is given; a larger one is refused before it is decoded",
        why="above any screen, and decoded at most 64 MB",
    )
    urls: bool = setting(
        False,
        description="fetch images of rows, tools and environments that are given as http(s) addresses",
        why="a worker would ask whatever host a data set or a tool names",
    )


class EvalSection(Section):
    every: CountOrZero = setting(
        0,
        description="optimiser steps between evaluations on the task's eval_dataset; 0: none between the first and the "
        "last step",
        why="a task need not have an eval_dataset",
    )
    at_start: bool = setting(
        False,
        description="evaluate the model before its first step, which waits for it",
        why="a task need not have an eval_dataset",
    )
    at_end: bool = setting(
        False,
        description="evaluate the weights of the last step; the run ends when that is done",
        why="a task need not have an eval_dataset",
    )
    rows: Count | Literal["all"] = setting(
        "all",
        description="number of rows of the eval_dataset, from the first; an iterable needs a number",
        why="an eval_dataset is meant as a whole",
    )
    group_size: int = setting(
        1,
        ge=1,
        le=1024,
        description="episodes of each row; above 1 the best of them is reported too, as pass@k or best@k",
        why="many rows say more than many episodes of a few",
    )
    temperature: float | None = setting(
        None,
        ge=0,
        le=2,
        description="sampling temperature of an evaluation; 0: the likeliest token each time; none: "
        "rollout.temperature",
        why="the curve then shows the policy that trains",
    )
    share: float = setting(
        0.25,
        gt=0,
        le=1,
        description="share of a worker's episodes that an evaluation may take: at least one group, and all of them "
        "before the first step and after the last",
        why="an evaluation runs beside training and does not replace it",
    )
    timeout_s: Seconds = setting(
        3600.0,
        description="time-out of an evaluation from its request; rows that are not done by then count as failed",
        why="longer than two long episodes; without it a stuck evaluation would keep the run from its end",
    )

    @property
    def is_on(self) -> bool:
        """Whether the run makes evaluations."""
        return self.every > 0 or self.at_start or self.at_end

    @property
    def unread(self) -> list[str]:
        """The settings that have no effect, as the run makes no evaluations."""
        fields = type(self).model_fields
        return [] if self.is_on else [name for name in fields if getattr(self, name) != fields[name].default]

    def is_due(self, step: int, steps: int) -> bool:
        """Tell whether an evaluation belongs to `step` of `steps`; step 0 is before the first."""
        if step == 0:
            return self.at_start
        return (self.at_end and step == steps) or (self.every > 0 and step % self.every == 0)

    @field_validator("rows", mode="before")
    @classmethod
    def _are_some(cls, rows: Any) -> Any:
        """Check the value here, since pydantic would report a fault once for each part of a union."""
        if rows != "all" and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise ValueError('must be a whole number of at least 1, or "all"')
        return rows

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        temperature = self.temperature
        if temperature is not None and 0 < temperature < _MIN_TEMPERATURE:
            raise ValueError(
                f"eval.temperature = {temperature:g}: vLLM would sample at {_MIN_TEMPERATURE:g} instead; set it to "
                f"0, or to at least {_MIN_TEMPERATURE:g}"
            )
        if temperature == 0 and self.group_size > 1:
            raise ValueError(
                f"eval.group_size = {self.group_size} with eval.temperature = 0: all episodes of a row would be the "
                f"same; set eval.group_size to 1, or leave out eval.temperature"
            )
        # Where they were turned off in so many words, the rest may stay as it was: find_evaluation_warnings names it.
        if not self.is_on and not self.model_fields_set & {*_EVALUATIONS}:
            for name in self.unread:
                raise ValueError(
                    f"eval.{name} = {getattr(self, name)} has no effect, as there is no evaluation: set eval.every, "
                    f"eval.at_start or eval.at_end, or leave it out"
                )
        return self
