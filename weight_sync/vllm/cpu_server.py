"""Starts vLLM's API server on a CPU with a torchvision whose compiled operators cannot be loaded.

vLLM's files of models that see import torchvision, and use of it what is written in Python. PyPI has its builds for
CUDA alone, next to a torch for CPUs: their operators do not load, and where it is installed nothing of transformers can
be imported any more. So `deploy/setup.sh` keeps it in its own folder, which only vLLM's processes see, and the two
operators that its import asks for are declared here first. Nothing calls them.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

SERVER = "vllm.entrypoints.openai.api_server"

# Where `deploy/setup.sh` puts torchvision.
FOLDER = Path(sys.prefix) / "share" / "slipstream" / "torchvision"

_OPERATORS = ("nms", "qnms")


def is_needed() -> bool:
    """Tell whether torchvision is in its own folder, and nowhere else."""
    return FOLDER.is_dir() and find_spec("torchvision") is None


def make_importable() -> None:
    """Let this process import torchvision from its folder."""
    import torch

    if is_needed():
        sys.path.append(str(FOLDER))
    for name in _OPERATORS:
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


# Child processes import this file as `__mp_main__` before anything of vLLM.
if __name__ in ("__main__", "__mp_main__"):
    make_importable()
if __name__ == "__main__":
    runpy.run_module(SERVER, run_name="__main__")
