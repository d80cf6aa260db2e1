"""`benchmarks.gpu_day` runs in its small form, its figures are read from a run's files, and the page has its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_day, gpu_serving
from benchmarks.gpu_day import FAILED, NEEDS_GPU, PASSED, SECTIONS, STAND_IN, TIMED_OUT, Section
from docs.generate.measured_on_gpus import PAGE, page


@pytest.mark.wide
def test_the_small_form_runs_and_claims_nothing_about_gpus(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: run python -m benchmarks.gpu_day --part 1 --part 2")
    out = tmp_path / "day.json"
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--small", "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:]
    results = json.loads(out.read_text(encoding="utf-8"))
    assert results == json.loads(ended.stdout)
    found = results["sections"]
    for section in SECTIONS:
        if section.part == 3:
            assert section.name not in found
        else:
            assert found[section.name]["status"] == (STAND_IN if section.on_cpu else NEEDS_GPU)
            assert bool(found[section.name]["figures"]) == section.on_cpu
    text = gpu_day.table(results)
    assert PASSED not in text
    assert text.count(NEEDS_GPU) == sum(not section.on_cpu for section in SECTIONS if section.part < 3)


def test_a_section_that_hangs_or_fails_costs_its_own_result_only(monkeypatch: pytest.MonkeyPatch) -> None:
    late = gpu_day.run(Section(1, "attention", "", 0.5, True), small=True, model="m", on_gpu=False)
    assert late["status"] == TIMED_OUT, "torch alone takes longer to load"
    wrong = gpu_day.run(Section(1, "no_such_section", "", 60, True), small=True, model="m", on_gpu=False)
    assert wrong["status"] == FAILED
    assert "StopIteration" in wrong["error"]


def test_each_part_without_vllm_fits_ten_minutes_even_if_every_section_hangs() -> None:
    for part in (1, 2):
        limits = [section.limit_s for section in SECTIONS if section.part == part]
        assert sum(limits) <= 600


def test_figures_of_a_run_leave_out_its_first_steps() -> None:
    slow = {"step_time": 100.0, "tokens_sampled": 1, "tokens_trained": 1, "weight_sync/pause_s": 9.0}
    fast = {"step_time": 2.0, "tokens_sampled": 300, "tokens_trained": 200, "weight_sync/pause_s": 0.02}
    late = {"step_time": 2.0, "tokens_sampled": 100, "tokens_trained": 100}  # no publication counted
    figures = gpu_serving.of_steps([slow] * gpu_serving.WARM_UP + [fast, fast, late])
    assert figures == {
        "s a step": 2.0,
        "pause s": 0.02,
        "sampled tokens/s": pytest.approx(700 / 6),
        "trained tokens/s": pytest.approx(500 / 6),
    }


def test_the_page_has_the_table_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make it again: python -m docs.generate measured_on_gpus"
