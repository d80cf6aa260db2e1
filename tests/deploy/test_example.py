"""`deploy/example.sh` and `quickstart.sh`, in a checkout whose programs say what they were called with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
LIMIT_S = 60

SETUP = 'echo "extras ${SLIPSTREAM_EXTRAS:-none}" >&2;'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With the examples `multiply`, `shop` and `given`, and a folder next to them that is none. No run is active."""
    (tmp_path / "deploy").mkdir()
    for name in ("example.sh", "quickstart.sh"):
        shutil.copy(DEPLOY / name, tmp_path / "deploy" / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "deploy" / "setup.sh").write_text(f'slipstream_setup() {{ {SETUP} export PATH="{programs}:$PATH"; }}\n')
    _program(programs / "python", 'echo "python $*"')
    _program(programs / "slipstream", "exit 3")
    _program(tmp_path / "deploy" / "launch.sh", 'echo "launch $*"')
    for name, model in (("multiply", "seed-0"), ("shop", "seed-0"), ("given", "famous")):
        folder = tmp_path / "examples" / name
        folder.mkdir(parents=True)
        (folder / "build_model.py").touch()
        run, path = f'[run]\nname = "{name}-run"\n', f'path = "./models/{model}"     # a comment\n'
        (folder / "run.toml").write_text(f'# name = "no"\n{run}[model]\nname = "no"\n{path}[task]\npath = "no"\n')
    (tmp_path / "pyproject.toml").write_text('[project.optional-dependencies]\ngiven = ["a"]\nothers = ["b"]\n')
    (tmp_path / "examples" / "tiny_policy").mkdir()
    return tmp_path


def _program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def started(checkout: Path, script: str, *arguments: str, **others: str) -> subprocess.CompletedProcess[str]:
    """From elsewhere, as a user may."""
    command = ["bash", str(checkout / "deploy" / script), *arguments]
    return subprocess.run(
        command, cwd="/", env={"PATH": "/usr/bin:/bin", **others}, capture_output=True, text=True, timeout=LIMIT_S
    )


def test_the_model_is_built_and_the_run_started_with_its_seed_and_settings(checkout: Path) -> None:
    done = started(
        checkout, "example.sh", "shop", "--seed", "2", "--learner.steps", "5", "--task.mcp_servers", '["a b"]'
    )
    model = "examples/shop/models/seed-2"
    assert done.stdout.splitlines() == [
        f"python examples/shop/build_model.py --out {model} --seed 2",
        f'launch examples/shop/run.toml --model.path {model} --run.seed 2 --learner.steps 5 --task.mcp_servers ["a b"]',
    ]


def test_a_model_that_is_given_is_the_same_for_every_seed(checkout: Path) -> None:
    done = started(checkout, "example.sh", "given", "--seed", "2")
    model = "examples/given/models/famous"
    assert done.stdout.splitlines() == [
        f"python examples/given/build_model.py --out {model} --seed 2",
        f"launch examples/given/run.toml --model.path {model} --run.seed 2",
    ]


@pytest.mark.parametrize(
    ("name", "others", "extras"),
    [
        ("given", {}, "given"),
        ("given", {"SLIPSTREAM_EXTRAS": "test"}, "test,given"),
        ("shop", {}, "none"),
        ("shop", {"SLIPSTREAM_EXTRAS": "test"}, "test"),
    ],
)
def test_the_extra_with_the_examples_name_is_installed(
    checkout: Path, name: str, others: dict[str, str], extras: str
) -> None:
    assert f"extras {extras}\n" in started(checkout, "example.sh", name, **others).stderr


def test_the_quickstart_is_the_example_multiply(checkout: Path) -> None:
    done = started(checkout, "quickstart.sh", "--seed", "1")
    assert done.stdout.splitlines()[-1].startswith("launch examples/multiply/run.toml --model.path examples/multiply/")


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["tiny_policy"], ["../deploy"]])
def test_what_is_no_example_is_refused_with_those_that_there_are(checkout: Path, arguments: list[str]) -> None:
    done = started(checkout, "example.sh", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "give one of: given multiply shop" in done.stderr


@pytest.mark.parametrize("seed", [["--seed", "x"], ["--seed"]])
def test_a_seed_is_a_whole_number(checkout: Path, seed: list[str]) -> None:
    done = started(checkout, "example.sh", "shop", *seed)
    assert done.returncode == 2
    assert "give a whole number" in done.stderr


def test_an_earlier_run_is_moved_aside(checkout: Path) -> None:
    (checkout / "runs" / "shop-run").mkdir(parents=True)
    (checkout / "runs" / "shop-run" / "summary.json").write_text("earlier")
    assert started(checkout, "example.sh", "shop").returncode == 0
    (kept,) = (checkout / "runs").iterdir()
    assert kept.name.startswith("shop-run-2")
    assert (kept / "summary.json").read_text() == "earlier"


def test_a_run_that_status_says_is_over_is_moved_aside(checkout: Path) -> None:
    _program(checkout / "bin" / "slipstream", """echo '{"run":"shop-run","end":"finished"}'""")
    (checkout / "runs" / "shop-run").mkdir(parents=True)
    assert started(checkout, "example.sh", "shop").returncode == 0
    (kept,) = (checkout / "runs").iterdir()
    assert kept.name.startswith("shop-run-2")


def test_a_run_that_is_resumed_stays_where_it_is(checkout: Path) -> None:
    (checkout / "runs" / "shop-run").mkdir(parents=True)
    done = started(checkout, "example.sh", "shop", "--resume", "--learner.steps", "9")
    assert [path.name for path in (checkout / "runs").iterdir()] == ["shop-run"]
    assert "launch examples/shop/run.toml --resume --model.path" in done.stdout


def test_a_run_that_is_going_on_is_left_alone(checkout: Path) -> None:
    _program(checkout / "bin" / "slipstream", "exit 0")
    (checkout / "runs" / "shop-run").mkdir(parents=True)
    done = started(checkout, "example.sh", "shop")
    assert done.returncode == 2
    assert "is running already" in done.stderr
    assert (checkout / "runs" / "shop-run").is_dir()


def test_a_policy_that_is_not_there_yet_is_told_before_it_is_built_once(checkout: Path) -> None:
    told = "example: making the model in examples/multiply/models/seed-0"
    assert told in started(checkout, "example.sh", "multiply").stderr
    model = checkout / "examples" / "multiply" / "models" / "seed-0"
    model.mkdir(parents=True)
    (model / "config.json").touch()
    done = started(checkout, "example.sh", "multiply")
    assert told not in done.stderr
    assert "python" not in done.stdout
