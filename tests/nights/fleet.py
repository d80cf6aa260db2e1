"""The run that a night hurts: `slipstream up`, a server and a worker that joined it through links, and their processes.

With fakes, `vllm` is a package that starts `tests/nights/fake_server.py`; everything else is what users run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from slipstream.protocol import access
from tests.kit.fake_vllm.tokenizer import build_tokenizer
from tests.kit.model import tiny_model
from tests.kit.ports import free_port
from tests.nights.examples import BY_NAME, Example
from tests.nights.link import Link
from tests.nights.watch import Watch

ROOT = Path(__file__).parents[2]
EXAMPLE = BY_NAME["multiply"].folder
SLIPSTREAM = (sys.executable, "-P", "-m", "slipstream.deploy.cli")
TOKEN = "0123456789abcdef0123456789abcdef"
ENDS_WITHIN_S = 120.0
# More than any night makes; the last start is given what it still needs.
ENDLESS = 1_000_000

FAKE_VLLM = """
import runpy, sys
sys.argv[0] = "fake_vllm"
runpy.run_module("tests.nights.fake_server", run_name="__main__")
"""

# In each process: `time.time` goes by what the file `clock` says, in seconds.
CLOCK = """
import os, time
real, monotonic, file = time.time, time.monotonic, os.environ.get("NIGHT_CLOCK")
seen = [0.0, 0.0]
def shifted():
    now = monotonic()
    if now - seen[0] > 0.2:
        seen[0] = now
        try:
            with open(file) as text:
                seen[1] = float(text.read() or 0)
        except (OSError, ValueError):
            seen[1] = 0.0
    return real() + seen[1]
if file:
    time.time = shifted
    time.time_ns = lambda: int(shifted() * 1e9)
"""

# Keeps the weights of versions as the servers hold them, so that labels can be recomputed.
KEEPER = """
import copy, os
from pathlib import Path

import torch
from transformers import TrainerCallback

KEPT = Path({kept!r})

class Keeper(TrainerCallback):
    def on_log(self, args, state, control, model=None, logs=None, **_):
        version = int((logs or {{}}).get("version", -1))
        if version >= 0 and version % {every} < 2 and not (KEPT / f"{{version}}.pt").exists():
            weights = {{name: value.to(torch.{dtype}) for name, value in model.state_dict().items()}}
            torch.save(weights, KEPT / "part")
            os.replace(KEPT / "part", KEPT / f"{{version}}.pt")
"""


@dataclass
class Fleet:
    """A run in `folder`.

    Attributes:
        fake: Whether its servers are fakes.
        example: What it runs.
        watch: What is read of terminals and status.
        starts: How often the run was started.
        held: Whether nothing is started now.
        engines: vLLM's engines that were seen.
    """

    folder: Path
    model: Path
    fake: bool
    seed: int
    example: Example = BY_NAME["multiply"]
    watch: Watch = field(init=False)
    starts: int = 0
    beside: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    up: subprocess.Popen[str] | None = None
    held: bool = False
    engines: set[psutil.Process] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.harm, self.kept = self.folder / "harm", self.folder / "kept"
        for folder in (self.harm, self.kept, self.folder / "stubs"):
            folder.mkdir(parents=True, exist_ok=True)
        self.run_dir = self.folder / "runs" / "night"
        self.clock = self.folder / "clock"
        self.queue_port, self.joined_port = free_port(), free_port()
        self.vllm_port = consecutive_ports(self.servers)
        self.queue_link, self.server_link = Link(self.queue_port), Link(self.joined_port)
        self._write_files()
        self.watch = Watch(self.queue_url, TOKEN)

    @property
    def servers(self) -> int:
        return self.example.servers

    @property
    def workers(self) -> int:
        return self.example.workers

    @property
    def queue_url(self) -> str:
        return f"http://127.0.0.1:{self.queue_port}"

    @property
    def server_urls(self) -> dict[str, str]:
        """Where each server is asked by a person, links left aside."""
        own = {f"vllm-{index}": f"http://127.0.0.1:{self.vllm_port + index}" for index in range(self.servers)}
        return {**own, "joined": f"http://127.0.0.1:{self.joined_port}"} if self.example.joined else own

    @property
    def environment(self) -> dict[str, str]:
        path = [str(self.folder / "stubs"), str(self.folder), str(self.example.folder), str(ROOT)]
        own = {
            "PYTHONPATH": os.pathsep.join(path),
            "NIGHT_CLOCK": str(self.clock),
            "OMP_NUM_THREADS": "1",
            access.TOKEN_VARIABLE: TOKEN,
            "COLUMNS": "400",
        }
        return {**os.environ, **own}

    def _write_files(self) -> None:
        stubs = self.folder / "stubs"
        (stubs / "sitecustomize.py").write_text(CLOCK, encoding="utf-8")
        (self.folder / "night_task.py").write_text(self.example.task.format(harm=str(self.harm)), encoding="utf-8")
        kept = {"kept": str(self.kept), "every": self.example.keep_every, "dtype": self.example.dtype}
        (self.folder / "keeper.py").write_text(KEEPER.format(**kept), encoding="utf-8")
        shutil.copy(self.example.folder / "run.toml", self.folder / "run.toml")
        if self.fake:
            for name in ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai"):
                (stubs / name).mkdir(exist_ok=True)
                (stubs / name / "__init__.py").touch()
            (stubs / "vllm/entrypoints/openai/api_server.py").write_text(FAKE_VLLM, encoding="utf-8")
            save_model(self.model)

    def settings(self) -> list[str]:
        return [
            *("--run.name", "night", "--run.dir", str(self.folder / "runs"), "--run.seed", str(self.seed)),
            *("--model.path", str(self.model), "--task.path", f"{self.folder / 'night_task.py'}:task"),
            *("--queue.port", str(self.queue_port), "--vllm.port", str(self.vllm_port)),
            *("--vllm.count", str(self.servers), "--worker.count", str(self.workers)),
            *("--weight_sync.transport", "http", "--weight_sync.timeout_s", "40"),
            *("--rollout.group_size", "4", "--learner.groups_per_step", "4"),
            *("--learner.checkpoint_every", str(self.example.checkpoint_every)),
            *("--worker.tool_timeout_s", "3", "--worker.reward_timeout_s", "6"),
            *("--queue.ticket_timeout_s", "10", "--queue.lease_timeout_s", "20", "--queue.stall_after_s", "20"),
            *("--queue.record", "true", "--deploy.restart", "1000", "--deploy.grace_s", "15"),
            *("--learner.callbacks", f'["{self.folder / "keeper.py"}:Keeper"]'),
            *self.example.settings,
        ]

    def command(self, name: str, *arguments: str) -> list[str]:
        return [*SLIPSTREAM, name, str(self.folder / "run.toml"), *self.settings(), *arguments]

    def start(self, steps: int = ENDLESS) -> None:
        """Start the run, or continue with it."""
        resume = ["--resume"] if (self.run_dir / "metrics.jsonl").exists() else []
        if resume:
            self._wait_for_ports()
        self.starts += 1
        self.up = self.spawn("terminal", self.command("up", "--learner.steps", str(steps), *resume))

    def spawn(self, name: str, command: Sequence[str], **env: str) -> subprocess.Popen[str]:
        """Start a process whose output is watched under a name."""
        process = subprocess.Popen(
            command,
            env={**self.environment, **env},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.watch.read(name, process)
        return process

    def keep(self) -> None:
        """Start what has ended: the joined server and the far worker, as their own supervisors would; and the run."""
        if self.up is None or self.held:
            return
        if self.up.poll() is not None:
            self.start()
        if not self.answers(f"{self.queue_url}{access.HEALTH}"):
            return
        link = f"http://127.0.0.1:{self.queue_link.port}"
        commands = {
            "joined": self.command(
                *("vllm", "--vllm.port", str(self.joined_port), "--join", self.queue_url, "--name", "joined"),
                *("--advertise", f"http://127.0.0.1:{self.server_link.port}"),
            ),
            "far": self.command("worker", "--queue", link, "--name", "far"),
        }
        if not self.example.joined:
            del commands["joined"]
        for name, command in commands.items():
            process = self.beside.get(name)
            if process is None or process.poll() is not None:
                self.beside[name] = self.spawn(name, command)

    def answers(self, url: str) -> bool:
        with suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200  # type: ignore[no-any-return]
        return False

    def processes(self) -> dict[str, psutil.Process]:
        """The processes of the run that live, by name."""
        found: dict[str, psutil.Process] = {}
        with suppress(psutil.Error):
            if self.up is not None and self.up.poll() is None:
                for child in psutil.Process(self.up.pid).children():
                    if (name := self._name_of(child)) is not None:
                        found[name] = child
        for name, process in self.beside.items():
            if process.poll() is None:
                with suppress(psutil.Error):
                    own = psutil.Process(process.pid)
                    found[name] = own
                    if name == "joined":  # vLLM is its child
                        found[name] = next(iter(own.children()), own)
        return found

    def with_engines(self) -> dict[str, psutil.Process]:
        """The processes of the run, and those in which its servers compute."""
        found = self.processes()
        for name, process in [*found.items()]:
            with suppress(psutil.Error):
                for child in process.children(recursive=True):
                    if "EngineCore" in child.cmdline()[0]:
                        found[f"{name}'s engine"] = child
                        self.engines.add(child)
        return found

    def _name_of(self, process: psutil.Process) -> str | None:
        with suppress(psutil.Error):
            words = process.cmdline()
            if "vllm.entrypoints.openai.api_server" in words:
                return f"vllm-{int(words[words.index('--port') + 1]) - self.vllm_port}"
            if "slipstream.deploy.cli" in words:
                role = words[words.index("slipstream.deploy.cli") + 1]
                if role == "worker":
                    return words[words.index("--name") + 1]
                return f"vllm-{words[words.index('--index') + 1]}" if role == "vllm" else role
        return None

    def targets(self, kind: str) -> list[str]:
        """The names of what a fault may hurt."""
        return {
            "server": [f"vllm-{index}" for index in range(self.servers)],
            "worker": [f"worker-{index}" for index in range(self.workers)],
        }.get(kind, [kind])

    def finish(self, steps: int) -> int:
        """Stop the run as a person does, and let it make a few more steps to its end.

        Returns:
            The exit code; -1 if it did not end, -2 if it could not be stopped.
        """
        assert self.up is not None
        if self.up.poll() is None:
            self.up.send_signal(signal.SIGTERM)  # SIGINT may be ignored, as under nohup
            try:
                self.up.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.watch.add("night", f"not ended by SIGTERM: {[*self.processes()]}")
                return -2
        self.start(steps)
        until = time.monotonic() + 3 * ENDS_WITHIN_S
        while self.up.poll() is None and time.monotonic() < until:
            time.sleep(0.5)
        code = self.up.poll()
        return -1 if code is None else code

    def close(self) -> list[str]:
        """End everything; returns what was left of the run itself, and had to be killed."""
        for process in self.beside.values():  # as their own supervisors would: with what they started
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        if self.up is not None and self.up.poll() is None:
            self.up.send_signal(signal.SIGTERM)
        until = time.monotonic() + 30
        for process in [*self.beside.values(), *([self.up] if self.up else [])]:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
        left = []
        for process in self.left():
            with suppress(psutil.Error):
                left.append(" ".join(process.cmdline())[:120])
                process.kill()
        self.watch.close()
        for link in (self.queue_link, self.server_link):
            link.close()
        return left

    def left(self) -> list[psutil.Process]:
        """Processes of this run that live: they have its folder in their environment. vLLM's engine has overwritten its
        environment with its title; it is known from when it was its server's child."""
        found = [engine for engine in self.engines if engine.is_running()]
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("NIGHT_CLOCK") == str(self.clock):
                    found.append(process)
        return found

    def _wait_for_ports(self) -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until and self.answers(f"{self.queue_url}{access.HEALTH}"):
            time.sleep(0.2)


def consecutive_ports(count: int) -> int:
    """Return the first of so many free ports in a row."""
    found = [free_port() for _ in range(count)]
    while found[-1] - found[-count] != count - 1:
        found.append(free_port())
    return found[-count]


def save_model(folder: Path, **sizes: int) -> None:
    """Write a random model with a tokenizer and a template, for fakes. `sizes`: fields of its configuration."""
    if (folder / "config.json").exists():
        return
    tokenizer = build_tokenizer()
    tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    eos = [tokenizer.eos_token_id, end_of_text]
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {eos}}}', encoding="utf-8")
