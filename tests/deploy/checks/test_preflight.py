"""What `slipstream up` finds wrong before it starts anything; the parts of the check have tests of their own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from slipstream.deploy.checks import learning_rates, preflight
from slipstream.deploy.run.run_directory import resolved
from slipstream.deploy.servers.model_shape import ModelShape
from slipstream.deploy.servers.probes import check_port, looks_like
from slipstream.protocol import checkpoints
from slipstream.protocol.config import ConfigError, load
from tests.deploy.conftest import TASK
from tests.deploy.stage import ANSWERING, until
from tests.kit.fake_vllm.tokenizer import build_tokenizer, save_model_folder
from tests.kit.ports import free_port


def test_prompts_of_messages_need_a_chat_template(run_file: Path, tmp_path: Path) -> None:
    """Without tools nothing else asks for one, and every row would fail."""
    folder = save_model_folder(tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    task = run_file.parent / "task.py"
    task.write_text(TASK.replace("tools=[multiply], ", ""), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        preflight.check_run(load(run_file, ["--model.path", str(folder)]), resume=False)
    assert f"model.path = {folder}: its tokenizer has no chat template, and the prompts of {task}" in str(error.value)
    assert "are messages: save one" in str(error.value)
    task.write_text(task.read_text().replace('[{"role": "user", "content": "Multiply 2 by 3."}]', '"text"'))
    preflight.check_run(load(run_file, ["--model.path", str(folder)]), resume=False)


def test_i9_a_template_file_stands_in_for_the_tokenizers_own(run_file: Path, tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path / "plain")
    template = (folder / "chat_template.jinja").rename(tmp_path / "file.jinja")
    preflight.check_run(load(run_file, ["--model.path", str(folder), "--chat.template", str(template)]), resume=False)


def test_a_first_prompt_that_the_template_refuses(run_file: Path, tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path / "strict")
    build_tokenizer("{{ raise_exception('no user, please') }}").save_pretrained(folder)
    (run_file.parent / "task.py").write_text(TASK.replace("tools=[multiply], ", ""), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^task\.path = .*the first prompt cannot be shown to the model: .*no user"):
        preflight.check_run(load(run_file, ["--model.path", str(folder)]), resume=False)


def test_a_cpu_s_servers_are_judged_with_the_type_that_they_will_have(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model_folder(tmp_path / "plain")
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**text, "dtype": "bfloat16"}), encoding="utf-8")
    judged = list[str]()
    monkeypatch.setattr(preflight.cpu_build, "check_served", lambda config, facts: judged.append(config.model.dtype))
    for unit in ("AMX", None):
        monkeypatch.setattr("slipstream.protocol.config.machine.bfloat16_unit", lambda unit=unit: unit)
        monkeypatch.setattr(preflight.devices, "bfloat16_unit", lambda unit=unit: unit)
        config = load(run_file, ["--model.path", str(folder)])
        preflight.check_run(config, resume=False)
        # The supervisor hands the check a resolved file, in which the type stays open.
        handed = run_file.parent / "handed.toml"
        handed.write_text(resolved(config, [("model", "dtype")]), encoding="utf-8")
        preflight.check_run(load(handed), resume=False)
    assert judged == ["bfloat16", "bfloat16", "float32", "float32"]


def test_findings_about_the_task_are_returned_and_not_printed(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = ["--rollout.max_turn_tokens", "1020"]
    checked = preflight.check_run(load(run_file, ["--vllm.max_model_len", "1024", *turn]), resume=False)
    assert any("leave less than rollout.max_turn_tokens = 1020" in str(finding) for finding in checked.findings)
    assert "leave less" not in "".join(capsys.readouterr())


def test_an_unusual_learning_rate_is_a_finding(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_rates, "parameters_of", lambda model: 135e6)
    checked = preflight.check_run(load(run_file, ["--learner.learning_rate", "0.5"]), resume=False)
    assert "learner.learning_rate = 0.5 is far" in " ".join(map(str, checked.findings))


def test_a_task_file_that_is_not_there(run_file: Path) -> None:
    """This holds even if the run file was loaded without looking for it."""
    config = load(run_file)
    gone = f"{run_file.parent}/gone.py:task"
    config = config.model_copy(update={"task": config.task.model_copy(update={"path": gone})})
    with pytest.raises(ConfigError, match=f"task.path = {gone}: there is no Python file"):
        preflight.check_run(config, resume=False)


def test_a_taken_port_is_told_with_its_holder(run_file: Path, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "answering.py").write_text(ANSWERING, encoding="utf-8")
    holder = subprocess.Popen([sys.executable, "-I", "-S", str(tmp_path / "answering.py"), str(port), "queue", "run"])
    try:
        until(lambda: any(c.laddr.port == port for c in psutil.Process(holder.pid).net_connections()))
        with pytest.raises(ConfigError) as error:
            check_port("127.0.0.1", port, "vllm.port", tmp_path / "run.toml")
    finally:
        holder.kill()
        holder.wait()
    told = str(error.value)
    assert f"vllm.port = {port}: another process listens on 127.0.0.1:{port} (process {holder.pid}: " in told
    assert f"{sys.executable} -I -S " in told
    assert told.endswith("stop it or choose another port")


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_this_machine_s_is_told_by_its_setting(host: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"worker.agent_host = {host}: cannot listen there: .*; name an address of this machine$"
    ):
        check_port(host, 0, "worker.agent_port", tmp_path / "run.toml")


def test_where_the_weights_leave_from_is_looked_at_before_anything_starts(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "a secret that is long enough")

    def told(*settings: str) -> str:
        with pytest.raises(ConfigError) as error:
            preflight.check_run(load(run_file, [*settings, "--queue.port", str(free_port()), *free]), resume=False)
        return str(error.value)

    free = ["--vllm.port", str(free_port())]
    assert told("--weight_sync.host", "192.0.2.1") == (
        "weight_sync.host = 192.0.2.1: cannot listen there: Cannot assign requested address; name an address of this "
        "machine"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        http = ["--weight_sync.transport", "http", "--weight_sync.http_port", str(port)]
        assert f"weight_sync.http_port = {port}: another process listens" in told(*http)


def test_what_needs_no_import_is_found_before_the_task_is_imported(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task may take minutes to import."""
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "a secret that is long enough")
    trace = tmp_path / "imported"
    (run_file.parent / "task.py").write_text(f"open({str(trace)!r}, 'w')\n{TASK}", encoding="utf-8")
    wrong: list[tuple[str, list[str], bool]] = [
        ("holds nothing to continue from", [], True),
        ("cannot be written", ["--run.dir", "/proc/runs"], False),
        ("cannot listen there", ["--weight_sync.host", "192.0.2.1"], False),
        ("a checkpoint takes at least", ["--model.path", str(large_model(tmp_path))], False),
    ]
    for told, settings, resume in wrong:
        with pytest.raises(ConfigError, match=told):
            preflight.check_run(load(run_file, settings), resume)
        assert not trace.exists(), told


SHAPE = ModelShape(layers=10**9, hidden=1024, inner=4096, heads=16, key_heads=8, head=64, vocabulary=2**16)


def large_model(tmp_path: Path) -> Path:
    """The folder of a model whose checkpoints no disk holds."""
    folder = save_model_folder(tmp_path / "large")
    shape = {
        "model_type": "qwen3",
        "num_hidden_layers": SHAPE.layers,
        "hidden_size": SHAPE.hidden,
        "intermediate_size": SHAPE.inner,
        "num_attention_heads": SHAPE.heads,
        "vocab_size": SHAPE.vocabulary,
    }
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("free", "kept", "told"),
    [
        (0.9, 0, "run.dir = {dir}: a checkpoint takes at least 1.0 GiB, and its disk has 0.9 GiB left: make room, or"),
        (
            2.9,
            0,
            "with the one that is being written, 3 more checkpoints take at least 3.0 GiB, and the disk of run.dir",
        ),
        (3.1, 0, None),
        (1.1, 2, None),
        (0.9, 2, "a checkpoint takes at least 1.0 GiB"),
        (0.03, 0, "its disk has 31 MiB left"),
    ],
)
def test_space_for_checkpoints(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, free: float, kept: int, told: str | None
) -> None:
    gib = 1024**3
    monkeypatch.setattr(preflight, "model_shape", lambda _: SHAPE)
    monkeypatch.setattr(preflight, "checkpoint_bytes", lambda *_: gib)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=int(free * gib)))
    settings = load(run_file)
    for step in range(kept):
        folder = checkpoints.folder(settings.run_dir) / checkpoints.name_of(step)
        folder.mkdir(parents=True)
        (folder / checkpoints.STATE).touch()
    if free < 1:
        with pytest.raises(ConfigError) as error:
            preflight.check_space(settings)
        assert (told or "").format(dir=settings.run.dir) in str(error.value)
        return
    findings = [str(finding) for finding in preflight.check_space(settings)]
    assert len(findings) == (told is not None)
    assert all(told in finding for finding in findings if told is not None)


AGENT = """
from slipstream.rollout_worker.task.task import Task

async def agent(endpoint, prompt):
    return 1.0

task = Task(dataset=[{"prompt": "1 + 1?"}], rewards=[lambda completions, **_: [1.0 for _ in completions]], agent=agent)
"""


def test_the_agents_endpoint_must_be_free_before_anything_starts(run_file: Path) -> None:
    (run_file.parent / "task.py").write_text(AGENT, encoding="utf-8")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"worker.agent_port = {port}: another process listens"):
            preflight.check_run(load(run_file, ["--worker.agent_port", str(port)]), resume=False)


def test_a_holder_that_cannot_be_seen_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is another user's."""

    def denied(kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", denied)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"listens on 127\.0\.0\.1:{port}; stop it or choose another port"):
            check_port("127.0.0.1", port, "queue.port", tmp_path / "run.toml")


OURS = Path("/runs/mine/run.toml")


@pytest.mark.parametrize(
    ("command", "likeness"),
    [
        (
            ["python", "-P", "-m", "slipstream.deploy.cli", "queue", str(OURS)],
            "the queue of an earlier start of this run",
        ),
        (["python", "-m", "slipstream.deploy.cli", "queue", "/runs/other/run.toml"], "the queue of another run"),
        (["python", "/venv/bin/slipstream", "queue", "run.toml"], "the queue of another run"),
        (["python", "-m", "vllm.entrypoints.openai.api_server", "--port", "1"], "a vLLM server of an earlier start"),
        (["python", "/venv/bin/vllm", "serve"], "a vLLM server of an earlier start"),
        (["nginx"], None),
        ([], None),
    ],
)
def test_an_old_queue_or_server_is_known_by_its_command(command: list[str], likeness: str | None) -> None:
    assert looks_like(command, OURS) == likeness


def test_trackers_the_hub_and_callbacks_are_looked_at_before_anything_starts(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.learner.checkpoints import uploads
    from slipstream.learner.report import trackers

    monkeypatch.setattr(trackers.Tracker, "is_installed", lambda tracker: False)
    with pytest.raises(
        ConfigError, match=r"wandb is not installed; install it with: pip install 'slipstream-rl\[wandb\]'"
    ):
        preflight.check_run(load(run_file, ["--tracking.report_to", "wandb"]), resume=False)
    monkeypatch.setattr(uploads, "get_token", lambda: None)
    with pytest.raises(ConfigError, match="there is no token for the hub; set HF_TOKEN"):
        preflight.check_run(load(run_file, ["--hub.push_to_hub", "true"]), resume=False)
    (tmp_path / "mine.py").write_text("mine = 3", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine.py:mine: it is a int; give an object"):
        preflight.check_run(load(run_file, ["--learner.callbacks", f'["{tmp_path}/mine.py:mine"]']), resume=False)
