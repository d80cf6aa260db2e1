"""What holds for all sandboxes. Containers and remote ones are played by stand-ins that run programs on this machine:
a program `podman` that reads the options, and clients with the calls of E2B 2.63, Modal 1.6 and Daytona 0.226."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.protocol.config import ConfigError
from slipstream.sandboxes import (
    ContainerSandbox,
    DaytonaSandbox,
    E2BSandbox,
    Limits,
    ModalSandbox,
    Sandbox,
    SealedSandbox,
)

LIMITS = Limits(4.0, 400, 2000)

# Runs what follows the image, within --memory, and notes its options; `kill` ends it.
PODMAN = """#!{python}
import os, resource, sys
here = os.path.dirname(__file__)
with open(here + "/called", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] in ("kill", "rm"):
    sys.exit(0)
if "no-such-image" in sys.argv:
    print("image not known")
    sys.exit(125)
memory = int(next(a for a in sys.argv if a.startswith("--memory=")).split("=")[1][:-1]) << 20
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
os.execv("{python}", ["{python}", "-I", "-"])
"""


def podman(folder: Path) -> str:
    program = folder / "podman"
    program.write_text(PODMAN.replace("{python}", sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def shell(line: str) -> Any:
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)


class Remote:
    """The state of all stand-ins: what was opened, and what was ended."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.ended = 0

    def end(self, *_: Any, **__: Any) -> None:
        self.ended += 1

    def e2b(self) -> Any:
        class CommandExitException(Exception):
            stdout, stderr, exit_code = "", "", 0

        def run(line: str, timeout: float) -> Any:
            ran = shell(line)
            if ran.returncode:
                error = CommandExitException()
                error.stdout, error.stderr, error.exit_code = ran.stdout, ran.stderr, ran.returncode
                raise error
            return SimpleNamespace(stdout=ran.stdout, stderr=ran.stderr, exit_code=0)

        def create(template: Any, timeout: int, allow_internet_access: bool) -> Any:
            self.opened.append(allow_internet_access)
            return SimpleNamespace(commands=SimpleNamespace(run=run), kill=self.end)

        return SimpleNamespace(Sandbox=SimpleNamespace(create=create), CommandExitException=CommandExitException)

    def modal(self) -> Any:
        def execute(*command: str, timeout: int) -> Any:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            streams = [SimpleNamespace(read=lambda text=text: text) for text in (ran.stdout, ran.stderr)]
            return SimpleNamespace(stdout=streams[0], stderr=streams[1], wait=lambda: ran.returncode)

        def create(app: Any, image: Any, timeout: int, memory: int, block_network: bool) -> Any:
            self.opened.append(not block_network)
            return SimpleNamespace(exec=execute, terminate=self.end)

        return SimpleNamespace(
            Sandbox=SimpleNamespace(create=create),
            App=SimpleNamespace(lookup=lambda name, create_if_missing: name),
            Image=SimpleNamespace(debian_slim=lambda: "debian"),
        )

    def daytona(self) -> Any:
        def execute(line: str, timeout: int) -> Any:
            ran = shell(line)
            return SimpleNamespace(result=ran.stdout + ran.stderr, exit_code=ran.returncode)

        def create(params: Any) -> Any:
            self.opened.append(not params.network_block_all)
            return SimpleNamespace(process=SimpleNamespace(exec=execute))

        client = SimpleNamespace(create=create, delete=self.end)
        return SimpleNamespace(
            Daytona=lambda: client, CreateSandboxFromImageParams=SimpleNamespace, Resources=SimpleNamespace
        )


REMOTE: dict[str, tuple[str, type[Any]]] = {
    "e2b": ("e2b", E2BSandbox),
    "modal": ("modal", ModalSandbox),
    "daytona": ("daytona", DaytonaSandbox),
}


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Remote:
    state = Remote()
    for name in REMOTE:
        monkeypatch.setitem(sys.modules, name, getattr(state, name)())
    return state


MAKERS: dict[str, Callable[[Path, Limits], Sandbox]] = {
    "sealed": lambda folder, limits: SealedSandbox(limits, processes=1),
    "container": lambda folder, limits: ContainerSandbox("python", limits, podman(folder)),
    **{name: lambda folder, limits, made=made: made(limits) for name, (_, made) in REMOTE.items()},
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest, tmp_path: Path, remote: Remote) -> Iterator[Callable[[Limits], Sandbox]]:
    opened: list[Sandbox] = []

    def made(limits: Limits) -> Sandbox:
        opened.append(MAKERS[request.param](tmp_path, limits))
        return opened[-1]

    yield made
    for sandbox in opened:
        sandbox.close()


def test_it_prints_and_tells_how_a_program_ended(make: Callable[[Limits], Sandbox]) -> None:
    sandbox = make(LIMITS)
    assert sandbox.run("print(2 ** 5)\nprint('it is \"quoted\" $HOME')").strip() == '32\nit is "quoted" $HOME'
    assert "ZeroDivisionError" in sandbox.run("1 / 0")
    # podman and docker end so themselves where they can run nothing.
    assert sandbox.run("print('a')\nraise SystemExit(125)").split("\n") in (
        ["a", "(it ended with code 125)"],
        ["a", "", "(it ended with code 125)"],
    )
    said = sandbox.run("import sys\nsys.exit('there is no such word')")
    assert "there is no such word" in said
    assert "(it ended with code 1)" in said
    assert sandbox.run("raise SystemExit") == ""


def test_its_limits_hold(make: Callable[[Limits], Sandbox]) -> None:
    assert "Memory" in make(LIMITS).run("x = bytearray(10 ** 9)")
    flood = make(LIMITS).run("for _ in range(20_000): print('x' * 99)")
    assert 1000 < len(flood) < 2200
    late = make(Limits(1.0, 400, 2000)).run("import itertools\nfor _ in itertools.count(): pass")
    assert "its time was over" in late or "takes too long" in late
    assert "at most" in make(LIMITS).run("#" * 200_000)


@pytest.mark.parametrize("name", REMOTE)
def test_a_remote_one_is_opened_once_without_network_and_ended(name: str, remote: Remote) -> None:
    sandbox = REMOTE[name][1](LIMITS)
    assert sandbox.run("print(1)") == sandbox.run("print(1)") == "1"
    assert remote.opened == [False]
    sandbox.close()
    sandbox.close()
    assert remote.ended == 1


@pytest.mark.parametrize("name", REMOTE)
def test_without_its_client_it_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        REMOTE[name][1]()


def test_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="cannot run 'no-such-image': image not known"):
        ContainerSandbox("no-such-image", LIMITS, podman(tmp_path)).run("print(1)")
    assert "its time was over" in ContainerSandbox("python", Limits(1.0), podman(tmp_path)).run("while True: pass")
    called = (tmp_path / "called").read_text().splitlines()[-3:]
    assert "--network=none" in called[0]
    assert "--memory=512m" in called[0]
    assert "--env=HTTPS_PROXY= " in called[0], "a proxy's password does not reach the program"
    # Its client was killed, and then the container itself.
    name = next(word for word in called[0].split() if word.startswith("--name=")).removeprefix("--name=")
    assert called[1:] == [f"kill {name}", f"rm --force {name}"]
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="podman or docker, which is not installed"):
        ContainerSandbox()
