"""Settings of sampled episodes, and of evaluations during training."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from slipstream.protocol.config.sections.base import Count, CountOrZero, Seconds, Section, setting


class RolloutSection(Section):
    group_size: int = setting(8, ge=2, le=1024, description="episodes per prompt", why="usual in GRPO papers; TRL's")
    temperature: float = setting(
        1.0,
        ge=0.01,
        le=2,
        description="sampling temperature",
        why="samples the policy itself",
    )
    max_turn_tokens: Count = setting(
        512,
        description="tokens that one turn may sample",
        why="a tool call or short answer; reasoning models need more",
    )
    max_episode_tokens: Count = setting(
        2048,
        description="tokens that one episode may sample",
        why="TRL's async max_completion_length",
    )
    top_p: float = setting(
        1.0,
        gt=0,
        le=1,
        description="nucleus sampling; below 1 also set top_k",
        why="samples the policy itself",
    )
    top_k: CountOrZero = setting(
        0,
        description="sample from the k likeliest tokens; 0: all. Up to 128 the learner uses the same truncated "
        "distribution; above, see accept_sampler_mismatch",
        why="samples the policy itself",
    )
    min_p: float = setting(
        0.0,
        ge=0,
        le=1,
        description="leave out tokens below this share of the top probability; above 0 also set top_k",
        why="samples the policy itself",
    )
    repetition_penalty: float = setting(
        1.0,
        gt=0,
        le=10,
        description="vLLM's; other than 1 see accept_sampler_mismatch",
        why="samples the policy itself",
    )
    presence_penalty: float = setting(
        0.0,
        ge=-2,
        le=2,
        description="vLLM's; other than 0 see accept_sampler_mismatch",
        why="samples the policy itself",
    )
    frequency_penalty: float = setting(
        0.0,
        ge=-2,
        le=2,
        description="vLLM's; other than 0 see accept_sampler_mismatch",
        why="samples the policy itself",
    )
    stop: list[str] = setting(
        [],
        description="texts that end a turn; they stay in it, and train",
        why="the model ends its turns",
    )
    generation_kwargs: dict[str, Any] = setting(
        {},
        description="further fields of vLLM's SamplingParams, such as bad_words",
        why="none needed",
    )
    accept_sampler_mismatch: bool = setting(
        False,
        description="allow sampling settings that the learner cannot reproduce; then watch sampler/kl_staleness_0",
        why="ratios would silently be wrong",
    )
    max_turns: CountOrZero = setting(
        8, description="turns of the policy in one episode; 0: any number", why="seven tool calls and an answer"
    )
    max_tool_result_tokens: Count | Literal["auto"] = setting(
        "auto",
        description="maximum tokens of one tool result, whose middle is cut out; auto: half the context",
        why="one long page does not end an episode",
    )
    mask_truncated: bool = setting(
        False,
        description="do not train on rollouts that ran out of tokens; TRL's mask_truncated_completions",
        why="running out should cost reward",
    )
    give_up_after: CountOrZero = setting(
        16,
        description="failed groups, before any success, that end the run; 0: never",
        why="a fault shows within a minute",
    )


# vLLM replaces lower temperatures above 0 by this one.
_MIN_TEMPERATURE = 0.01

# Settings of [eval] that turn evaluations on.
_EVALUATIONS = ("every", "at_start", "at_end")


class AgentSection(Section):
    unenforced: Literal["warn", "refuse"] = setting(
        "warn",
        description="agent requests that ask for another distribution (temperature, top_p, seed, strict, "
        "tool_choice, ...): warn samples the run's distribution, counts them as agent/unenforced/NAME"
        " and warns once; refuse answers 400",
        why="many programs set a temperature by default; training is right either way",
    )


class ImagesSection(Section):
    enabled: bool = setting(
        False,
        description="prompts, tools and environments may show images; needs a vision-language model and Pillow "
        "(slipstream-rl[vision])",
        why="text-only runs share prefixes",
    )
    max_per_episode: Count = setting(
        16,
        description="images that one conversation may show; the servers start with it",
        why="a prompt and some screenshots",
    )
    max_pixels: Count = setting(
        2**24,
        description="width times height of an image; larger ones are refused before decoding",
        why="above any screen; at most 64 MB decoded",
    )
    urls: bool = setting(
        False,
        description="fetch images given as http(s) addresses",
        why="a worker would contact any host that a data set names",
    )


class EvalSection(Section):
    every: CountOrZero = setting(
        0,
        description="steps between evaluations on the task's eval_dataset; 0: none between the first and last step",
        why="needs an eval_dataset",
    )
    at_start: bool = setting(
        False,
        description="evaluate before the first step, which waits",
        why="needs an eval_dataset",
    )
    at_end: bool = setting(
        False,
        description="evaluate the last weights before the run ends",
        why="needs an eval_dataset",
    )
    rows: Count | Literal["all"] = setting(
        "all",
        description="number of first rows of the eval_dataset; an iterable needs a number",
        why="all of them",
    )
    group_size: int = setting(
        1,
        ge=1,
        le=1024,
        description="episodes of each row; above 1 also reports best@k",
        why="more rows say more",
    )
    temperature: float | None = setting(
        None,
        ge=0,
        le=2,
        description="sampling temperature of evaluations; 0: greedy; none: rollout.temperature",
        why="shows the policy that trains",
    )
    share: float = setting(
        0.25,
        gt=0,
        le=1,
        description="share of a worker's episodes for evaluations: at least one group; all before the first and "
        "after the last step",
        why="training continues meanwhile",
    )
    timeout_s: Seconds = setting(
        3600.0,
        description="time-out of an evaluation; unfinished rows count as failed",
        why="longer than two long episodes",
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
