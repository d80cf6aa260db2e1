"""Which conversations a step learns from, and what their rows weigh."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from slipstream.learner.feed.demonstrations import Demonstrations, held_out, rows_of, taught_tokens
from slipstream.learner.model.policy import Policy
from slipstream.protocol.demonstrations import Demonstration, TaughtSegment
from tests.kit.messages import VOCABULARY


def conversations(lengths: list[int], seed: int = 0) -> list[Demonstration]:
    """Conversations that begin alike, as with the same tools, some of two segments."""
    random = np.random.default_rng(seed)
    made = []
    for row, length in enumerate(lengths, start=1):
        segments = []
        for _ in range(1 + row % 2):
            ids = random.integers(0, VOCABULARY, length).astype(np.int32)
            ids[:3] = 7
            taught = random.random(length) < 0.5
            taught[-1] = True
            segments.append(TaughtSegment(ids, taught))
        made.append(Demonstration(row, segments))
    return made


@given(
    count=st.integers(1, 30),
    batch=st.integers(1, 40),
    epochs=st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0]),
    seed=st.integers(0, 5),
)
def test_each_comes_once_in_an_epoch_and_a_resume_takes_what_would_have_come(
    count: int, batch: int, epochs: float, seed: int
) -> None:
    some = conversations([5] * count)
    taken = Demonstrations(some, batch, seed, epochs)
    by_step = [[of.row for of in taken.of_step(step)] for step in range(1, taken.steps + 1)]
    rows = [row for each in by_step for row in each]
    assert len(rows) == math.ceil(epochs * count)
    whole = len(rows) // count
    assert all(Counter(rows[n * count : (n + 1) * count]) == Counter(range(1, count + 1)) for n in range(whole))
    assert all(len(each) == batch for each in by_step[:-1])
    assert 0 < len(by_step[-1]) <= batch
    assert taken.epoch_after(taken.steps) == pytest.approx(len(rows) / count)
    again = Demonstrations(some, batch, seed, epochs)
    assert [of.row for of in again.of_step(taken.steps)] == by_step[-1]
    endless = Demonstrations(some, batch, seed)
    assert [of.row for of in endless.of_step(1)][: len(by_step[0])] == by_step[0]
    assert len(endless.of_step(1000)) == batch


@pytest.mark.parametrize(
    ("count", "share", "expected"), [(1, 0.5, 0), (2, 0.9, 1), (10, 0.0, 0), (20, 0.05, 1), (500, 0.05, 25)]
)
def test_some_are_held_out_and_one_is_always_left(count: int, share: float, expected: int) -> None:
    some = conversations([4] * count)
    taught, kept = held_out(some, share, seed=3)
    assert len(kept) == expected
    assert sorted(of.row for of in [*taught, *kept]) == [of.row for of in some]
    assert ([of.row for of in held_out(some, share, seed=3)[1]]) == [of.row for of in kept]


@pytest.mark.parametrize(
    ("budget", "branches", "ranks"), [(64, True, 1), (64, False, 1), (1000, True, 1), (1000, True, 3)]
)
def test_rows_weigh_each_taught_token_alike_however_they_are_packed(
    make_policy: Callable[..., Policy], model_path: Path, budget: int, branches: bool, ranks: int
) -> None:
    """Against each sequence alone, in float64: the mean over all taught tokens, the first of a sequence left out."""
    some, policy, plain = (
        conversations([12, 30, 7, 25, 40]),
        make_policy(),
        Qwen3ForCausalLM.from_pretrained(model_path),
    )
    rows = rows_of(some, 0.25, budget, branches, ranks)
    if ranks > 1:
        assert len(rows) >= ranks
    with torch.no_grad():
        scores = [policy(row, 1.0) for row in rows]
    loss = sum(
        -float(of.logprobs.double().sum()) * row.supervised
        for of, row in zip(scores, rows, strict=True)
        if row.supervised
    )
    right: list[float] = []
    hits: list[bool] = []
    for segment in (segment for of in some for segment in of.segments):
        with torch.no_grad():
            logits = plain.double()(torch.from_numpy(segment.token_ids.astype(np.int64))[None]).logits[0]
        logprobs = logits.log_softmax(-1)[:-1]
        targets = torch.from_numpy(segment.token_ids[1:].astype(np.int64))
        chosen = torch.from_numpy(segment.loss_mask[1:])
        right += (-logprobs.gather(1, targets[:, None])[:, 0])[chosen].tolist()
        hits += (logprobs.argmax(-1) == targets)[chosen].tolist()
    assert loss == pytest.approx(0.25 * np.mean(right), rel=1e-5)
    assert sum(taught_tokens(some)) == len(right)
    assert sum(int(of.best.sum()) for of in scores if of.best is not None) == sum(hits)
