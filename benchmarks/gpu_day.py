"""Tries on one GPU what a CPU cannot show, section by section, each within its own time limit.

    python -m benchmarks.gpu_day --part 1 --out gpu_day.json     # correctness, under ten minutes; no vLLM needed
    python -m benchmarks.gpu_day --part 2 --out gpu_day.json     # speed, under ten minutes; no vLLM needed
    python -m benchmarks.gpu_day --part 3 --out gpu_day.json --model Qwen/Qwen3-0.6B    # with vLLM on GPUs
    python -m benchmarks.gpu_day --small                         # parts 1 and 2, tiny, on a CPU: that the code runs
    python -m benchmarks.gpu_day --table gpu_day.json            # the table of docs/measured_on_gpus.md

A section is its own process: one that hangs, crashes or runs out of memory costs its own result only. Results are
JSON; with --out they are added to those of the file. Sections that need a GPU are named as such by --small, never as
passed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Results of a section. A stand-in shows that the code runs, and nothing about GPUs.
PASSED, FAILED, TIMED_OUT, NEEDS_GPU, STAND_IN = "passed", "failed", "timed out", "needs a GPU", "ran on a CPU"

PACKAGES = ("torch", "transformers", "accelerate", "vllm", "trl")


@dataclass(frozen=True)
class Section:
    """One thing to try.

    Attributes:
        part: 1 correctness, 2 speed, 3 with vLLM.
        name: Function of `benchmarks.gpu_correctness`, `gpu_speed` or `gpu_serving`.
        shows: What it shows, for the table.
        limit_s: Seconds after which it is ended.
        on_cpu: Whether a small form runs on a CPU.
    """

    part: int
    name: str
    shows: str
    limit_s: float
    on_cpu: bool = False


SECTIONS = (
    Section(
        1, "attention", "attention along tries against a dense mask: types, head sizes, levels, gradients", 90, True
    ),
    Section(1, "agreement", "a step's gradient is no further from float32 than a padded loop's", 60, True),
    Section(1, "snapshot", "a snapshot is the weights in the servers' type; how long the learner waits", 90, True),
    Section(1, "no_synchronisation", "rows run without waiting for the host", 45),
    Section(1, "checksums", "checksums on the GPU are those on the host, and show a changed bit", 45),
    Section(1, "ipc", "two processes share memory of the GPU, and outlive each other", 60),
    Section(1, "nccl", "NCCL by our binding: join, broadcast, abort", 45),
    Section(1, "nccl_on_one_gpu", "two ranks on one GPU are refused, and do not hang", 60),
    Section(1, "device_tests", "the tests that use a GPU where there is one", 105),
    Section(2, "learner", "a step next to a padded loop, and TRL where it is installed", 120, True),
    Section(
        2,
        "masters",
        "float32 weights, products in bfloat16: seconds, MFU and peak, by row and checkpointing",
        300,
        True,
    ),
    Section(2, "head", "the output layer by learner.logits_mib", 60, True),
    Section(2, "sharded", "fully_shard on one rank, with and without its mixed precision", 60, True),
    Section(2, "profile", "share of a step in which the GPU computes", 60, True),
    Section(3, "quickstart", "a run on real vLLM by transport: tokens a second, publication, pause, MFU", 3600),
)

_MODULES = {1: "benchmarks.gpu_correctness", 2: "benchmarks.gpu_speed", 3: "benchmarks.gpu_serving"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2, 3), action="append", help="may be given again")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on a CPU as well")
    parser.add_argument("--only", nargs="+", choices=[section.name for section in SECTIONS], help="these sections")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="of part 3")
    parser.add_argument("--out", type=Path, help="JSON file to add the results to")
    parser.add_argument("--table", type=Path, help="print the table of this JSON file, and run nothing")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text(encoding="utf-8"))))
    elif arguments.section:
        section = next(each for each in SECTIONS if each.name == arguments.section)
        function = getattr(import_module(_MODULES[section.part]), section.name)
        figures = function(arguments.model) if section.part == 3 else function(arguments.small)
        print(json.dumps(figures))
    else:
        parts = arguments.part or ([1, 2] if arguments.small else [])
        wanted = [each for each in SECTIONS if each.name in (arguments.only or [])] or [
            each for each in SECTIONS if each.part in parts
        ]
        if not wanted:
            parser.error("say --part 1, 2 or 3, --only SECTION, or --small")
        _run_all(wanted, arguments.small, arguments.model, arguments.out)


def _run_all(wanted: Iterable[Section], small: bool, model: str, out: Path | None) -> None:
    here = machine()
    if here["gpu"] is None and not small:
        sys.exit("gpu_day: torch finds no GPU here; --small tries the code on a CPU")
    kept = json.loads(out.read_text(encoding="utf-8")) if out is not None and out.exists() else {}
    results = {"machine": here, "small": small, "sections": dict(kept.get("sections", {}))}
    for section in wanted:
        result = run(section, small, model, on_gpu=here["gpu"] is not None)
        results["sections"][section.name] = result
        print(f"{section.name}: {result['status']}, {result['seconds']} s", file=sys.stderr, flush=True)
        if out is not None:  # a machine that is taken away costs what is under way only
            out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))
    if any(result["status"] in (FAILED, TIMED_OUT) for result in results["sections"].values()):
        sys.exit(1)


def run(section: Section, small: bool, model: str, on_gpu: bool) -> dict[str, Any]:
    """Run a section in its own process.

    Returns:
        `status`, `seconds`, `figures`, and for a section that failed the end of its output as `error`.
    """
    if not on_gpu and not section.on_cpu:
        return {"status": NEEDS_GPU, "seconds": 0.0, "figures": {}}
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--section", section.name, "--model", model]
    command += ["--small"] if small else []
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=section.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
        return {"status": TIMED_OUT, "seconds": section.limit_s, "figures": {}, "error": errors[-2000:]}
    seconds = round(time.monotonic() - began, 1)
    if process.returncode:
        return {"status": FAILED, "seconds": seconds, "figures": {}, "error": errors[-2000:]}
    figures = json.loads(output.strip().splitlines()[-1])
    return {"status": PASSED if on_gpu else STAND_IN, "seconds": seconds, "figures": figures}


def machine() -> dict[str, Any]:
    """Describe the machine, asking torch in its own process: sections want the GPU's memory for themselves."""
    asked = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    answer = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"gpu": answer or None, "cores": os.cpu_count(), "packages": found}


def table(results: Mapping[str, Any] | None) -> str:
    """Return the results as a Markdown table; None for those of a day that has not come."""
    found = (results or {}).get("sections", {})
    lines = ["| part | section | shows | result |", "|---|---|---|---|"]
    for section in SECTIONS:
        result = found.get(section.name)
        text = "not run" if result is None else f"{result['status']}{_figures(result['figures'])}"
        lines.append(f"| {section.part} | `{section.name}` | {section.shows} | {text} |")
    return "\n".join(lines)


def _figures(figures: Mapping[str, Any]) -> str:
    return "".join(f"<br>{name} {_shown(value)}" for name, value in figures.items())


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
