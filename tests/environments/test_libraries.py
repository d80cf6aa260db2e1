"""Runs the contract of the adapters with each library, in its own environment.

Asked for by name, as environments are downloaded: `pytest -m frameworks tests/environments`.
"""

from __future__ import annotations

import subprocess
import sysconfig

import pytest

from tests.environments.test_contract import CASES
from tests.frameworks.environments import ROOT, environment

PACKAGES = {
    "gymnasium": ["gymnasium"],
    "textarena": ["textarena"],
    "openenv": ["openenv-core"],
    "inspect_ai": ["inspect-ai"],
    "verifiers": ["verifiers>=0.4,<0.5"],
}


def test_each_library_has_its_packages() -> None:
    assert PACKAGES.keys() == {name for name, case in CASES.items() if case.library}


@pytest.mark.frameworks
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PACKAGES)
def test_its_contract(name: str) -> None:
    python = environment(PACKAGES[name])
    # What the library does not bring itself is this environment's: Slipstream, its needs and those of the tests.
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    (packages / "zz_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    files = ["tests/environments/test_contract.py", "tests/environments/test_page.py"]
    command = [str(python), "-m", "pytest", *files, "-k", name.removesuffix("_ai")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert "passed" in ran.stdout, ran.stdout
    assert "skipped" not in ran.stdout, ran.stdout
