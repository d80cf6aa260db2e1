"""A run over hosts with addresses of their own continues after its links are cut, and loses nothing: `tests.links`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.network import why_not

pytestmark = [pytest.mark.e2e, pytest.mark.wide, pytest.mark.timeout(900)]


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_run_over_hosts_outlives_cut_links_and_an_address_that_moves(model_folder: Path) -> None:
    """Two ranks on two hosts, in the middle of whose steps the queue and a worker cannot be reached for a while: for
    longer than the learner's leases last."""
    sizes = ("--servers", "1", "--ranks", "2", "--workers", "2", "--steps", "80", "--cut", "40")
    command = [sys.executable, "-m", "tests.links", "--model", str(model_folder), *sizes]
    done = subprocess.run([*command, "--links", "queue", "worker-1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    *_, last = map(json.loads, done.stdout.splitlines())
    assert last == {"ended with": 0, "broken": []}
