"""`slipstream doctor`: what is there is told, and what is broken with its remedy."""

from __future__ import annotations

import importlib
import json
import os
import socket
from pathlib import Path

import psutil
import pytest

from slipstream.deploy.commands import setup
from slipstream.protocol.config import load
from slipstream.rollout_queue import store as stores
from slipstream.rollout_queue.ledger.records import RunState
from slipstream.rollout_queue.store.changes import Changes
from tests.deploy.conftest import save_checkpoint
from tests.kit.ports import free_port
from tests.kit.postgres import cluster


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(
        setup.model_facts, "facts", lambda config: [("model", config.model.path)]
    )  # it has its own tests


def test_what_is_installed_here_is_sound(capsys: pytest.CaptureFixture[str]) -> None:
    code = setup.examine(None)
    out = capsys.readouterr().out
    assert code == 0, out
    facts = {line.split("  ")[0].strip() for line in out.splitlines()}
    assert {"slipstream", "python", "torch", "transformers", "accelerate", "CPU cores", "memory", "GPUs"} <= facts


def test_as_json_it_is_one_line_with_the_same_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup.examine(None, as_json=True) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert {"slipstream", "python", "GPUs"} <= found["facts"].keys()
    assert found["broken"] == []
    monkeypatch.setattr(setup, "requires", lambda name: ["no-such-package>=2"])
    assert setup.examine(None, as_json=True) == 1
    (fault,) = json.loads(capsys.readouterr().out)["broken"]
    assert "no-such-package is not installed" in fault


def test_a_torchvision_that_fits_another_torch_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torchvision.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert setup.examine(None) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("broken: ")]
    assert "operator torchvision::nms does not exist" in line
    assert "pip uninstall torchvision torchaudio torchcodec" in line


def test_a_version_that_is_too_old_and_a_package_that_is_missing_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["rich>=1000", "no-such-package>=2", 'not-this-platform; sys_platform == "other"', 'x; extra == "test"']
    monkeypatch.setattr(setup, "requires", lambda name: needed)
    assert setup.examine(None) == 1
    faults = [line for line in capsys.readouterr().out.splitlines() if line.startswith("broken: ")]
    assert [fault.split(", and ")[1] for fault in faults] == [
        "rich>=1000 is needed; pip install 'rich>=1000'",
        "no-such-package>=2 is needed; pip install 'no-such-package>=2'",
    ]


def test_a_taken_port_is_told_with_its_holder(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = free_port()
        setup.examine(load(run_file, ["--queue.port", str(port), "--vllm.port", str(free)]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["vllm.port", str(free), "free"] in lines
    (told,) = [line for line in lines if line[:2] == ["queue.port", str(port)]]
    assert told[2:6] == ["taken", "by", "process", f"{os.getpid()}:"]
    # As it is called: a runner of tests may give itself a title.
    assert psutil.Process().cmdline()[0].split()[0] in " ".join(told)


def test_the_model_is_judged_with_the_type_that_a_start_chooses(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slipstream.protocol.config.machine.bfloat16_unit", lambda: "AMX")
    monkeypatch.setattr(setup.model_facts, "facts", lambda config: [("model", config.model.dtype)])
    monkeypatch.setattr(setup, "on_cpu", lambda: True)
    folder = run_file.parent / "of bfloat16"
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "bfloat16"}', encoding="utf-8")
    setup.examine(load(run_file, ["--model.path", str(folder)]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model", "bfloat16"] in lines


def doctor(run_file: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, dict[str, str]]:
    """Returns the exit code, and what is told of the store, of checkpoints and of faults."""
    code = setup.examine(load(run_file, [*overrides]))
    lines = [line.partition(" ") for line in capsys.readouterr().out.splitlines()]
    return code, {name: said.strip() for name, _, said in lines if name in ("queue.store", "checkpoints", "broken:")}


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_store_of_a_run_is_told_with_its_layout_and_its_queue(
    run_file: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    chosen = ["--queue.store", cluster().new_database() if kind == "postgresql" else kind]
    config = load(run_file, chosen)
    place = f"{chosen[1]} (schema slipstream_small)" if kind == "postgresql" else str(config.run_dir / "queue.db")
    told = {"queue.store": f"{place}: can be used, holds nothing of run small yet"}
    told["checkpoints"] = f"none in {config.run_dir}"
    assert doctor(run_file, capsys, *chosen) == (0, told)
    assert not config.run_dir.exists()

    opened = stores.build(config)
    opened.acquire()
    opened.commit(Changes(run=RunState(version=7, step=5, session=1, id="run-1")))
    save_checkpoint(run_file, 4)
    layout = f"{place}: layout {stores.open_for_reading(config).look().newest_layout}, step 5, version 7; "
    queue = f"the queue at {config.queue.own_address}" if kind == "postgresql" else "a queue on this machine"
    told = {"queue.store": f"{layout}{queue} is active on it"}
    told["checkpoints"] = f"{config.run_dir}/checkpoints/step-000004"
    assert doctor(run_file, capsys, *chosen) == (0, told)
    opened.close()
    told["queue.store"] = f"{layout}no queue is active on it"
    assert doctor(run_file, capsys, *chosen) == (0, told)

    save_checkpoint(run_file, 8)
    code, found = doctor(run_file, capsys, *chosen)
    assert (code, "has lost what came after version 7" in found["broken:"]) == (1, True)


def test_a_store_that_cannot_be_used_is_broken_with_the_remedy(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = doctor(run_file, capsys, "--queue.store", "postgresql://127.0.0.1:1/runs")
    assert (code, found["queue.store"]) == (1, "postgresql, cannot be used")
    assert found["broken:"].endswith("start PostgreSQL, or mend queue.store")
    file = load(run_file).run_dir / "queue.db"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no database" * 1000)
    code, found = doctor(run_file, capsys)
    assert (code, found["queue.store"]) == (1, "sqlite, cannot be used")
    assert "file is not a database" in found["broken:"]


def test_a_store_in_memory_keeps_nothing(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(run_file, capsys, "--queue.store", ":memory:")
    assert (code, found["queue.store"]) == (0, "memory: keeps nothing when the queue ends")
