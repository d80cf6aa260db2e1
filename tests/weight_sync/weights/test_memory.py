"""Memory for whole models: used again, taken ahead, mapped by others."""

from __future__ import annotations

import os
import time

import pytest
import torch

from slipstream.weight_sync.weights import host_memory
from slipstream.weight_sync.weights.host_memory import HUGE, Reserve, Staging, fresh, mapped, touch

SIZES = [0, 1, HUGE - 1, HUGE, 3 * HUGE + 5]


@pytest.mark.parametrize("size", SIZES)
def test_fresh_memory_is_of_the_size_and_zero(size: int) -> None:
    flat = fresh(size)
    assert flat.shape == (size,)
    assert not flat.any()
    touch(flat)
    flat.fill_(7)
    assert int(flat.sum(dtype=torch.int64)) == 7 * size


@pytest.mark.parametrize("shared", [False, True])
def test_staging_is_made_once_for_a_size_and_views_outlive_it(shared: bool) -> None:
    staging = Staging(shared)
    first = staging.take(3 * HUGE)
    first.fill_(3)
    assert staging.take(3 * HUGE).data_ptr() == first.data_ptr()
    assert len(staging.take(HUGE)) == HUGE
    staging.forget()
    assert int(first[-1]) == 3


@pytest.mark.parametrize("size", [1, 100, 2 * HUGE + 1])
def test_another_process_sees_a_shared_buffer_under_its_place(size: int) -> None:
    staging = Staging(shared=True)
    flat = staging.take(size)
    reader, writer = os.pipe()
    place = staging.place
    child = os.fork()
    if child == 0:
        try:
            mapped(*place, size).numpy()[:] = 9  # a product of torch may wait for threads that a fork has not
            os.write(writer, b"y")
        finally:
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"y"
    os.waitpid(child, 0)
    os.close(reader)
    assert int(flat.min()) == 9


def test_a_place_that_is_gone_or_of_another_size_is_an_os_error() -> None:
    staging = Staging(shared=True)
    staging.take(100)
    place = staging.place
    with pytest.raises(OSError, match="another size than 99 bytes"):
        mapped(*place, 99)
    staging.forget()
    with pytest.raises(OSError, match=r"No such file|another size"):
        mapped(*place, 100)
    with pytest.raises(ValueError, match="not shared"):
        Staging().place  # noqa: B018


def test_a_reserve_makes_no_more_than_it_may_and_never_two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    monkeypatch.setattr(host_memory, "touch", lambda flat: (time.sleep(0.05), touched.append(len(flat))))
    reserve = Reserve(most=2)
    for _ in range(3):
        reserve.expect(100)
        reserve.expect(100)
        assert len(reserve.take(100)) == 100
    assert touched == [100, 100]
    assert len(reserve.take(50)) == 50  # of a size that nobody expected
    reserve.expect(50)
    assert len(reserve.take(50)) == 50
    assert touched == [100, 100, 50]


def test_a_reserve_whose_memory_runs_out_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.excepthook", lambda arguments: None)

    def fail(flat: torch.Tensor) -> None:
        raise MemoryError

    monkeypatch.setattr(host_memory, "touch", fail)
    reserve = Reserve(most=1)
    reserve.expect(10)
    assert len(reserve.take(10)) == 10
