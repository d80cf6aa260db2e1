"""Names of weights as a checkpoint has them, whatever wraps the module that they are taken from."""

from __future__ import annotations

from collections.abc import Iterable

# torch.compile, FSDP, activation checkpointing, and peft around a layer: anywhere in a name.
_AROUND = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
# DDP and peft around a model: at its beginning.
_BEFORE = (["module"], ["base_model", "model"])


def unwrapped(name: str) -> str:
    """`name` without what wrappers put into it."""
    parts = [part for part in name.split(".") if part not in _AROUND]
    while before := next((one for one in _BEFORE if parts[: len(one)] == one and len(parts) > len(one)), None):
        parts = parts[len(before) :]
    return ".".join(parts)


def check_distinct(names: Iterable[str]) -> None:
    """Raises ValueError where two of `names` are one without their wrappers."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(unwrapped(name), name)
        if other != name:
            raise ValueError(f"{other} and {name} are both {unwrapped(name)} in a checkpoint: publish one of them")
