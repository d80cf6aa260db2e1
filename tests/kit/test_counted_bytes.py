"""The counter of bytes, which stands in for a device's."""

from __future__ import annotations

import threading

import torch

from tests.kit.counted_bytes import counting_bytes

MIB = 1 << 20


def test_what_lives_at_once_is_told_from_what_was_made() -> None:
    with counting_bytes() as counter:
        for _ in range(3):
            kept = torch.empty(MIB, dtype=torch.uint8)
        view = kept[10:].view(-1)
        assert (counter.live, counter.peak, counter.made) == (MIB, 2 * MIB, {"cpu": 3 * MIB})
        del kept
        assert counter.live == MIB, "a view keeps it"
        del view
        assert (counter.live, counter.peak) == (0, 2 * MIB)


def test_copies_are_counted_by_where_they_come_from_and_go_to() -> None:
    source = torch.zeros(MIB, dtype=torch.bfloat16)
    with counting_bytes() as counter:
        target = torch.empty(MIB, dtype=torch.float32)
        target.copy_(source)
        source.to(torch.float64)
        target.to("meta")
    assert counter.copied == {"cpu -> cpu": (4 + 8) * MIB, "cpu -> meta": 4 * MIB}


def test_threads_that_begin_inside_count_and_others_do_not() -> None:
    class Worker(threading.Thread):
        def run(self) -> None:
            torch.zeros(MIB, dtype=torch.uint8)

    with counting_bytes() as counter:
        worker = Worker()
        worker.start()
        worker.join()
        assert (counter.live, counter.peak) == (0, MIB)
    late = Worker()
    late.start()
    late.join()
    assert counter.made == {"cpu": MIB}
