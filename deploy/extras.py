"""The packages that only some processes need, and the one message where they are missing."""

from __future__ import annotations

from importlib.util import find_spec

from protocol.config import ConfigError

LEARNER = ("torch", "accelerate", "blake3", "matplotlib", "safetensors", "xxhash")
VLLM = ("vllm",)


def require(command: str, modules: tuple[str, ...]) -> None:
    """Raises `ConfigError` if `command` lacks one of `modules`; imports none of them."""
    missing = [module for module in modules if not _is_installed(module)]
    if not missing:
        return
    # Both of vLLM's extras hold the learner's.
    name, extra = ("cpu (or gpu)", "cpu") if "vllm" in modules else ("learner", "learner")
    raise ConfigError(
        f"{command} needs the {name} extra (not installed: {', '.join(missing)}): pip install 'slipstream-rl[{extra}]'"
    )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
