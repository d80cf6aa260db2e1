"""The command line where nothing is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from slipstream.deploy import cli
from slipstream.deploy.commands import cluster
from slipstream.protocol import access
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config import RunConfig, load
from slipstream.protocol.config.sections.base import toml_value
from slipstream.protocol.config.sections.presets import PRESETS, SET_BY_PRESETS
from slipstream.protocol.config.text import find_field, settings
from slipstream.protocol.messages import Server
from slipstream.protocol.status import ServerStatus, Status
from tests.deploy.typed import output
from tests.kit import config
from tests.kit.ports import free_port
from tests.kit.queue import serving


def test_i7_a_worker_without_a_queue_says_at_once_whom_it_waits_for(run_file: Path) -> None:
    """And ends cleanly, waiting or not."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "slipstream.deploy.cli", "worker", str(run_file), "--queue", url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as worker:
        assert worker.stderr is not None
        try:
            assert f"for the queue at {url}" in worker.stderr.readline()
            assert f"waiting for the queue at {url}, for up to 300 s" in worker.stderr.readline()
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(20) == 128 + signal.SIGTERM
            assert "Traceback" not in worker.stderr.read()
        finally:
            worker.kill()


@pytest.fixture
def slipstream(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command here; its exit code and what it printed to stdout."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["slipstream", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "80")
    return run


def test_the_version_is_that_of_the_installation(slipstream: Callable[..., tuple[int, str]]) -> None:
    assert slipstream("--version") == (0, f"slipstream {version('slipstream-rl')}\n")


def test_a_shell_completes_the_commands() -> None:
    env = {**os.environ, "_SLIPSTREAM_COMPLETE": "complete_bash", "COMP_WORDS": "slipstream ro", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.deploy"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["rollouts"]


@pytest.mark.parametrize(
    ("command", "shows", "hides"),
    [
        ("queue", ["--queue.max_staleness 4", "--learner.groups_per_step 16"], ["--vllm.port"]),
        ("worker", ["--worker.episodes 256", "--rollout.group_size 8", "--task.path (to be set)"], ["--learner.steps"]),
        ("learner", ["--learner.steps 100", '--weight_sync.transport "auto"'], ["--worker.episodes"]),
        (
            "vllm",
            ["--vllm.max_num_seqs 64", '--model.dtype "float32"', "--lora.r 0", '--weight_sync.adapter_only "auto"'],
            ["--learner.steps"],
        ),
        ("up", ["--deploy.grace_s 20.0", "slipstream config prints all"], ["--queue.depth"]),
        ("status", ["--queue.port 8200"], ["--queue.depth"]),
        ("rollouts", ["--run.name"], ["--queue.depth"]),
        ("ledger", ["--queue.store"], ["--queue.depth"]),
        ("config", [], ["--queue.depth"]),
    ],
)
def test_the_help_of_a_command_names_the_settings_that_it_reads(
    slipstream: Callable[..., tuple[int, str]], command: str, shows: list[str], hides: list[str]
) -> None:
    code, text = slipstream(command, "--help")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    for shown in shows:
        assert shown in text
    for hidden in hides:
        assert hidden not in text


def test_what_a_help_lists_are_settings() -> None:
    names = {*settings(), *RunConfig.model_fields}
    commands = typer.main.get_command(cli.app).commands.values()  # type: ignore[attr-defined]
    listed = {name for command in commands for name in getattr(command, "reads", ())}
    assert listed <= names
    assert {*RunConfig.model_fields} <= {name.split(".")[0] for name in listed}


def test_without_a_run_file_config_prints_all_settings(slipstream: Callable[..., tuple[int, str]]) -> None:
    code, text = slipstream("config")
    assert code == 0
    printed = [f"{section}.{key}" for section, table in tomllib.loads(text).items() for key in table]
    assert text.count("# to be set: ") == 2
    without_value = {
        name
        for name in settings()
        if (field := find_field(*name.split("."))) and (field.is_required() or field.default is None)
    }
    of_preset = {f"learner.{name}" for name in SET_BY_PRESETS}
    assert {*settings()} - {*printed} == without_value | of_preset
    assert without_value >= {"model.path", "task.path", "queue.token"}
    assert all(f"# {name.removeprefix('learner.')} = " in text for name in of_preset)


def test_config_prints_one_section_with_what_the_command_line_sets(slipstream: Callable[..., tuple[int, str]]) -> None:
    code, text = slipstream("config", "--section", "task", "--task.path", "mine.py:task")
    assert code == 0
    (table,) = tomllib.loads(text).values()
    assert table["path"].endswith("mine.py:task")


@pytest.mark.parametrize("name", PRESETS)
def test_config_prints_what_a_preset_resolves_to(slipstream: Callable[..., tuple[int, str]], name: str) -> None:
    code, text = slipstream("config", "--section", "learner", "--learner.algorithm", name)
    assert code == 0
    assert tomllib.loads(text)["learner"]["algorithm"] == name
    lines = [line.split(" # ")[0].rstrip() for line in text.splitlines()]
    assert {f"# {key} = {toml_value(value)}" for key, value in PRESETS[name].items()} <= {*lines}


def test_config_warns_of_bounds_that_do_not_suit_the_objective(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream", "config", str(run_file), "--learner.objective", "gspo"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "slipstream: warning: learner.clip_low = 0.2 and learner.clip_high = 0.28 with" in capsys.readouterr().err


@pytest.mark.parametrize(("own", "printed"), [([], "bfloat16"), (["--model.dtype", "float32"], "float32")])
def test_config_prints_the_type_that_a_start_would_choose(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slipstream: Callable[..., tuple[int, str]],
    own: list[str],
    printed: str,
) -> None:
    monkeypatch.setattr("slipstream.protocol.config.machine.bfloat16_unit", lambda: "AMX")
    monkeypatch.setattr("slipstream.deploy.servers.probes.visible_gpus", list)
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}', encoding="utf-8")
    code, text = slipstream("config", str(run_file), "--model.path", str(tmp_path), *own)
    assert (code, tomllib.loads(text)["model"]["dtype"]) == (0, printed)


def test_config_prints_a_run_file_whose_files_are_elsewhere(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And warns of each."""
    (run_file.parent / "task.py").unlink()
    (run_file.parent / "model").unlink()
    monkeypatch.setattr(sys, "argv", ["slipstream", "config", str(run_file)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    out, err = capsys.readouterr()
    assert "[learner]" in out
    assert [line.split(" = ")[0] for line in err.splitlines()] == [
        "slipstream: warning: model.path",
        "slipstream: warning: task.path",
    ]


async def test_status_as_json_is_the_status_in_one_line(run_file: Path) -> None:
    async with serving(config(run={"name": "shown"})) as queue:
        code, said = await asyncio.to_thread(output, "status", str(run_file), "--json", "--queue", queue.url)
    (line,) = said.splitlines()
    assert msgspec.json.decode(line, type=Status).run == "shown"
    assert code == 0


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["status", "--watch"], ["servers", "list"]])
@pytest.mark.parametrize("name", ["another", "small"])
async def test_a_run_that_was_not_started_is_not_shown_as_the_one_that_has_its_port(
    tmp_path: Path, name: str, command: list[str]
) -> None:
    async with serving(config(run={"name": name})) as queue:
        own = run_file_of(tmp_path, queue.url)
        code, said = await asyncio.to_thread(output, *command, own)
        assert code == 2
        assert ("another run of that name" if name == "small" else "serves run another, not small") in said
        if name == "small" and "--watch" not in command:
            await asyncio.to_thread((tmp_path / "runs" / name).mkdir, parents=True)
            assert (await asyncio.to_thread(output, *command, own))[0] == 0


def run_file_of(folder: Path, queue_url: str) -> str:
    (folder / "run.toml").write_text(
        f'run.name = "small"\nrun.dir = "{folder}/runs"\nmodel.path = "org/model"\ntask.path = "task.py:task"\n'
        f"queue.port = {queue_url.rpartition(':')[2]}\n",
        encoding="utf-8",
    )
    return str(folder / "run.toml")


async def test_the_servers_as_json_are_one_object_a_line(
    slipstream: Callable[..., tuple[int, str]],
) -> None:
    async with serving(config()) as queue, QueueClient(queue.url) as client:
        for name in ("a", "b"):
            await client.put_server(Server(name, f"http://{name}:1"))
        code, text = await asyncio.to_thread(slipstream, "servers", "list", "--queue", queue.url, "--json")
    assert code == 0
    found = [msgspec.json.decode(line, type=ServerStatus) for line in text.splitlines()]
    assert {("a", "http://a:1", "joining"), ("b", "http://b:1", "joining")} <= {(s.name, s.url, s.state) for s in found}


def test_config_as_json_has_the_settings_that_it_prints(slipstream: Callable[..., tuple[int, str]]) -> None:
    printed = tomllib.loads(slipstream("config")[1])
    code, text = slipstream("config", "--json")
    assert (code, json.loads(text)) == (0, printed)


INTERRUPTED = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from slipstream.deploy.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("typer", "config"),
        ("pydantic", "config"),
        ("aiohttp", "config"),
        ("slipstream.rollout_queue.service", "queue"),
        ("slipstream.rollout_worker.worker", "worker"),
        ("transformers", "worker"),
        ("slipstream.learner.run", "learner"),
        ("torch", "learner"),
    ],
)
def test_ctrl_c_while_packages_are_imported_prints_no_traceback(run_file: Path, module: str, command: str) -> None:
    arguments = [sys.executable, "-c", f"MODULE = {module!r}{INTERRUPTED}", command, str(run_file)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr == ""


def test_up_supervises_the_run_of_its_arguments(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, bool]] = []
    monkeypatch.setattr(cluster, "supervise", lambda config, resume: seen.append((config, resume)))
    monkeypatch.setattr(sys, "argv", ["slipstream", "up", str(run_file), "--learner.steps", "7", "--resume"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    ((config, resume),) = seen
    assert (config, resume) == (load(run_file, ["--learner.steps", "7"]), True)


def test_each_command_is_one_line_of_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["slipstream", "--help"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    lines = capsys.readouterr().out.partition("Commands")[2].splitlines()
    names = [line.split()[1] for line in lines if line.startswith("│")]
    assert names == [
        "init",
        "doctor",
        "config",
        "worker",
        "learner",
        "vllm",
        "serve",
        "up",
        "plan",
        "sft",
        "demos",
        "status",
        "rollouts",
        "report",
        "summary",
        "ledger",
        "replay",
        "token",
        "queue",
        "render",
        "servers",
    ]


def test_i8_the_learner_s_callbacks_see_no_token_and_the_learner_still_has_it(
    slipstream: Callable[..., tuple[int, str]], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str | None, str | None]] = []

    def run(config: RunConfig, queue: str | None, resume: bool, take_over: bool, demonstrations: list[Any]) -> None:
        seen.append((os.environ.get(access.TOKEN_VARIABLE), config.token_for("learner")))

    monkeypatch.setenv(access.TOKEN_VARIABLE, "a-secret-of-the-run")
    monkeypatch.setattr(access, "_hidden", None)
    monkeypatch.setattr("slipstream.learner.run.run", run)
    assert slipstream("learner", run_file)[0] == 0
    assert seen == [(None, access.derive_token("a-secret-of-the-run", "learner"))]
