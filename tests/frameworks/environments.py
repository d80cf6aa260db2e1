"""Makes a virtual environment for each framework, once, and runs programs there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.rollout_worker.task.agent import Endpoint

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Seconds for the installation of one framework.
INSTALL_S = 600


def environment(packages: Sequence[str]) -> Path:
    """Return the Python of an environment with these packages. It is made where there is none yet.

    Raises:
        RuntimeError: They cannot be installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream" / "frameworks"
    name = packages[0].partition("=")[0].partition("[")[0]
    folder = cache / f"{name}-{hashlib.blake2b(repr((sys.version, packages)).encode(), digest_size=4).hexdigest()}"
    python = folder / "bin" / "python"
    done = folder / "done"
    if done.exists():
        return python
    script = (
        f"set -e; source {ROOT}/deploy/setup.sh; "
        "settings=$(python -m pip config list | slipstream_uv_settings core); "
        'while IFS= read -r setting; do if [ -n "$setting" ]; then export "${setting?}"; fi; done <<<"$settings"; '
        'python -m uv venv -q --clear "$1"; python -m uv pip install -q --python "$1/bin/python" "${@:2}"'
    )
    command = ["bash", "-c", script, "bash", str(folder), *packages]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    made = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_S, env={**os.environ, "PATH": path}, check=False
    )
    if made.returncode:
        raise RuntimeError(f"{' '.join(packages)}: {made.stderr[-2000:]}")
    done.touch()
    return python


class Player:
    """Plays a snippet's episodes, one after the other, in its environment."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._one = threading.Lock()

    def play(self, endpoint: Endpoint, **columns: Any) -> Any:
        """Return what the agent returned.

        Raises:
            RuntimeError: It raised, or its process ended.
        """
        address = [endpoint.base_url, endpoint.api_key, endpoint.model, endpoint.temperature]
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._one:
            stdin.write(json.dumps([address, columns]) + "\n")
            stdin.flush()
            line = stdout.readline()
        answer = json.loads(line or '{"error": "its process ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["returned"]


@contextmanager
def playing(python: Path, snippet: Path) -> Iterator[Player]:
    """Run the process that plays a snippet."""
    command = [str(python), str(HERE / "player.py"), str(snippet)]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    # litellm would ask for its list of prices, tiktoken for its files, which litellm brings.
    (files,) = (
        environment(["litellm"]).parents[1].glob("lib/python*/site-packages/litellm/litellm_core_utils/tokenizers")
    )
    own |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "TIKTOKEN_CACHE_DIR": str(files)}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=snippet.parent, env=own
    )
    try:
        yield Player(process)
    finally:
        process.kill()
        process.communicate()
