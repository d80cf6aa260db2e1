"""`deploy/setup.sh`: what it installs with, in a checkout whose python is a stand-in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "deploy" / "setup.sh"
LIMIT_S = 60

# Notes what it is called with; `uv` and `pip` in a file of that name say with which exit code these end. Code, and what
# reads from a pipe, runs in the real interpreter.
PYTHON = """#!/usr/bin/env bash
line="$*"
case "$*" in
  "-c import torchvision") exit 1 ;;
  -c*) exec "$REAL_PYTHON" "$@" ;;
  "-m pip config list") cat "$STAGE/pip-config" ;;
  "-m pip install"*" uv") echo "uv itself" >>"$STAGE/calls"; exit "$(cat "$STAGE/uv-itself")" ;;
  "-m uv pip install"*)
    echo "uv ${line#*-e } $UV_DEFAULT_INDEX|$UV_INDEX|$UV_INDEX_STRATEGY|$UV_FIND_LINKS" >>"$STAGE/calls"
    exit "$(cat "$STAGE/uv")"
    ;;
  "-m pip install"*)
    echo "pip ${line#*-e }" >>"$STAGE/calls"
    echo "a word of pip's"
    exit "$(cat "$STAGE/pip")"
    ;;
  "-m pip uninstall"*) echo "without ${line#*-y }" >>"$STAGE/calls" ;;
  *) exit 99 ;;
esac
"""
UNFIT = "without torchvision torchaudio torchcodec"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("deploy", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(SETUP, tmp_path / "deploy" / "setup.sh")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    for name, text in {"pip-config": "", "uv-itself": "0", "uv": "0", "pip": "0", "calls": ""}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def set_up(checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
    script = f'set -euo pipefail; source "{checkout}/deploy/setup.sh"; slipstream_setup'
    environment = {"PATH": "/usr/bin:/bin", "STAGE": str(checkout), "REAL_PYTHON": sys.executable, **env}
    (checkout / "calls").write_text("")
    return subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=LIMIT_S, cwd="/"
    )


def calls(checkout: Path) -> list[str]:
    return (checkout / "calls").read_text().replace(str(checkout), "ROOT").splitlines()


@pytest.mark.skipif(shutil.which("nvidia-smi", path="/usr/bin:/bin") is not None, reason="asks for the GPU build")
class TestOnACPU:
    def test_uv_installs_into_the_environment_and_pip_is_not_asked(self, checkout: Path) -> None:
        assert set_up(checkout).returncode == 0
        assert calls(checkout) == ["without slipstream", "uv itself", "uv ROOT[cpu] |||", UNFIT]

    def test_uv_looks_where_pip_is_told_to_look(self, checkout: Path) -> None:
        (checkout / "pip-config").write_text(
            "global.index-url='https://one.example/simple'\n"
            "global.extra-index-url='https://two.example/simple\\nhttps://three.example/simple'\n"
            "global.find-links='/far'\n"
            "install.find-links='/near /nearer'\n"
            ":env:.index-url='https://own.example/simple'\n"
            "global.timeout='60'\n"
        )
        assert set_up(checkout, SLIPSTREAM_TORCH_INDEX="https://torch.example/cpu").returncode == 0
        more = "https://two.example/simple https://three.example/simple https://torch.example/cpu"
        assert calls(checkout)[2] == (f"uv ROOT[cpu] https://own.example/simple|{more}|unsafe-best-match|/near,/nearer")

    @pytest.mark.parametrize(("device", "installed"), [("gpu", "[gpu]"), ("core", ""), ("cpu", "[cpu]")])
    def test_the_device_can_be_named(self, checkout: Path, device: str, installed: str) -> None:
        assert set_up(checkout, SLIPSTREAM_DEVICE=device).returncode == 0
        assert calls(checkout)[2] == f"uv ROOT{installed} |||"

    def test_a_variable_of_uvs_own_stays(self, checkout: Path) -> None:
        (checkout / "pip-config").write_text("global.find-links='/pips'\n")
        assert set_up(checkout, UV_FIND_LINKS="/uvs").returncode == 0
        assert calls(checkout)[2] == "uv ROOT[cpu] |||/uvs"

    @pytest.mark.parametrize("missing", ["uv-itself", "uv"])
    def test_pip_installs_where_uv_cannot_be_had_or_fails(self, checkout: Path, missing: str) -> None:
        (checkout / missing).write_text("1")
        done = set_up(checkout, SLIPSTREAM_EXTRAS="test")
        assert done.returncode == 0
        assert "setup: uv did not do it" in done.stderr
        assert calls(checkout)[-2:] == ["pip ROOT[cpu,test]", UNFIT]

    def test_where_both_fail_it_ends_with_the_log_and_tries_again_the_next_time(self, checkout: Path) -> None:
        for name in ("uv", "pip"):
            (checkout / name).write_text("1")
        index = {"SLIPSTREAM_TORCH_INDEX": "https://torch.example/cpu"}
        done = set_up(checkout, **index)
        assert done.returncode == 2
        assert "a word of pip's" in done.stderr
        assert "set SLIPSTREAM_TORCH_INDEX" in done.stderr
        assert calls(checkout)[-2:] == [
            "pip ROOT[cpu]",
            "pip ROOT[cpu] --extra-index-url https://torch.example/cpu",
        ]
        (checkout / "uv").write_text("0")
        assert set_up(checkout).returncode == 0
        assert calls(checkout) != []

    def test_the_same_again_is_no_work(self, checkout: Path) -> None:
        assert set_up(checkout).returncode == 0
        done = set_up(checkout)
        assert (done.returncode, done.stderr, calls(checkout)) == (0, "", [])


def test_the_clock_says_how_long_it_takes_and_ends_with_its_script() -> None:
    """Else who reads the output of a script that was killed would wait for its end."""
    # A second stands for ten. The code is above 128 after a time-out, and not at the end of the input.
    clock = "read() { builtin read -r -t 1; [ $? -le 128 ] || SECONDS=$((SECONDS + 9)); }"
    script = f'source "{SETUP}"; {clock}; exec 9> >(slipstream_clock installing); sleep 2.5; kill -9 $$'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stderr.startswith("setup: installing, 1")
