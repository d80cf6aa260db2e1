"""Whether the learner's log-probs are the sampler's: what is said of KL(sampler, learner) at staleness 0.

There the two are one policy, and the KL is what their arithmetic differs by. Anything more is in the ratio of every
token of every step, where nobody would see it. Turns that an update landed in are left out: vLLM goes on with the keys
and values of the older weights.
"""

from __future__ import annotations

from learner.training.trainer import StepFigures

# Nats a token. In float32 the quickstart's is 4e-7, and with top_p = 0.9 it is 0.02.
SUSPICIOUS = 0.01
# Of fewer tokens, one or two strange ones decide the mean.
FEWEST_TOKENS = 64

CAUSES = (
    "Likely causes: log-probs of another kind (a server without --logprobs-mode processed_logprobs), or arithmetic "
    "that differs (model.dtype, a quantised server, vllm.args, the routing of a mixture of experts)"
)


def suspicious(figures: StepFigures) -> bool:
    """Whether learner and sampler differ by more than arithmetic does."""
    kl = figures.sampler_kl_staleness_0
    return kl is not None and figures.sampler_tokens_staleness_0 >= FEWEST_TOKENS and abs(kl) > SUSPICIOUS


def warning(figures: StepFigures) -> str | None:
    """What to tell a person whose settings are such that there should be no difference; None if there is none."""
    if not suspicious(figures):
        return None
    return (
        f"sampler/kl_staleness_0 is {figures.sampler_kl_staleness_0:.3g} nats a token over "
        f"{figures.sampler_tokens_staleness_0} tokens, and more than {SUSPICIOUS} is not rounding: the learner gives "
        f"tokens another probability than the servers that sampled them from the same weights. {CAUSES}"
    )
