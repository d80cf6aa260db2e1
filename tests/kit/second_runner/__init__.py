"""Model Runner V2, which vLLM takes on GPUs, on a CPU: `ENVIRONMENT` is for a server's process or a script's.

This folder's `sitecustomize` makes vLLM take it; Triton's interpreter runs its kernels, some 50 ms a step.
"""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(__file__).parent

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": os.pathsep.join([str(_FOLDER), str(_FOLDER.parents[2]), os.environ.get("PYTHONPATH", "")]),
}
