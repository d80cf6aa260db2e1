"""A run file loads as its author meant it, or fails with one message that names the value and the remedy."""

from __future__ import annotations

import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import annotated_types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.protocol.config import ConfigError, Need, RunConfig, load, parse_overrides, resolve, to_toml
from slipstream.protocol.config.sections.processes import STORES

MINIMAL = '[model]\npath = "./model"\n[task]\npath = "task.py:task"\n'
FILES: tuple[Need, ...] = ("task", "model")
JARGON = ("pydantic", "Traceback", "validation error", "type=", "Input should", "<class", "Error(")


@pytest.fixture(autouse=True)
def no_token_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run file, a model and a task file."""
    make_folder(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for tests that only read, many times."""
    return make_folder(tmp_path_factory.mktemp("run"))


def make_folder(folder: Path) -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "task.py").write_text("task = None\n")
    (folder / "run.toml").write_text(MINIMAL)
    return folder


@pytest.mark.parametrize(("positions", "named"), [(8192, "more than the model's 8192"), (32768, "token_budget = 8192")])
def test_a_context_above_the_model_s_is_blamed_before_the_token_budget(
    folder: Path, positions: int, named: str
) -> None:
    (folder / "config.json").write_text(f'{{"max_position_embeddings": {positions}}}', encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{named}.*vllm\.max_model_len|vllm\.max_model_len = 16000 .*{named}"):
        load_text(folder, 'model.path = "."\ntask.path = "task.py:task"\nvllm.max_model_len = 16000')


def load_text(folder: Path, text: str, overrides: list[str] | None = None) -> RunConfig:
    (folder / "run.toml").write_text(text)
    return load(folder / "run.toml", overrides)


def fault(path: Path, overrides: list[str] | None = None) -> str:
    """The message that loading the run file fails with, for one who needs its files."""
    with pytest.raises(ConfigError) as error:
        load(path, overrides, FILES)
    message = str(error.value)
    assert not [word for word in JARGON if word in message], message
    assert error.value.__suppress_context__ or error.value.__context__ is None
    return message


def fault_of(folder: Path, text: str, overrides: list[str] | None = None) -> str:
    (folder / "run.toml").write_text(text)
    return fault(folder / "run.toml", overrides)


def test_a_minimal_run_file_loads_with_defaults(folder: Path) -> None:
    config = load(folder / "run.toml")
    assert config.model.path == str(folder / "model")
    assert (config.task.file, config.task.object_name) == (folder / "task.py", "task")
    assert (config.queue.max_staleness, config.queue.depth, config.run_dir) == (4, "auto", Path("runs/run"))
    assert config.server_names == {"vllm-0": "http://127.0.0.1:8100"}
    assert config.token is None


def test_a_wrong_override_names_the_value_the_bound_and_the_meaning(folder: Path) -> None:
    message = fault(folder / "run.toml", ["--queue.max_staleness", "-3"])
    assert message == (
        "command line: queue.max_staleness = -3: must be at least 0 "
        "(K: no token older than K versions contributes to a gradient)"
    )


@pytest.mark.parametrize(
    ("line", "given", "from_there"),
    [
        ("", "--learner.algorithm sapo --learner.clip_high 0.3", True),
        ("learner.clip_high = 0.3", "--learner.algorithm sapo", False),
        ("", "--learner.reference_mixup 0.5", True),
        ("learner.reference_mixup = 0.5", "--learner.steps 5", False),
        ("learner.kl_coef = 0.1", "--learner.reference_mixup 0.5", True),
        ("", "--learner.correction_low 1 --learner.correction_high 1 --learner.correction decoupled", True),
        ("", "--rollout.generation_kwargs {min_tokens=100000}", True),
        ("rollout.top_p = 0.9", "--rollout.group_size 4", False),
        ("worker.episodes = 4\nworker.open_episodes = 4", "--rollout.group_size 6", True),
        ("rollout.group_size = 65\nworker.episodes = 8", "--worker.open_episodes 64", True),
        ("rollout.group_size = 1000\nworker.open_episodes = 900", "--worker.count 2", False),
    ],
)
def test_what_does_not_fit_together_is_said_of_where_it_was_given(
    folder: Path, line: str, given: str, from_there: bool
) -> None:
    message = fault_of(folder, f"{line}\n{MINIMAL}", given.split())
    assert message.startswith("command line: " if from_there else f"{folder / 'run.toml'}: "), message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("queue.max_staleness = -3", "queue.max_staleness = -3: must be at least 0"),
        ("queue.port = 70000", "queue.port = 70000: must be at most 65535"),
        ('queue.port = "8200"', 'queue.port = "8200": must be a whole number'),
        ("queue.port = true", "queue.port = true: must be a whole number"),
        ("queue.port = 80.5", "queue.port = 80.5: must be a whole number"),
        ("queue.port = 2026-01-01", "queue.port = 2026-01-01: must be a whole number"),
        ("weight_sync.probe_tolerance = 0", "probe_tolerance = 0: must be above 0.0, or 'auto'"),
        ("queue.depth = 0", "queue.depth = 0: must be above 0.0, or 'auto'"),
        ('queue.depth = "deep"', "queue.depth = \"deep\": must be a number such as 0.5, or 'auto'"),
        ('queue.store = "redis"', "queue.store = \"redis\": must be 'sqlite', ':memory:' or a URL postgresql://"),
        ('queue.store = "mysql://u:hunter2@h/d?password=hunter2"', 'store = "mysql://u:***@h/d?password=***": must be'),
        ("rollout.group_size = 1", "rollout.group_size = 1: must be at least 2"),
        ("rollout.temperature = 0", "rollout.temperature = 0: must be at least 0.01"),
        ('rollout.temperature = "hot"', 'rollout.temperature = "hot": must be a number'),
        ("learner.learning_rate = nan", "learner.learning_rate = nan: must be finite"),
        ("learner.weight_decay = inf", "learner.weight_decay = inf: must be finite"),
        ("learner.clip_low = 1.0", "learner.clip_low = 1.0: must be below 1"),
        ("learner.delta = 0", "learner.delta = 0: must be above 1.0, or 'none'"),
        ("learner.delta = 1.2", "learner.delta = 1.2: must be above 1 + learner.clip_high = 1.28, or bad tokens would"),
        ("learner.clip_high = 3.5", "learner.delta = 4.0: must be above 1 + learner.clip_high = 4.5"),
        ("learner.dppo_threshold = true", "learner.dppo_threshold = true: must be a number such as 0.5, or 'auto'"),
        ("learner.dppo_threshold = 1.0", "learner.dppo_threshold = 1.0: would mask no token, as probabilities differ"),
        ("learner.betas = [0.9, 1.0]", "learner.betas[1] = 1.0: must be below 1"),
        ("learner.betas = [0.9]", "[0.9]: has too few entries"),
        ("learner.betas = [0.9, 0.9, 0.9]", "learner.betas = [0.9, 0.9, 0.9]: has too many entries"),
        ("learner.betas = 0.9", "learner.betas = 0.9: must be a list"),
        ('worker.keep_messages = "yes"', 'worker.keep_messages = "yes": must be true or false'),
        ('vllm.servers = ["localhost:8000"]', "'localhost:8000' is not a URL; write it as http://host:port"),
        ('vllm.args = ["--swap-space", 4]', "vllm.args[1] = 4: must be text"),
        ("run.dir = 3", "run.dir = 3: must be a path"),
        ('run.name = "my run"', 'run.name = "my run": does not have the right form'),
        ('run.name = ".."', 'run.name = "..": does not have the right form'),
    ],
)
def test_a_wrong_value_is_told_with_its_name_and_what_it_must_be(folder: Path, line: str, says: str) -> None:
    message = fault_of(folder, f"{line}\n{MINIMAL}")
    assert message.startswith(str(folder / "run.toml"))
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MINIMAL + "[queue]\ncapacity = 3\n", "queue.capacity is not a setting; did you mean queue.capacity_bytes?"),
        (MINIMAL + "[queue]\nzebra = 3\n", "queue.zebra is not a setting; [queue] has: host, port, url, token"),
        (MINIMAL + "[rollout]\nmax_tokens_turn = 3\n", "did you mean rollout.max_turn_tokens?"),
        (MINIMAL + "[que]\nport = 3\n", "[que] is not a section; did you mean [queue]?"),
        (MINIMAL + "shuffle = false\n", "task.shuffle is not a setting; did you mean task.order?"),
        (MINIMAL + 'order = "learnabel"\n', 'task.order = "learnabel": must be'),
        (MINIMAL + "mix = { a = 0.5, b = 0.4 }\n", "the shares sum to 0.9: they must sum to 1"),
        (
            MINIMAL + "mix = { a = 1.5, b = -0.5 }\n",
            "the share of a is 1.5: must be 0, to leave the part out, or 0.001",
        ),
        (MINIMAL + "mix = { a = 0.9999, b = 0.0001 }\n", "the share of b is 0.0001"),
        (MINIMAL + "mix = { a = nan }\n", "task.mix"),
        (MINIMAL + 'mix_column = ""\n', "task.mix_column"),
        (MINIMAL + "[zebra]\nport = 3\n", "[zebra] is not a section; the sections are: run, model, task"),
        ("seed = 3\n" + MINIMAL, "[seed] is not a section"),
        ("queue = 3\n" + MINIMAL, "queue = 3: must be a table, written [queue]"),
        (MINIMAL + "[[queue]]\nport = 3\n", "must be a table, written [queue]"),
        ('[model]\npath = "./model"\n', "the section [task] is missing; it needs path = the task object"),
        ('[model]\n[task]\npath = "task.py:task"\n', "model.path is missing (a local model folder"),
        ("", "the section [model] is missing"),
        ("[model\n", "is not TOML: "),
        ("[run]\nname = sums\n", "Invalid value (at line 2, column 8), that of name: a text stands in quotes"),
        ("a = 1\na = 2\n", "is not TOML: "),
    ],
)
def test_a_wrong_shape_is_told_with_what_belongs_there(folder: Path, text: str, says: str) -> None:
    assert says in fault_of(folder, text)


def test_every_fault_is_told_at_once(folder: Path) -> None:
    message = fault_of(folder, "queue.port = 0\nlearner.steps = 0\n" + MINIMAL)
    assert [line.split(": ")[1] for line in message.splitlines()] == ["queue.port = 0", "learner.steps = 0"]


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("weight_sync.adapter_only", "yes", "weight_sync.adapter_only = \"yes\": must be true or false, or 'auto' ("),
        ("worker.open_episodes", "x", "worker.open_episodes = \"x\": must be a whole number, or 'auto' ("),
        ("worker.open_episodes", "0", "worker.open_episodes = 0: must be at least 1, or 'auto' ("),
    ],
)
def test_a_setting_that_takes_this_or_that_has_one_fault_which_names_both(
    folder: Path, setting: str, value: str, says: str
) -> None:
    (folder / "run.toml").write_text(MINIMAL)
    message = fault(folder / "run.toml", [f"--{setting}", value])
    assert message.startswith(f"command line: {says}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("url", "host", "own"),
    [
        ("auto", "127.0.0.1", "http://127.0.0.1:8200"),
        ("auto", "0.0.0.0", f"http://{socket.gethostname()}:8200"),
        ("http://198.51.100.1:8300,http://198.51.100.1:8200", "0.0.0.0", "http://198.51.100.1:8200"),
        ("http://198.51.100.1:8200,http://127.0.0.1:8200", "0.0.0.0", "http://127.0.0.1:8200"),
        ("http://198.51.100.1:8200,http://198.51.100.2:8200", "127.0.0.1", "http://127.0.0.1:8200"),
        ("http://198.51.100.1", "127.0.0.1", "http://127.0.0.1:8200"),
    ],
)
def test_one_of_several_queues_knows_its_own_url(folder: Path, url: str, host: str, own: str) -> None:
    config = load_text(folder, MINIMAL + f'[queue]\nurl = "{url}"\nhost = "{host}"\ntoken = "0123456789abcdef"\n')
    assert config.queue.own_address == own


@pytest.mark.parametrize(
    ("written", "shown", "password"),
    [
        ("sqlite", "sqlite", None),
        (":memory:", ":memory:", None),
        ("postgresql://db.example/runs", "postgresql://db.example/runs", None),
        ("postgres://me@db:5433/runs", "postgresql://me@db:5433/runs", None),
        ("postgresql://me:hunter2@a,b:1/runs?sslmode=require", "postgresql://me@a,b:1/runs?sslmode=require", "hunter2"),
        ("postgresql:///runs?host=/tmp&password=hunter2", "postgresql:///runs?host=/tmp", "hunter2"),
        ("postgresql://me:a%40b@c/d@db/runs", "postgresql://me@db/runs", "a@b@c/d"),
        ("postgresql://?service=runs", "postgresql://?service=runs", None),
    ],
)
def test_the_password_of_a_database_is_kept_apart_from_its_url(
    folder: Path, written: str, shown: str, password: str | None
) -> None:
    config = load_text(folder, MINIMAL + f'[queue]\nstore = "{written}"\n')
    assert (config.queue.store, config.queue.store_password) == (shown, password)
    assert config.queue.store_kind in STORES
    for text in (to_toml(config), repr(config), config.model_dump_json(), str(config.queue.model_copy())):
        assert password is None or password not in text
    assert load_text(folder, to_toml(config)).queue.store == shown


@pytest.mark.parametrize("setting", ["queue.host", "weight_sync.host", "vllm.host", "worker.agent_host"])
@pytest.mark.parametrize("host", ["http://10.0.0.5", "10.0.0.5:8300", "10.0.0.5 ", ""])
def test_a_host_is_an_address_alone(folder: Path, setting: str, host: str) -> None:
    (folder / "run.toml").write_text(MINIMAL)
    message = fault(folder / "run.toml", [f"--{setting}", host])
    assert f'{setting} = "{host}": must be an address or a host name alone, such as 10.0.0.5; a port has' in message


@pytest.mark.parametrize("host", ["localhost", "::1", "gpu-7.example", "10.0.0.5", "::2", "fe80::1%eth0"])
def test_hosts_of_every_kind_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "a secret that is long enough")
    assert load_text(folder, MINIMAL, ["--weight_sync.host", host]).weight_sync.host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_servers_cannot_dial_a_wildcard(folder: Path, host: str) -> None:
    (folder / "run.toml").write_text(MINIMAL)
    message = fault(folder / "run.toml", ["--weight_sync.host", host])
    assert f'weight_sync.host = "{host}": is an address to listen on, and servers cannot dial it; give the' in message


def test_servers_of_the_launcher_that_listen_everywhere_are_reached_at_loopback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "a secret that is long enough")
    assert load_text(folder, MINIMAL, ["--vllm.host", "0.0.0.0"]).vllm.urls == ["http://127.0.0.1:8100"]
    assert load_text(folder, MINIMAL, ["--vllm.host", "10.0.0.5"]).vllm.urls == ["http://10.0.0.5:8100"]


def test_the_url_of_a_queue_in_place_of_the_run_file_is_told_its_place(folder: Path) -> None:
    assert "the URL of a queue is given with --queue" in fault(Path("http://127.0.0.1:8200"))


def test_a_missing_run_file_and_an_unreadable_one_are_named(folder: Path) -> None:
    assert fault(folder / "nope.toml") == f"{folder}/nope.toml: there is no such run file; give the path of a TOML file"
    assert fault(folder / "model") == f"{folder}/model: is a folder; give the path of a TOML file"
    (folder / "model" / "run.toml").touch()
    assert fault(folder / "model").endswith(f"give the path of a TOML file, such as {folder}/model/run.toml")
    (folder / "latin.toml").write_bytes(b'[run]\nname = "caf\xe9"\n')
    assert "latin.toml: is not TOML: 'utf-8' codec" in fault(folder / "latin.toml")


@pytest.mark.parametrize("path", ["./nope", "../nope", "/nope/model", "a/b/nope", "model/nope"])
def test_a_missing_model_folder_is_told(folder: Path, path: str) -> None:
    message = fault_of(folder, MINIMAL.replace("./model", path))
    assert message.startswith("model.path = ")
    assert path.removeprefix("./") in message
    assert "there is no such folder; give an existing model folder or a hub name" in message


def test_a_missing_model_folder_is_told_when_the_run_file_is_named_without_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "run.toml").write_text(MINIMAL.replace("./model", "./nope"))
    assert "there is no such folder" in fault(Path("run.toml"))


@pytest.mark.parametrize("path", ["./model/policy.gguf", "./model"], ids=["a file", "a folder that holds one"])
def test_a_gguf_file_is_told(folder: Path, path: str) -> None:
    (folder / "model" / "config.json").unlink()
    (folder / "model" / "policy.gguf").touch()
    message = fault_of(folder, MINIMAL.replace("./model", path))
    assert "policy.gguf is a GGUF file, which cannot be trained; give a folder that save_pretrained wrote" in message


def test_a_model_folder_without_a_config_is_told(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()
    assert fault(folder / "run.toml") == (
        f"model.path = {folder}/model: the folder holds no config.json; save a model there with save_pretrained"
    )


@pytest.mark.parametrize(
    ("needs", "missing"),
    [
        ((), []),
        (("task",), ["task.path"]),
        (("tokenizer",), ["model.path"]),
        (("model",), ["model.path"]),
        (("tokenizer", "model"), ["model.path"]),
        (("task", "tokenizer"), ["model.path", "task.path"]),
    ],
)
def test_only_the_files_that_a_process_needs_are_checked(
    folder: Path, needs: tuple[Need, ...], missing: list[str]
) -> None:
    """All that are missing are told at once."""
    (folder / "task.py").unlink()
    (folder / "model" / "config.json").unlink()
    (folder / "model").rmdir()
    told = ""
    try:
        load(folder / "run.toml", needs=needs)
    except ConfigError as error:
        told = str(error)
    assert [line.split(" = ")[0] for line in told.splitlines()] == missing


def test_a_worker_needs_no_more_of_the_model_than_its_folder(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()
    load(folder / "run.toml", needs=("task", "tokenizer"))


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "org/name.v1_2"])
def test_a_hub_name_stays_as_it_is(folder: Path, name: str) -> None:
    assert load_text(folder, MINIMAL.replace("./model", name)).model.path == name


def test_a_tokenizer_of_its_own_is_a_folder_beside_the_run_file_or_a_hub_name(folder: Path) -> None:
    (folder / "tokenizers" / "mine").mkdir(parents=True)

    def tokenizer(name: str, needs: tuple[Need, ...] = ()) -> tuple[str, str | None]:
        (folder / "run.toml").write_text(MINIMAL.replace("[task]", f'tokenizer = "{name}"\nrevision = "abc"\n[task]'))
        model = load(folder / "run.toml", needs=needs).model
        return model.tokenizer_path, model.tokenizer_revision

    assert tokenizer("./tokenizers/mine", ("tokenizer",)) == (f"{folder}/tokenizers/mine", None)
    assert tokenizer("tokenizers/mine") == (f"{folder}/tokenizers/mine", None)
    assert tokenizer("org/name", ("tokenizer",)) == ("org/name", None)
    with pytest.raises(ConfigError, match=rf"model.tokenizer = {folder}/gone: there is no such folder"):
        tokenizer("./gone", ("tokenizer",))
    model = load_text(folder, MINIMAL.replace("[task]", 'revision = "abc"\n[task]')).model
    assert (model.tokenizer_path, model.tokenizer_revision) == (model.path, "abc")


def test_a_missing_task_file_is_told(folder: Path) -> None:
    message = fault_of(folder, MINIMAL.replace("task.py", "nope.py"))
    assert message == (
        f"task.path = {folder}/nope.py:task: there is no file {folder}/nope.py; write it as path/to/file.py:name"
    )


@pytest.mark.parametrize("path", ["task.py", "task:task", "task.py:", "task.py:two words", "task.py:1st", ""])
def test_a_task_path_of_another_form_is_told(folder: Path, path: str) -> None:
    message = fault_of(folder, MINIMAL.replace("task.py:task", path))
    assert "does not have the right form (the task object, as path/to/file.py:name)" in message
    assert path in message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("rollout.max_turn_tokens = 4096", "leaves no room for a prompt in vllm.max_model_len = 4096"),
        (
            "worker = {episodes = 4, open_episodes = 7}",
            "open_episodes = 7 is less than rollout.group_size = 8 or",
        ),
        ("worker.open_episodes = 255", "worker.open_episodes = 255 is less than rollout.group_size = 8 or"),
        ("worker.count = 3\nqueue.max_workers = 2", "worker.count = 3 is more than queue.max_workers = 2: the others"),
        ("queue.capacity_groups = 15", "queue.capacity_groups = 15 is less than learner.groups_per_step = 16: a step"),
        ("queue.depth = 0.01", "queue.depth = 0.01 allows no group at all"),
        ("weight_sync.every = 6", "weight_sync.every = 6 with queue.max_staleness = 4: the servers' weights would"),
        (
            'weight_sync = {delta = true, transport = "ipc"}',
            "weight_sync.delta = true with weight_sync.transport = ipc: only gloo and http send deltas",
        ),
        ("learner.token_budget = 4095", "learner.token_budget = 4095 is less than vllm.max_model_len = 4096: the"),
        ("queue.capacity_bytes = 2048", "is more than queue.capacity_bytes = 2048: the largest groups would never fit"),
        ("queue.port = 8100", "queue.port = 8100 and vllm.port = 8100 would both take port 8100"),
        ("worker = {agent_port = 9000, count = 2}", "worker.agent_port = 9000 with worker.count = 2: only one worker"),
        (
            "weight_sync.http_port = 8200",
            "weight_sync.http_port = 8200 and queue.port = 8200 would both take port 8200",
        ),
        (
            "weight_sync.http_port = 8102\nvllm.count = 3",
            "weight_sync.http_port = 8102 and vllm.port = 8100 would both take port 8102",
        ),
        (
            'weight_sync.http_port = 8101\nteacher.path = "org/large"',
            "weight_sync.http_port = 8101 and vllm.port = 8100 would both take port 8101",
        ),
        ('teacher.args = ["-tp", "2"]', "teacher.args without a teacher: set teacher.url or teacher.path"),
        ('teacher = {url = "http://a:1", args = ["-tp", "2"]}', "teacher.args are for the server of teacher.path"),
        (
            "weight_sync.http_port = 8199\nlearner.ranks = 2",
            "weight_sync.http_port = 8199 and queue.port = 8200 would both take port 8200",
        ),
        ("weight_sync.http_port = 65534\nlearner.ranks = 3", "needs ports up to 65536, one for each process, and"),
        (
            "weight_sync.http_port = 9000\nworker.agent_port = 9000",
            "weight_sync.http_port = 9000 and worker.agent_port = 9000 would both take",
        ),
        ("vllm = {port = 65530, count = 8}", "vllm.port = 65530 needs ports up to 65537"),
    ],
)
def test_settings_that_do_not_fit_together_are_told_with_the_symptom(folder: Path, line: str, says: str) -> None:
    message = fault_of(folder, f"{line}\n{MINIMAL}")
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("lines", "most"),
    [
        ("", 8 * 256),
        ("worker.open_episodes = 300", 300),
        ("worker.episodes = 4", 32),
        ("worker.episodes = 1\nrollout.group_size = 16", 16),
        ("vllm.max_model_len = 131072\nlearner.token_budget = 131072", 409),
        ("vllm.max_model_len = 1000000\nlearner.token_budget = 1000000", 256),
    ],
)
def test_how_many_episodes_are_open_at_most(folder: Path, lines: str, most: int) -> None:
    (folder / "run.toml").write_text(f"{lines}\n{MINIMAL}")
    assert load(folder / "run.toml").max_open == most


def test_what_does_not_fit_within_a_section_is_told_in_the_section_s_own_words(folder: Path) -> None:
    message = fault_of(folder, "eval = {every = 5, temperature = 0.0, group_size = 2}\n" + MINIMAL)
    assert message.startswith(
        f"{folder / 'run.toml'}: eval.group_size = 2 with eval.temperature = 0: all episodes of a"
    )


def test_the_largest_settings_that_fit_together_load(folder: Path) -> None:
    load_text(
        folder,
        "rollout.max_turn_tokens = 4095\nworker.episodes = 8\nqueue.capacity_groups = 16\nweight_sync.every = 5\n"
        "learner.token_budget = 4096\nqueue.capacity_bytes = 67108864\nvllm = {port = 65528, count = 8}\n" + MINIMAL,
    )


@pytest.mark.parametrize("setting", ["queue.host", "vllm.host", "weight_sync.host"])
def test_i8_a_listener_beyond_this_machine_needs_a_token(
    folder: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = "10.0.0.5" if setting == "weight_sync.host" else "0.0.0.0"
    text = f'{setting} = "{host}"\n{MINIMAL}'
    message = fault_of(folder, text)
    assert f"{setting} = {host} listens beyond this machine, which needs a token: set SLIPSTREAM_TOKEN" in message
    assert load_text(folder, text, ["--queue.token", "secret"]).token == "secret"
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "from-environment")
    assert load_text(folder, text, ["--queue.token", "secret"]).token == "from-environment"


def test_a_loopback_host_needs_no_token_and_an_address_of_version_6_makes_a_url(folder: Path) -> None:
    config = load_text(folder, 'queue.host = "::1"\nvllm.host = "::1"\n' + MINIMAL)
    assert config.queue.address == "http://[::1]:8200"
    assert config.vllm.urls == ["http://[::1]:8100"]


def test_servers_given_by_url_are_not_the_launchers(folder: Path) -> None:
    config = load_text(folder, 'vllm = {servers = ["http://a:1/", "http://b:2"], host = "0.0.0.0"}\n' + MINIMAL)
    assert config.server_names == {"vllm-0": "http://a:1", "vllm-1": "http://b:2"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--queue.port", "9000"], {("queue", "port"): 9000}),
        (["--queue.port=9000"], {("queue", "port"): 9000}),
        (["--queue.max_staleness", "-3"], {("queue", "max_staleness"): -3}),
        (["--queue.max_staleness=-3"], {("queue", "max_staleness"): -3}),
        (["--learner.learning_rate", "1e-5"], {("learner", "learning_rate"): 1e-5}),
        (["--worker.keep_messages", "true"], {("worker", "keep_messages"): True}),
        (["--vllm.args", '["--enforce-eager"]'], {("vllm", "args"): ["--enforce-eager"]}),
        (["--run.name", "try-2"], {("run", "name"): "try-2"}),
        (["--run.name", '"quoted"'], {("run", "name"): "quoted"}),
        (["--run.name", "2026"], {("run", "name"): "2026"}),
        (["--run.name", "2026-01-01"], {("run", "name"): "2026-01-01"}),
        (["--run.dir", "2026"], {("run", "dir"): "2026"}),
        (["--queue.token", "12345"], {("queue", "token"): "12345"}),
        (["--queue.token="], {("queue", "token"): ""}),
        (["--queue.token=--a.b"], {("queue", "token"): "--a.b"}),
        (["--queue.port", "1\nx = 2"], {("queue", "port"): "1\nx = 2"}),
        (["--queue.port", "1", "--queue.port", "2"], {("queue", "port"): 2}),
        ([], {}),
    ],
)
def test_overrides_are_read_as_toml_or_as_text(arguments: list[str], expected: dict[tuple[str, str], Any]) -> None:
    assert parse_overrides(arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--queue.port"], "--queue.port: a value is missing"),
        (["--queue.port", "--queue.host", "::1"], "--queue.port: a value is missing"),
        (["--port", "3"], "--port: not understood; settings are given as --section.key value"),
        (["queue.port", "3"], "queue.port: not understood"),
        (["--queue.speed", "3"], "command line: queue.speed is not a setting; [queue] has: host"),
        (["--que.port", "3"], "command line: [que] is not a section; did you mean [queue]?"),
        (["--zebra.port", "3"], "command line: [zebra] is not a section; the sections are: run, model"),
        (["--learner.stepz", "3"], "command line: learner.stepz is not a setting; did you mean learner.steps?"),
        (["--queue.steps", "3"], "command line: queue.steps is not a setting; did you mean learner.steps?"),
        (["--deploy.host", "::1"], "did you mean queue.host or weight_sync.host or vllm.host?"),
        (
            ["--steps", "3"],
            "--steps: not understood; settings are given as --section.key value; did you mean --learner.s",
        ),
        (["--queue.port", "abc"], 'command line: queue.port = "abc": must be a whole number'),
        (["--queue.port", "[1"], 'command line: queue.port = "[1": must be a whole number'),
    ],
)
def test_overrides_that_are_not_understood_are_named(folder: Path, arguments: list[str], says: str) -> None:
    assert says in fault(folder / "run.toml", arguments)


def test_an_override_goes_before_the_file_and_may_open_a_section(folder: Path) -> None:
    config = load_text(folder, "queue.port = 9000\n" + MINIMAL, ["--queue.port", "9001", "--learner.steps", "3"])
    assert (config.queue.port, config.learner.steps) == (9001, 3)


def test_an_override_cannot_open_a_section_that_is_no_table(folder: Path) -> None:
    assert "queue must be a table, written [queue]" in fault_of(folder, "queue = 1\n" + MINIMAL, ["--queue.port", "1"])


def test_a_token_is_never_shown(folder: Path) -> None:
    assert "12345" not in fault_of(folder, "queue.token = 12345\n" + MINIMAL)
    assert "hunter2" not in to_toml(load_text(folder, MINIMAL, ["--queue.token", "hunter2"]))


def test_paths_in_the_file_are_taken_from_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load("../run.toml")
    assert Path(config.model.path).samefile(folder / "model")
    assert config.task.file.samefile(folder / "task.py")
    monkeypatch.chdir("/")  # a process that is started elsewhere still finds them
    assert (Path(config.model.path) / "config.json").is_file()
    assert config.task.file.is_file()


def test_paths_on_the_command_line_are_taken_from_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    make_folder(elsewhere)
    monkeypatch.chdir(elsewhere)
    config = load("../run.toml", ["--model.path", "model", "--task.path", "task.py:other"])
    assert config.model.path == str(elsewhere / "model")
    assert config.task.path == f"{elsewhere}/task.py:other"
    assert fault(Path("../run.toml"), ["--task.path", "nope.py:task"]).startswith(f"task.path = {elsewhere}/nope.py")


CHAT_FILES = '[chat]\ntemplate = "chat/t.jinja"\nparser = "chat/p.py:calls"\n'


def test_files_of_the_chat_format_are_taken_from_the_run_files_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    chat = load_text(folder, MINIMAL + CHAT_FILES).chat
    assert (chat.template, chat.parser) == (folder / "chat/t.jinja", f"{folder}/chat/p.py:calls")
    own = '[chat]\nrenderer = "custom"\nrenderer_options = {import_path = "r.py:Mine"}\n'
    assert load_text(folder, MINIMAL + own).chat.files == {"chat.renderer_options.import_path": folder / "r.py"}
    monkeypatch.setenv("HOME", str(folder))
    at_home = ["--chat.template", "~/t.jinja", "--chat.parser", "~/p.py:calls"]
    assert load_text(folder, MINIMAL, at_home).chat.files == {
        "chat.template": folder / "t.jinja",
        "chat.parser": folder / "p.py",
    }
    monkeypatch.chdir(folder)
    assert load_text(folder, MINIMAL, ["--chat.template", "t.jinja"]).chat.template == folder / "t.jinja"
    assert load_text(folder, MINIMAL, ["--chat.parser", "hermes"]).chat.parser == "hermes"


def test_a_missing_file_of_the_chat_format_is_told_before_anything_starts(folder: Path) -> None:
    """The learner ended with a FileNotFoundError from its fingerprint."""
    (folder / "run.toml").write_text(MINIMAL + CHAT_FILES)
    with pytest.raises(ConfigError) as error:
        load(folder / "run.toml", needs=["chat"])
    remedy = "there is no such file; give the path of one, from the run file's folder"
    assert str(error.value).splitlines() == [
        f"chat.{setting} = {folder}/chat/{file}: {remedy}"
        for setting, file in (("template", "t.jinja"), ("parser", "p.py"))
    ]
    assert load(folder / "run.toml", needs=["model"]), "a vLLM server reads none of them"


def test_the_run_directory_is_taken_from_the_working_directory(folder: Path) -> None:
    assert load(folder / "run.toml", ["--run.name", "a"]).run_dir == Path("runs/a")
    assert load(folder / "run.toml", ["--run.dir", "~/x"]).run_dir == Path.home() / "x" / "run"


def test_a_run_file_comes_back_from_json(folder: Path) -> None:
    config = load(folder / "run.toml", ["--queue.depth", "2.5", "--vllm.args", '["--a"]', "--queue.token", "t"])
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["--queue.depth", "2.5", "--learner.learning_rate", "3e-07", "--worker.keep_messages", "true"],
        ["--vllm.args", '["--a", "quote \\" and é, \\u007f and \\n"]', "--vllm.servers", '["http://a:1"]'],
        ["--model.path", "org/name"],
    ],
)
def test_the_printed_run_file_loads_to_the_same(folder: Path, tmp_path: Path, overrides: list[str]) -> None:
    config = load(folder / "run.toml", overrides)
    printed = tmp_path / "printed.toml"
    printed.write_text(to_toml(config), encoding="utf-8")
    assert load(printed) == config


@pytest.mark.parametrize(
    ("given", "tolerance"),
    [
        ([], 1e-3),
        (["--model.dtype", "bfloat16"], 0.5),
        (["--model.dtype", "float16"], 0.5),
        (["--vllm.args", '["--dtype", "half"]'], 0.5),
        (["--vllm.args", '["--quantization=fp8"]'], 2.0),
        (["--vllm.args", '["-q", "nvfp4_per_token"]'], 4.0),
    ],
)
def test_the_probe_s_tolerance_follows_the_model_s_type(folder: Path, given: list[str], tolerance: float) -> None:
    assert load(folder / "run.toml", given).probe_tolerance == tolerance
    assert load(folder / "run.toml", [*given, "--weight_sync.probe_tolerance", "0.1"]).probe_tolerance == 0.1


def test_a_quantisation_that_cannot_take_new_weights_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization awq, whose weights are packed before"):
        load(folder / "run.toml", ["--vllm.args", '["--quantization", "awq"]'])


def test_the_printed_run_file_tells_what_each_setting_means(shared_folder: Path) -> None:
    text = to_toml(load(shared_folder / "run.toml"))
    lines = text.splitlines()
    assert "max_staleness = 4               # K: no token older than K versions contributes to a gradient" in lines
    assert any(line.startswith("# token = ") for line in lines)
    assert max(len(line) for line in lines if "path = " not in line) <= 100
    assert list(tomllib.loads(text)) == list(RunConfig.model_fields)


def test_one_section_can_be_printed(folder: Path) -> None:
    assert list(tomllib.loads(to_toml(load(folder / "run.toml"), ["chat", "deploy"]))) == ["chat", "deploy"]


def test_a_setting_that_is_to_be_set_is_printed_as_such() -> None:
    given = {("model", "path"): "model", ("task", "path"): "task.py:task"}
    text = to_toml(resolve(None, given, "test"), to_be_set=[("task", "path")])
    assert "# path =                        # to be set: the task object, as path/to/file.py:name" in text.splitlines()
    assert tomllib.loads(text)["model"]["path"] == "model"


class Bounds(NamedTuple):
    """Holds the bounds of a numeric setting."""

    setting: str
    is_integer: bool
    low: float
    low_is_outside: bool
    high: float
    high_is_outside: bool

    def outside(self) -> st.SearchStrategy[int | float]:
        if self.is_integer:
            too_low = st.integers(max_value=int(self.low) - (not self.low_is_outside))
            return too_low | st.integers(min_value=int(self.high) + (not self.high_is_outside))
        below = st.floats(max_value=self.low, exclude_max=not self.low_is_outside, allow_infinity=False)
        return below | st.floats(min_value=self.high, exclude_min=not self.high_is_outside, allow_infinity=False)


def numeric_settings() -> Iterator[Bounds]:
    """Fails with a KeyError where a number has no bound, which DESIGN.md forbids ("typed, bounded")."""
    for section, table in RunConfig.model_fields.items():
        assert table.annotation is not None
        for key, field in table.annotation.model_fields.items():
            if field.annotation not in (int, float):
                continue
            bound: dict[str, Any] = {}
            for limit in field.metadata:
                for kind, side in (("Ge", "low"), ("Gt", "low"), ("Le", "high"), ("Lt", "high")):
                    if isinstance(limit, getattr(annotated_types, kind)):
                        bound[side] = (getattr(limit, kind.lower()), kind in ("Gt", "Lt"))
            yield Bounds(f"{section}.{key}", field.annotation is int, *bound["low"], *bound["high"])


@pytest.mark.parametrize("bounds", list(numeric_settings()), ids=lambda bounds: bounds.setting)
def test_any_number_out_of_bounds_is_told_with_its_name_and_value(shared_folder: Path, bounds: Bounds) -> None:
    @settings(max_examples=15, deadline=None)
    @given(bounds.outside())
    def is_told(value: int | float) -> None:
        message = fault(shared_folder / "run.toml", [f"--{bounds.setting}", str(value)])
        assert f"{bounds.setting} = {value}: must be " in message

    is_told()


def test_every_setting_is_described() -> None:
    for section, table in RunConfig.model_fields.items():
        assert table.annotation is not None
        for key, field in table.annotation.model_fields.items():
            assert field.description, f"{section}.{key} has no description"


@pytest.mark.parametrize(
    "lines",
    [
        'learner.objective = "cispo"\nlearner.clip_high = 4.0',
        'learner.clip_high = 100\nlearner.delta = "none"',
        'learner.objective = "dppo"\nlearner.dppo_divergence = "kl"\nlearner.dppo_threshold = 1.5',
    ],
)
def test_bounds_of_one_objective_do_not_bind_another(folder: Path, lines: str) -> None:
    load_text(folder, f"{lines}\n{MINIMAL}")
