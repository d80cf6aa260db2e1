"""The mistakes that people make, each made for real: `python -m tests.mistakes [--only NAME ...] [--model FOLDER]`.

Each is a run of the multiply example in its own folder with one thing wrong, against one real vLLM server that all
of them share. Prints a table: exit code, seconds until the fault is told, the line that tells it, processes left
running. Exit code 1 if a mistake ends otherwise than it should: with another code, untold, too late, or with something
left behind.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from slipstream.deploy.servers import vllm_server
from slipstream.protocol.config import load
from tests.kit.ports import free_port

EXAMPLE = Path(__file__).parent.parent / "examples" / "multiply"
SLIPSTREAM = (sys.executable, "-P", "-m", "slipstream.deploy")
LIMIT_S = 180.0

SMALL = [
    *("--learner.steps", "6", "--learner.groups_per_step", "2", "--rollout.group_size", "4"),
    *("--queue.stall_after_s", "20", "--deploy.grace_s", "10"),
]


@dataclass(frozen=True)
class Stage:
    """A folder with a run file and a task that are right, and the real server."""

    folder: Path
    model: Path
    server: str
    port: int

    @property
    def task(self) -> Path:
        return self.folder / "task.py"

    @property
    def run_file(self) -> Path:
        return self.folder / "run.toml"

    def up(self, *arguments: str) -> list[str]:
        return self.command("up", "--vllm.servers", f'["{self.server}"]', *arguments)

    def command(self, name: str, *arguments: str) -> list[str]:
        ours = ["--queue.port", str(self.port), "--run.dir", str(self.folder / "runs"), *SMALL]
        return [*SLIPSTREAM, name, str(self.run_file), *ours, *arguments]

    def rewrite(self, before: str, after: str) -> None:
        text = self.task.read_text(encoding="utf-8")
        assert before in text, f"the example's task no longer holds {before!r}"
        self.task.write_text(text.replace(before, after), encoding="utf-8")


@dataclass
class Told:
    """A process that is watched: its lines, each with the seconds since its start."""

    process: subprocess.Popen[str]
    started: float = field(default_factory=time.monotonic)
    lines: list[tuple[float, str]] = field(default_factory=list)

    @classmethod
    def start(cls, command: list[str], **env: str) -> Told:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), **env},
            start_new_session=True,
        )
        told = cls(process)
        threading.Thread(target=told._read, daemon=True).start()
        return told

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.started, line.rstrip()))

    def when(self, pattern: str) -> tuple[float, str] | None:
        return next(((at, line) for at, line in self.lines if re.search(pattern, line)), None)

    def wait_for(self, pattern: str) -> None:
        until = time.monotonic() + LIMIT_S
        while not self.when(pattern) and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)

    def end(self) -> int | None:
        """The exit code; None if it had to be killed."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return None
        time.sleep(0.2)  # the reader's last lines
        return code

    def interrupt(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)


@dataclass(frozen=True)
class Mistake:
    """`make` starts what goes wrong and returns it; `code`, `tells` (a pattern), `within_s`: how it must end."""

    name: str
    make: Callable[[Stage], Told]
    code: int
    tells: str
    within_s: float = 20.0


@dataclass(frozen=True)
class Outcome:
    mistake: Mistake
    code: int | None
    told_at: float | None
    line: str
    left: int
    text: str

    @property
    def faults(self) -> list[str]:
        wanted = self.mistake
        return [
            fault
            for fault, wrong in {
                f"exit code {self.code}, not {wanted.code}": self.code != wanted.code,
                "not told": self.told_at is None,
                f"told after {self.told_at or 0:.0f} s": (self.told_at or 0) > wanted.within_s,
                f"{self.left} processes left": self.left > 0,
                "a traceback": "Traceback (most recent call last)" in self.text,
            }.items()
            if wrong
        ]


def wrong_path(stage: Stage) -> Told:
    return Told.start(stage.up("--model.path", "./no-such-model"))


def wrong_run_file(stage: Stage) -> Told:
    return Told.start([*SLIPSTREAM, "up", str(stage.folder / "rum.toml")])


def wrong_port(stage: Stage) -> Told:
    return Told.start(stage.command("up", "--vllm.servers", f'["http://127.0.0.1:{free_port()}"]'))


def port_taken(stage: Stage) -> Told:
    taken = stage.server.rsplit(":", 1)[1]
    return Told.start(stage.command("up", "--vllm.port", taken))


def wrong_token(stage: Stage) -> Told:
    queue = Told.start(stage.command("queue"), SLIPSTREAM_TOKEN="right")
    try:
        wait_for_port(stage.port)
        told = Told.start(stage.command("worker"), SLIPSTREAM_TOKEN="wrong")
        told.end()
        return told
    finally:
        queue.interrupt()
        queue.end()


def no_chat_template(stage: Stage) -> Told:
    bare = stage.folder / "bare"
    shutil.copytree(stage.model, bare)
    for file in bare.glob("chat_template*"):
        file.unlink()
    config = bare / "tokenizer_config.json"
    config.write_text(re.sub(r'"chat_template":\s*"(\\.|[^"\\])*",?', "", config.read_text()))
    return Told.start(stage.up("--model.path", str(bare)))


def tools_with_text_prompts(stage: Stage) -> Told:
    stage.task.write_text(
        f"{stage.task.read_text()}\n"
        "task = Task(dataset=[{'prompt': 'a text'}], tools=[multiply], rewards=task.rewards)\n"
    )
    return Told.start(stage.up())


def unknown_key(stage: Stage) -> Told:
    return Told.start(stage.up("--learner.learning_rat", "1e-4"))


def out_of_range(stage: Stage) -> Told:
    return Told.start(stage.up("--rollout.group_size", "1"))


def task_raises(stage: Stage) -> Told:
    stage.task.write_text(stage.task.read_text() + "\nimport no_such_package\n")
    return Told.start(stage.up())


def empty_data(stage: Stage) -> Told:
    stage.task.write_text(stage.task.read_text() + "\ntask = Task(dataset=[], rewards=task.rewards)\n")
    return Told.start(stage.up())


def reward_of_wrong_length(stage: Stage) -> Told:
    add_reward(stage, "return [1.0]")
    return Told.start(stage.up())


def reward_raises(stage: Stage) -> Told:
    add_reward(stage, "return [columns['anser'] for _ in completions]")
    return Told.start(stage.up())


def equal_rewards(stage: Stage) -> Told:
    add_reward(stage, "return [0.0] * len(completions)")
    told = Told.start(stage.up("--queue.stall_after_s", "15"))
    told.wait_for("equal|variance")
    told.interrupt()
    return told


def name_taken(stage: Stage) -> Told:
    Told.start(stage.up("--learner.steps", "2", "--learner.checkpoint_every", "1")).end()
    return Told.start(stage.up())


def resume_of_nothing(stage: Stage) -> Told:
    return Told.start(stage.up("--resume"))


def interrupted_at_start(stage: Stage) -> Told:
    told = Told.start(stage.up())
    time.sleep(1.0)
    told.interrupt()
    return told


def interrupted_in_the_middle(stage: Stage) -> Told:
    told = Told.start(stage.up("--learner.steps", "500"))
    told.wait_for(r"step +\d+/500")
    time.sleep(3.0)
    told.interrupt()
    return told


def interrupted_twice(stage: Stage) -> Told:
    told = Told.start(stage.up("--learner.steps", "500"))
    told.wait_for(r"step +\d+/500")
    told.interrupt()
    time.sleep(0.3)
    told.interrupt()
    return told


def not_writable(stage: Stage) -> Told:
    return Told.start(stage.up("--run.dir", "/proc/runs"))


def two_launches(stage: Stage) -> Told:
    first = Told.start(stage.up("--learner.steps", "500"))
    first.wait_for("run directory")
    second = Told.start(stage.up("--queue.port", str(free_port())))
    second.end()
    first.interrupt()
    first.end()
    return second


def another_task(stage: Stage) -> Told:
    elsewhere = stage.folder / "elsewhere.py"
    elsewhere.write_text(
        f"{stage.task.read_text()}\ntask = Task(dataset=task.dataset[:50], tools=task.tools, rewards=task.rewards)\n"
    )
    return beside_a_run(stage, "--task.path", f"{elsewhere}:task")


def another_model(stage: Stage) -> Told:
    swapped = stage.folder / "swapped"
    shutil.copytree(stage.model, swapped)
    file = swapped / "tokenizer.json"
    text = file.read_text()
    one, two = re.search(r'"1":\s*(\d+)', text), re.search(r'"2":\s*(\d+)', text)
    assert one
    assert two
    text = text.replace(one[0], f'"1": {two[1]}', 1).replace(two[0], f'"2": {one[1]}', 1)
    file.write_text(text)
    return beside_a_run(stage, "--model.path", str(swapped))


def queue_unreachable(stage: Stage) -> Told:
    return Told.start(stage.command("status"))


MISTAKES = [
    Mistake("run file not there", wrong_run_file, 2, "no such run file", 5),
    Mistake("wrong path", wrong_path, 2, "no-such-model", 5),
    Mistake("unknown key", unknown_key, 2, "learning_rat", 5),
    Mistake("value out of range", out_of_range, 2, "group_size", 5),
    Mistake("wrong port", wrong_port, 2, "no vLLM server answers"),
    Mistake("port taken by an old vLLM", port_taken, 2, "vllm.port = "),
    Mistake("wrong token", wrong_token, 1, "SLIPSTREAM_TOKEN"),
    Mistake("no chat template", no_chat_template, 2, "chat.template"),
    Mistake("tools with text prompts", tools_with_text_prompts, 2, "tools need a conversation"),
    Mistake("task that raises", task_raises, 2, "no_such_package"),
    Mistake("empty data", empty_data, 2, "is empty"),
    Mistake("reward of wrong length", reward_of_wrong_length, 1, r"returned 1 rewards for 4", 60),
    Mistake("reward that raises", reward_raises, 1, "anser", 60),
    Mistake("equal rewards", equal_rewards, 130, "equal|variance", 90),
    Mistake("run name taken", name_taken, 2, "already holds a run"),
    Mistake("resume of nothing", resume_of_nothing, 2, "resume"),
    Mistake("Ctrl-C at start", interrupted_at_start, 130, "interrupted, stopping"),
    Mistake("Ctrl-C in the middle", interrupted_in_the_middle, 130, "--resume", 90),
    Mistake("Ctrl-C twice", interrupted_twice, 130, "interrupted, stopping", 90),
    Mistake("directory not writable", not_writable, 2, "cannot be written"),
    Mistake("two launches at once", two_launches, 2, "in use by another launcher"),
    Mistake("worker with another task", another_task, 2, "data set has 50 rows", 30),
    Mistake("worker with another model", another_model, 2, "tokenizer differs", 30),
    Mistake("queue unreachable", queue_unreachable, 2, "did not answer"),
]


def add_reward(stage: Stage, body: str) -> None:
    stage.task.write_text(
        f"{stage.task.read_text()}\n\ndef mine(completions, **columns):\n    {body}\n\n\n"
        "task = Task(dataset=task.dataset, tools=task.tools, rewards=[mine])\n"
    )


def beside_a_run(stage: Stage, *arguments: str) -> Told:
    """A worker that joins a run under way."""
    run = Told.start(stage.up("--learner.steps", "500"))
    run.wait_for(r"step +\d+/500")
    worker = Told.start(stage.command("worker", *arguments))
    worker.end()
    run.interrupt()
    run.end()
    return worker


def wait_for_port(port: int) -> None:
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1):
                return
        except OSError:
            time.sleep(0.1)


def left_behind(folder: Path) -> list[psutil.Process]:
    """Processes that name the folder in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or []) and process.pid != os.getpid():
            found.append(process)
    return found


def outcome(mistake: Mistake, model: Path, server: str) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="mistake-") as name:
        folder = Path(name)
        shutil.copy(EXAMPLE / "task.py", folder)
        text = (EXAMPLE / "run.toml").read_text(encoding="utf-8")
        (folder / "run.toml").write_text(re.sub(r'path = ".*models.*"', f'path = "{model}"', text), encoding="utf-8")
        told = mistake.make(Stage(folder, model, server, free_port()))
        code = told.end()
        left = left_behind(folder)
        for process in left:
            process.kill()
        at, line = told.when(mistake.tells) or (None, "")
        whole = "\n".join(line for _, line in told.lines)
        return Outcome(mistake, code, at, line, len(left), whole)


@contextmanager
def real_server(model: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "vllm.log").open("w") as log:
        config = load(EXAMPLE / "run.toml", ["--model.path", str(model), "--vllm.port", str(free_port())])
        env = {**os.environ, **vllm_server.environment(config), "OMP_NUM_THREADS": "1"}
        command = vllm_server.command(vllm_server.with_cpu_settings(config), 0)
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            url = config.vllm.urls[0]
            until = time.monotonic() + LIMIT_S
            while process.poll() is None and time.monotonic() < until:
                try:
                    with urllib.request.urlopen(f"{url}/health", timeout=5):
                        break
                except OSError:
                    time.sleep(0.3)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="parts of names")
    parser.add_argument("--model", type=Path, default=EXAMPLE / "models" / "seed-0")
    arguments = parser.parse_args()
    chosen = [m for m in MISTAKES if not arguments.only or any(part in m.name for part in arguments.only)]
    table = Table("mistake", "code", "told after", "left", "the line that tells it", "fault", width=180)
    wrong = 0
    with real_server(arguments.model.resolve()) as server:
        for mistake in chosen:
            result = outcome(mistake, arguments.model.resolve(), server)
            wrong += bool(result.faults)
            told = "-" if result.told_at is None else f"{result.told_at:.1f} s"
            table.add_row(mistake.name, str(result.code), told, str(result.left), result.line, "; ".join(result.faults))
            print(f"{mistake.name}: {'; '.join(result.faults) or 'as it should'}", file=sys.stderr, flush=True)
            if result.faults:
                print("    " + result.text[-2500:].replace("\n", "\n    "), file=sys.stderr, flush=True)
    Console(width=180).print(table)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
