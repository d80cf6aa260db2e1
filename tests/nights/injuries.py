"""Does faults to a fleet, and undoes them."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from slipstream.protocol import checkpoints
from tests.kit.ports import free_port
from tests.nights.fleet import TOKEN, Fleet, save_model
from tests.nights.schedule import Strike

FULL_DISK_BYTES = 2 << 30
DUTY_S = 0.4
HALF_OPEN = 1000
# Fewer than any process of a run has open.
FEW_FILES = 8
# The queue looks at the machine's clock each second, on a busy machine later.
CLOCK_SEEN_S = 4.0
# A process that does not belong there ends by itself, once it has imported what it needs.
ENDS_WITHIN_S = 90.0


class NotThere(Exception):
    """What was to be hurt does not run now."""


class Injuries:
    """Hurts one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def target(self, strike: Strike) -> str:
        """The name of what a strike hurts."""
        names = self._fleet.targets(strike.of.target)
        return names[strike.which % len(names)]

    @contextmanager
    def done(self, strike: Strike) -> Iterator[None]:
        """Hold a fault while the context is open. Raises `NotThere`."""
        name, target = strike.fault, self.target(strike)
        undo = self._do(name, target)
        try:
            yield
        finally:
            undo()

    def _do(self, name: str, target: str) -> Callable[[], None]:
        verb = name.split()[0]
        if name == "truncated checkpoint":
            return self._truncate()
        if verb == "kill":
            self._signal(target, signal.SIGKILL)
            return nothing
        if verb == "end":
            self._process(target).terminate()
            return nothing
        if name == "stop terminal":
            return self._terminal_stopped()
        if verb == "stop":
            return self._stopped(target)
        if verb == "duty-cycle":
            return self._duty_cycled(target)
        if verb in ("cut", "slow", "lossy", "refusing"):
            link = self._fleet.server_link if target == "joined" else self._fleet.queue_link
            link.state = verb  # type: ignore[assignment]
            return lambda: setattr(link, "state", "whole")
        if name.startswith("clock"):
            self._fleet.clock.write_text("3600" if name.endswith("ahead") else "-3600")
            return self._set_right
        if name in ("pause", "sleep", "wrong swap"):
            return self._asked(name, target)
        if name in _BESIDE:
            return self._beside(name, target)
        if name == "half-open connections":
            return self._half_open()
        if name.endswith("out of files"):
            return self._out_of_files(target)
        if name == "port of the queue taken":
            return self._port_taken(target)
        if name == "metrics that cannot be written":
            return self._metrics_moved()
        if name == "edited task":
            return self._edited(target)
        if name == "full disk":
            return self._filled()
        if name == "worker out of memory":
            process = self._process(target)
            with suppress(psutil.Error):
                size = process.memory_info().vms
                process.rlimit(resource.RLIMIT_AS, (size + (1 << 20), size + (1 << 20)))
            return nothing
        if name == "wrong token":
            self._fleet.watch.add(name, str(self._ask("GET", f"{self._fleet.queue_url}/v1/status", "wrong")))
            return nothing
        harm = self._fleet.harm / name
        harm.touch()
        return lambda: harm.unlink(missing_ok=True)

    def _set_right(self) -> None:
        """Undo a step of the clock, and leave the queue the time to see it: one back and one ahead between two of its
        looks are none."""
        self._fleet.clock.write_text("0")
        time.sleep(CLOCK_SEEN_S)

    def _process(self, name: str) -> psutil.Process:
        if (found := self._fleet.processes().get(name)) is None:
            raise NotThere(name)
        return found

    def _signal(self, name: str, number: int) -> None:
        self._signal_pid(self._process(name).pid, number)

    @staticmethod
    def _signal_pid(pid: int, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(os.getpgid(pid), number)

    def _stopped(self, name: str) -> Callable[[], None]:
        pid = self._process(name).pid
        self._signal_pid(pid, signal.SIGSTOP)
        return lambda: self._signal_pid(pid, signal.SIGCONT)

    def _terminal_stopped(self) -> Callable[[], None]:
        if (up := self._fleet.up) is None or up.poll() is not None:
            raise NotThere("up")
        up.send_signal(signal.SIGSTOP)
        return lambda: up.send_signal(signal.SIGCONT)

    def _half_open(self) -> Callable[[], None]:
        """Connect, as a scanner does, and send the beginning of a request, or nothing."""
        open_ones = []
        with suppress(OSError):
            for number in range(HALF_OPEN):
                one = socket.create_connection(("127.0.0.1", self._fleet.queue_port), timeout=2)
                open_ones.append(one)
                one.sendall((b"", b"GET /v1/sta", b"\x16\x03\x01\x02\x00\x01")[number % 3])

        def close() -> None:
            for one in open_ones:
                one.close()

        return close

    def _out_of_files(self, target: str) -> Callable[[], None]:
        process = self._process(target)
        with suppress(psutil.Error):
            before = process.rlimit(resource.RLIMIT_NOFILE)
            process.rlimit(resource.RLIMIT_NOFILE, (FEW_FILES, before[1]))

        def undo() -> None:
            with suppress(psutil.Error):
                process.rlimit(resource.RLIMIT_NOFILE, before)

        return undo

    def _port_taken(self, target: str) -> Callable[[], None]:
        """Kill the queue, and listen at its port before it is there again."""
        self._signal(target, signal.SIGKILL)
        until = time.monotonic() + ENDS_WITHIN_S
        while True:
            try:
                return socket.create_server(("127.0.0.1", self._fleet.queue_port)).close
            except OSError:
                if time.monotonic() > until:
                    raise NotThere("the queue's port") from None
                time.sleep(0.01)

    def _metrics_moved(self) -> Callable[[], None]:
        """Put a folder in the place of the metrics."""
        file = self._fleet.run_dir / "metrics.jsonl"
        aside = file.with_suffix(".aside")
        file.rename(aside)
        file.mkdir()

        def undo() -> None:
            file.rmdir()
            aside.rename(file)

        return undo

    def _edited(self, target: str) -> Callable[[], None]:
        """Change the task's file, so that a worker that is started again has another one than its fleet."""
        file = self._fleet.folder / "night_task.py"
        before = file.read_text(encoding="utf-8")
        file.write_text(before + "\n# Edited.\n", encoding="utf-8")
        self._signal(target, signal.SIGKILL)

        def undo() -> None:
            file.write_text(before, encoding="utf-8")
            with suppress(NotThere):
                self._signal(target, signal.SIGKILL)

        return undo

    def _duty_cycled(self, name: str) -> Callable[[], None]:
        pid, over = self._process(name).pid, threading.Event()

        def cycle() -> None:
            while not over.wait(DUTY_S):
                self._signal_pid(pid, signal.SIGSTOP)
                over.wait(DUTY_S)
                self._signal_pid(pid, signal.SIGCONT)

        thread = threading.Thread(target=cycle, daemon=True)
        thread.start()

        def end() -> None:
            over.set()
            thread.join()

        return end

    def _asked(self, name: str, target: str) -> Callable[[], None]:
        url = self._fleet.server_urls[target]
        route = {"pause": "/pause?mode=keep", "sleep": "/sleep?level=1"}.get(name, f"/_{name.replace(' ', '_')}")
        answer = self._ask("POST", url + route, TOKEN)
        if answer == 0:
            raise NotThere(target)
        self._fleet.watch.add(name, str(answer))
        return (lambda: self._ask("POST", f"{url}/resume", TOKEN) and None) if name == "pause" else nothing

    @staticmethod
    def _ask(method: str, url: str, token: str) -> int:
        """Return the status; 0 for no answer."""
        request = urllib.request.Request(url, method=method, headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def _beside(self, name: str, target: str) -> Callable[[], None]:
        """Start a process that does not belong there."""
        who, role, arguments, env = _BESIDE[name]
        fleet, other = self._fleet, self._fleet.folder / "other-model"
        if name == "server of another model":
            save_model(other, hidden_size=16)
        known = {
            "folder": fleet.folder,
            "port": free_port(),
            "queue": fleet.queue_url,
            "other": other,
            "target": target,
        }
        process = fleet.spawn(who, fleet.command(role, *(word.format(**known) for word in arguments)), **env)

        def end() -> None:
            """What does not end by itself is stopped as a person would."""
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDS_WITHIN_S)
            self._signal_pid(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDS_WITHIN_S)
            self._signal_pid(process.pid, signal.SIGKILL)
            process.wait()

        return end

    def _filled(self) -> Callable[[], None]:
        folder = self._fleet.run_dir.parent
        if not os.path.ismount(folder):
            raise NotThere("its own disk")
        filler = folder / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        return lambda: filler.unlink(missing_ok=True)

    def _truncate(self) -> Callable[[], None]:
        """Kill the learner, and cut off the newest checkpoint before the run continues."""
        fleet = self._fleet
        found = checkpoints.complete(fleet.run_dir)
        if len(found) < 2 or fleet.up is None:
            raise NotThere("a second checkpoint")
        fleet.held = True
        try:
            self._signal("learner", signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                fleet.up.wait(ENDS_WITHIN_S)
            newest = checkpoints.complete(fleet.run_dir)
            files = sorted(Path(newest[max(newest)]).rglob("*.safetensors"))
            for file in files:
                os.truncate(file, file.stat().st_size // 2)
            time.sleep(1.0)
        finally:
            fleet.held = False
        return nothing


def nothing() -> None:
    """Undo what needs no undoing."""


_OTHER_SERVER = ["--vllm.port", "{port}", "--join", "{queue}", "--name", "stranger", "--model.path", "{other}"]
_OTHER_TOKEN = {"SLIPSTREAM_TOKEN": "f" * 32}
# Who is heard, the command, its arguments, and further variables.
_BESIDE: dict[str, tuple[str, str, list[str], dict[str, str]]] = {
    "worker with a wrong token": ("stranger", "worker", ["--name", "stranger"], _OTHER_TOKEN),
    "two learners": ("second", "learner", ["--resume"], {}),
    "server of another model": ("stranger", "vllm", _OTHER_SERVER, {}),
    "two workers of one name": ("second", "worker", ["--queue", "{queue}", "--name", "{target}"], {}),
    "two queues": ("second", "queue", ["--queue.port", "{port}"], {}),
    "worker with other data": (
        "other",
        "worker",
        ["--name", "other", "--task.path", "{folder}/night_task.py:fewer"],
        {},
    ),
}
