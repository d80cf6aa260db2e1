"""The packages that only some processes need, and the one message where they are missing."""

from __future__ import annotations

from importlib.util import find_spec

from protocol.config import ConfigError

LEARNER = ("torch", "accelerate", "blake3", "matplotlib", "safetensors")
VLLM = ("vllm",)


def require(command: str, modules: tuple[str, ...]) -> None:
    """Raises `ConfigError` if `command` lacks one of `modules`; imports none of them."""
    missing = [module for module in modules if not _is_installed(module)]
    if not missing:
        return
    extra = "cpu (or gpu)" if modules == VLLM else "learner"
    raise ConfigError(
        f"{command} needs the {extra} extra, {', '.join(missing)} is not installed: "
        f"pip install 'slipstream-rl[{extra.split()[0]}]'"
    )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
