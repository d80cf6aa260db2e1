"""How episodes are sampled."""

from __future__ import annotations

from typing import Any, Literal

from protocol.config.sections.base import Count, CountOrZero, Section, setting


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
        description="nucleus sampling; below 1 see accept_sampler_mismatch",
        why="samples the policy as it is",
    )
    top_k: CountOrZero = setting(
        0, description="sample from the k likeliest tokens; 0: from all", why="samples the policy as it is"
    )
    min_p: float = setting(
        0.0,
        ge=0,
        le=1,
        description="leave out tokens less likely than this share of the likeliest one's probability",
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
        why="what is needed has a setting of its own",
    )
    accept_sampler_mismatch: bool = setting(
        False,
        description="allow settings whose log-probs the learner cannot reproduce; it applies the temperature alone, so "
        "watch sampler/kl_staleness_0",
        why="ratios would be wrong from the first step on, and nobody would see it",
    )
    max_turns: CountOrZero = setting(
        8, description="turns of the policy in one episode; 0: any number", why="seven tool calls and an answer"
    )
    max_tool_result_tokens: Count | Literal["auto"] = setting(
        "auto",
        description="tokens of one tool result; the middle of a longer one is left out. auto: half the context",
        why="one long page does not end an episode",
    )
    mask_truncated: bool = setting(
        False,
        description="do not train on rollouts that ran out of tokens; TRL's mask_truncated_completions",
        why="running out of tokens is worth a low reward",
    )
    give_up_after: CountOrZero = setting(
        16,
        description="groups that fail before any succeeded, after which the run ends with the failure; 0: never",
        why="sixteen in a row are no chance, and the fault shows within a minute",
    )
