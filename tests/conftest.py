"""For all tests: examples of properties are bounded in number, never in time, so that a busy machine fails none; and
signals are as a terminal's foreground has them, even if the tests were started by nohup or in the background, whose
children ignore SIGHUP and SIGINT."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The files that take longest, longest first. With xdist a file is a piece of work: a long one that came last would run
# alone. One that is not here is only later than it could be.
LONG_FILES = (
    "e2e/test_run.py",
    "learner/test_rank_checkpoints.py",
    "deploy/test_supervisor.py",
    "rollout_worker/test_isolation.py",
    "learner/test_rank_memory.py",
    "deploy/test_launch.py",
    "learner/test_adapter.py",
    "rollout_queue/test_kill.py",
    "learner/test_learner_loop.py",
    "learner/test_checkpoint_kills.py",
    "learner/test_hub_server.py",
    "deploy/test_light_core.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order within a file stays."""
    first = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: first.get("/".join(item.path.parts[-2:]), len(first)))
