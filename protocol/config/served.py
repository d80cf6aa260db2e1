"""What the servers compute in, as the run file says it: the type, and how they quantise."""

from __future__ import annotations

from collections.abc import Sequence

TYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}

# Nats. The largest difference of a log-prob that rounding explains, over ids drawn from the whole vocabulary.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.5}
_EIGHT_BITS, _FOUR_BITS = 2.0, 4.0
# What vLLM quantises by itself as it loads weights of 16 bits, which is what the learner sends.
QUANTISED = {
    **dict.fromkeys(("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8"), _EIGHT_BITS),
    **dict.fromkeys(("int8_per_channel_weight_only", "experts_int8", "torchao", "online"), _EIGHT_BITS),
    "nvfp4_per_token": _FOUR_BITS,
}


def dtype(model_dtype: str, args: Sequence[str]) -> str:
    """float32, bfloat16 or float16."""
    given = _option(args, "--dtype")
    return TYPES.get(given or model_dtype, model_dtype)


def quantisation(args: Sequence[str]) -> str | None:
    """The method that `vllm.args` asks for."""
    return _option(args, "--quantization", "-q")


def tolerance(model_dtype: str, args: Sequence[str]) -> float:
    """`weight_sync.probe_tolerance = "auto"`, in nats."""
    method = quantisation(args)
    return QUANTISED[method] if method in QUANTISED else TOLERANCES[dtype(model_dtype, args)]


def check(args: Sequence[str]) -> None:
    """Raises ValueError where the servers could not take the learner's weights."""
    method = quantisation(args)
    if method is not None and method not in QUANTISED:
        raise ValueError(
            f"vllm.args has --quantization {method}, whose weights are packed before a server loads them: it cannot "
            f"take those that the learner sends, and the first publication would fail. Take one that vLLM quantises by "
            f"itself: {', '.join(QUANTISED)}"
        )


def _option(args: Sequence[str], *names: str) -> str | None:
    """The last value that is given for it, as vLLM reads its command line."""
    found = None
    for place, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name in names:
            found = value if equals else next(iter(args[place + 1 : place + 2]), None)
    return found
