"""`deploy/Containerfile`, as far as it can be tried without a container engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slipstream.deploy.clusters import kubernetes

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "Containerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def instructions() -> list[tuple[str, str]]:
    """Return each instruction with its arguments, lines joined and comments left out."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, _, rest in (line.partition(" ") for line in lines)]


def arguments(name: str) -> list[str]:
    return [rest for each, rest in instructions() if each == name]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """What the image has of the repository, in its places."""
    for rest in arguments("COPY"):
        *sources, place = rest.split()
        for source in sources:
            target = tmp_path / place / (Path(source).name if place == "./" else "")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, target)
    return tmp_path


def test_every_package_of_the_project_is_copied(copied: Path) -> None:
    links = [path.name for path in (ROOT / "slipstream").iterdir() if path.is_symlink()]
    assert "learner" in links
    for name in ("", *links):
        assert (copied / "slipstream" / name / "__init__.py").is_file()
    for name in ("pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]):
        assert (copied / name).is_file()


def test_what_is_copied_runs_and_can_be_installed(copied: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(copied)}
    where = "import slipstream.deploy.cli as cli; print(cli.__file__); cli.app(['init', 'begun'])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(copied)), "the copy, not this checkout"
    assert (tmp_path / "begun" / "run.toml").is_file()
    build = "from setuptools.build_meta import prepare_metadata_for_build_editable as build; print(build('.'))"
    done = subprocess.run([sys.executable, "-P", "-c", build], cwd=copied, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_image_runs_slipstream_as_the_user_and_in_the_folder_of_the_manifests() -> None:
    assert json.loads(arguments("ENTRYPOINT")[0]) == ["slipstream"]
    assert PROJECT["project"]["scripts"].keys() == {"slipstream"}
    assert arguments("USER") == [f"{kubernetes.USER}:{kubernetes.USER}"]
    assert f"useradd --uid {kubernetes.USER} " in FILE.read_text(encoding="utf-8")
    assert arguments("WORKDIR")[-1] == kubernetes.WORK
    assert f"mkdir {kubernetes.WORK} {kubernetes.RUNS}" in FILE.read_text(encoding="utf-8")
    names = [name for name, _ in instructions()]
    assert "RUN" not in names[names.index("USER") :], "nothing is installed as the user"


def test_its_extras_and_shell_are_right() -> None:
    (extras,) = [rest.partition("=")[2] for rest in arguments("ARG") if rest.startswith("EXTRAS=")]
    assert {*extras.split(",")} <= PROJECT["project"]["optional-dependencies"].keys()
    for rest in arguments("RUN"):
        assert subprocess.run(["bash", "-n", "-c", rest], timeout=20).returncode == 0, rest
    used = {name for rest in arguments("RUN") for name in re.findall(r"\$\{(\w+)\}", rest)}
    assert used <= {rest.partition("=")[0] for rest in arguments("ARG")}


def test_no_secret_and_no_registry_is_named() -> None:
    assert re.findall(r"TOKEN|https?://", FILE.read_text(encoding="utf-8")) == []
    (base,) = arguments("FROM")
    assert "/" not in base
