"""For all tests: what belongs to the ten minutes, and what only `--all` runs; the order; examples of properties, which
are bounded in number, never in time, so that a busy machine fails none; and signals as a terminal's foreground has
them, even if the tests were started by nohup or in the background, whose children ignore SIGHUP and SIGINT."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.kit.chosen import chosen_families, commit, family_of
from tests.kit.copies import start_original
from tests.kit.parallel import ParallelRun

FAMILIES = 5

if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The files that take longest, longest first: with `--copies` a long file that began last would run alone. One that is
# not here is only later than it could be.
LONG_FILES = (
    "e2e/test_up.py",
    "e2e/test_run.py",
    "learner/test_loop.py",
    "learner/model/test_adapter.py",
    "learner/training/test_optimiser.py",
    "deploy/test_launch.py",
    "rollout_queue/page/test_live.py",
    "rollout_queue/page/test_panels.py",
    "rollout_queue/page/test_rollout_viewer.py",
    "slipstream/test_trl.py",
    "deploy/servers/test_light_core.py",
    "learner/test_resume.py",
    "rollout_worker/tools/test_mcp.py",
    "learner/checkpoints/test_checkpoint_kills.py",
    "weight_sync/test_publisher.py",
    "learner/ranks/test_rank_processes.py",
    "rollout_queue/test_service.py",
    "examples/test_every_example.py",
    "deploy/test_cli.py",
    "learner/ranks/test_rank_mixtures.py",
    "learner/ranks/test_rank_checkpoints.py",
    "learner/ranks/test_ranks.py",
    "rollout_worker/agent/test_episodes.py",
    "weight_sync/vllm/test_vllm_middleware.py",
    "rollout_worker/user_code/test_isolation.py",
    "slipstream/test_script.py",
    "rollout_queue/api/test_connection.py",
    "deploy/test_bad_input.py",
    "deploy/run/test_programs.py",
    "deploy/test_supervisor.py",
    "deploy/test_supervisor_restarts.py",
    "deploy/test_supervisor_stops.py",
    "rollout_worker/test_process.py",
    "rollout_worker/test_evaluation_processes.py",
    "weight_sync/transports/test_transport_contract.py",
    "weight_sync/transports/test_http_bad_sources.py",
)

TESTS = Path(__file__).parent

# Files with real vLLM their own servers. All others in that folder share one, and so one copy of this process.
OWN_SERVERS = (
    "e2e/test_up.py",
    "e2e/test_adapters.py",
    "e2e/test_engine.py",
    "e2e/test_http.py",
    "e2e/test_parallel_servers.py",
)


def group_of(item: pytest.Item) -> str:
    """Return what one copy runs from its first test to its last: a file, or the files that share a server."""
    file = item.path.as_posix()
    return "the shared server" if is_whole_run(item) and not file.endswith(OWN_SERVERS) else file


def is_whole_run(item: pytest.Item) -> bool:
    """Whether a test runs real vLLM servers, each of which is several processes."""
    return "/e2e/" in item.path.as_posix()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    copies = session.config.getoption("copies")
    if copies < 2 or session.config.option.collectonly or session.testsfailed:
        return None
    start_original()  # one for all of them
    ParallelRun(session, copies, group_of, is_whole_run).run()
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--copies", type=int, default=1, help="run the tests of so many files side by side")
    parser.addoption(
        "--all", action="store_true", help="run what is wider than ten minutes allow, too: every family, more examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("short", deadline=None, max_examples=50)
    settings.register_profile("all", deadline=None, max_examples=300)
    settings.load_profile("all" if config.getoption("all") else "short")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort whole runs and long files to the front, the order within a file stays; leave out what is for `--all`."""
    first = {str(TESTS / name): place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: (not is_whole_run(item), first.get(str(item.path), len(first))))
    if config.getoption("all"):
        return
    wide = {item for item in items if item.get_closest_marker("wide")}
    if wrong := [item.nodeid for item in wide if names_an_invariant(item)]:
        raise pytest.UsageError(f"tests of an invariant are not left to --all: {wrong}; take the mark `wide` away")
    left = wide | _of_other_families(items)
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    config.stash[LEFT] = len(left)


LEFT = pytest.StashKey[int]()


def names_an_invariant(item: pytest.Item) -> bool:
    """Such a test is never left out."""
    return re.search(r"_i[1-9]_", item.name) is not None


def _of_other_families(items: list[pytest.Item]) -> set[pytest.Item]:
    """The items of a table over model families whose family is not among those of this commit."""
    tables: dict[tuple[Path, str], dict[pytest.Item, str]] = {}
    for item in items:
        marker = item.get_closest_marker("families")
        if marker is None or names_an_invariant(item):
            continue
        parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
        for name in parameters.keys() & set(marker.args):
            tables.setdefault((item.path, name), {})[item] = family_of(parameters[name])
    left = set()
    for table in tables.values():
        chosen = chosen_families(set(table.values()), FAMILIES)
        left |= {item for item, family in table.items() if family not in chosen}
    return left


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was not run."""
    if left := config.stash.get(LEFT, 0):
        terminalreporter.write_line(
            f"{left} tests are left to --all: those marked wide, and families of models beyond the {FAMILIES} of each "
            f"table that commit {commit()[:10]} chooses; properties had fewer examples"
        )
