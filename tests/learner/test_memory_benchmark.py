"""The benchmark of a sharded learner's memory measures each rank in each phase, in both ways."""

from __future__ import annotations

import pytest

from benchmarks.learner_memory import PARTS_OF_PHASE, measure


@pytest.mark.wide
@pytest.mark.parametrize("whole", [False, True], ids=["by part", "whole"])
def test_each_phase_of_each_rank_is_measured(whole: bool) -> None:
    found = measure(million=1, ranks=2, whole=whole)
    assert found["way"] == ("whole" if whole else "by part")
    assert found["model_bytes"] > 12e6 * 4
    for phase, parts in PARTS_OF_PHASE.items():
        assert len(found["peak_bytes"][phase]) == 2
        # A rank holds half of what it loads, or all of it; what it writes it has already.
        least = 0 if phase == "checkpoint" else parts * found["model_bytes"] / (1 if whole else 2)
        assert min(found["peak_bytes"][phase]) >= 0.9 * least
        assert found["seconds"][phase] > 0
