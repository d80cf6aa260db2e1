"""`from slipstream import ...`: the names are there, typed, and cost only what they need."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import slipstream
from slipstream.deploy.run.process_keeper import RunFailed
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import ConfigError, fingerprint
from slipstream.rollout_worker.task.task import Task
from slipstream.script import train


def test_each_name_is_the_thing_itself() -> None:
    assert slipstream.Task is Task
    assert slipstream.QueueClient is QueueClient
    assert slipstream.ConfigError is ConfigError
    assert slipstream.RunFailed is RunFailed
    assert slipstream.train is train
    assert dir(slipstream) == sorted(slipstream.__all__)


@pytest.mark.parametrize("first", ["import slipstream.script", "from slipstream import *", "pass"])
def test_train_is_a_function_whatever_was_imported_before(first: str) -> None:
    in_a_fresh_interpreter(f"{first}\nimport slipstream\nassert callable(slipstream.train), slipstream.train")


def test_the_version_is_a_text() -> None:
    assert re.match(r"\d+\.\d+|0\+unknown", slipstream.__version__)


def test_a_checkout_that_is_not_installed_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.protocol.config.fingerprint.DISTRIBUTION", "no-such-distribution")
    assert fingerprint.release() == "0+unknown"


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(
        AttributeError, match=r"'slipstream' has no attribute 'Trainer'; it has: ConfigError, Endpoint, Mal"
    ):
        _ = slipstream.Trainer


# A trainer has torch.
OF_TRAINERS = {"Run", "Servers", "TokenBatch", "join", "servers"}


@pytest.mark.parametrize("name", sorted({*slipstream.__all__} - OF_TRAINERS))
def test_no_name_loads_torch(name: str) -> None:
    in_a_fresh_interpreter(f"import sys\nfrom slipstream import {name}\nassert 'torch' not in sys.modules")


def test_the_package_itself_loads_nothing() -> None:
    heavy = "('pydantic', 'aiohttp', 'transformers', 'torch')"
    in_a_fresh_interpreter(f"import slipstream, sys\nassert not [m for m in {heavy} if m in sys.modules]")


def in_a_fresh_interpreter(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
