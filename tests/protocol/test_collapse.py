"""Which histories of a run are a destroyed policy, and which are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from slipstream.protocol.collapse import Row, find_collapse

# The quickstart's first steps at its own rate, without a warm-up (two cores, real vLLM; 2026-11-28): the policy becomes
# surer and its reward rises.
QUICKSTART = [
    {"reward": 0.54, "entropy": 0.22, "kl": 0.0, "ess": 1.0, "sampler/kl_staleness_0": 0.0},
    {"reward": 0.50, "entropy": 0.18, "kl": 0.013, "ess": 0.986, "sampler/kl_staleness_1": 0.018},
    {"reward": 0.72, "entropy": 0.11, "kl": 0.013, "ess": 0.984, "sampler/kl_staleness_2": 0.12},
    {"reward": 0.80, "entropy": 0.075, "kl": 0.0023, "ess": 0.995, "sampler/kl_staleness_1": 0.0027},
    {"reward": 0.93, "entropy": 0.063, "kl": 0.0019, "ess": 0.998, "sampler/kl_staleness_1": 0.0033},
    {"reward": 0.91, "entropy": 0.056, "kl": 0.0009, "ess": 0.998, "sampler/kl_staleness_1": 0.0013},
    {"reward": 0.87, "entropy": 0.040, "kl": 0.0008, "ess": 0.997, "sampler/kl_staleness_1": -0.0008},
    {"reward": 0.92, "entropy": 0.032, "kl": 0.0013, "ess": 0.998, "sampler/kl_staleness_1": 0.0024},
    {"reward": 0.86, "entropy": 0.016, "kl": 0.0001, "ess": 1.0, "sampler/kl_staleness_1": -0.0001},
]
# The quickstart at 0.02 and a staleness of 0, where groups of equal rewards are kept.
ALONE = [
    {"reward": reward, "entropy": entropy, "kl": 0.0, "ess": 1.0, "sampler/kl_staleness_0": 0.0}
    for reward, entropy in ((0.52, 0.24), (0.0, 1.14), (0.0, 0.59), (0.0, 1.69), (0.0, 2.70), (0.0, 3.75))
]
FINE = {"reward": 0.2, "entropy": 1.0, "kl": 0.001, "ess": 0.99, "grad_norm": 0.4, "learning_rate": 0.02}
LOST = {"reward": 0.0, "entropy": 0.4, "kl": 16.0, "ess": 0.0005, "sampler/kl_staleness_1": 17.0}
RANDOM = {"reward": 0.0, "entropy": 9.8, "kl": 0.0, "ess": 1.0}
FROZEN = {"reward": 0.0, "entropy": 0.001, "kl": 0.0, "ess": 1.0}


def numbered(rows: Sequence[Mapping[str, float]], first: int = 1) -> list[Row]:
    return [{"step": float(step), **row} for step, row in enumerate(rows, start=first)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([FINE, LOST], (1, 0, 2), id="the first update destroys it"),
        pytest.param([*QUICKSTART, LOST], (9, 8, 10), id="a later update does"),
        pytest.param([LOST], (0, 0, 1), id="seen at the first step after a resume"),
        pytest.param([{**FINE, "reward": 0.0}, {**LOST, "sampler/kl_staleness_0": 0.001}], (1, 0, 2), id="fresh agree"),
        pytest.param([FINE, RANDOM, RANDOM], (1, 0, 3), id="random, at a staleness of 0"),
        pytest.param([FINE, FINE, FROZEN, FROZEN], (2, 1, 4), id="frozen, at a staleness of 0"),
        pytest.param(ALONE, (1, 0, 6), id="random little by little, since the first update"),
        pytest.param([*[{**FINE, "reward": 0.0}] * 4, RANDOM, RANDOM], (4, 3, 6), id="random, and never rewarded"),
        pytest.param([FINE, RANDOM], None, id="one such step may be chance"),
        pytest.param([FINE, RANDOM, FINE], None, id="and it may be over"),
        pytest.param(QUICKSTART, None, id="the quickstart"),
        pytest.param([FINE, *[{**FROZEN, "reward": 0.9}] * 3], None, id="surer, and better for it"),
        pytest.param([{**FINE, "reward": 0.0}, *[FROZEN] * 3], None, id="surer of what was never rewarded"),
        pytest.param([FINE, *[{**FINE, "reward": 0.0}] * 3], None, id="a reward that breaks"),
        pytest.param([FINE, *[{**RANDOM, "reward": 0.3}] * 2], None, id="more random, and better for it"),
        pytest.param([FINE, {**LOST, "sampler/kl_staleness_0": 15.0}], None, id="a server with other weights"),
        pytest.param([FINE, {**FINE, "sampler/kl_staleness_4": 3.0}], None, id="a few old tokens among many"),
        pytest.param([FINE, {**FINE, "kl": 8.0, "ess": 0.001, "sampler/kl_staleness_1": 0.02}], None, id="one token"),
        pytest.param([FINE, {"reward": 0.0}], None, id="figures that are missing"),
        pytest.param([], None, id="no step"),
    ],
)
def test_a_collapse_names_the_update_the_last_good_step_and_where_it_is_seen(
    rows: Sequence[Mapping[str, float]], expected: tuple[int, int, int] | None
) -> None:
    found = find_collapse(numbered(rows))
    assert (None if found is None else (found.step, found.good_step, found.seen_at)) == expected


def test_no_part_of_a_healthy_run_is_a_collapse() -> None:
    assert [find_collapse(numbered(QUICKSTART[: end + 1])) for end in range(len(QUICKSTART))] == [None] * 9


def test_it_says_the_figures_the_rate_and_what_to_set() -> None:
    found = find_collapse(numbered([FINE, LOST]))
    assert found is not None
    assert (found.learning_rate, found.grad_norm) == (0.02, 0.4)
    text = found.describe(0.02, 0.002)
    assert all(part in text for part in ("step 1", "17 nats", "kl 16, ess 0.0005", "ess 0.99 at step 1", "0.002"))
