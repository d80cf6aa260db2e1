"""The record of what was trained: cut short by kills, cut back by resumes, and never taken for what it is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slipstream.protocol import codec, trained_record
from slipstream.protocol.trained_record import Head, RecordError
from tests.kit import group

Entry = tuple[int, int, str]


def write(path: Path, *entries: Entry, dropped: str | None = None, lease: str = "l", groups: int | None = None) -> int:
    """Append groups: each a step, the version that it made, and a ticket; `groups` of each batch were to be written.
    Returns the bytes of the last."""
    path.parent.mkdir(exist_ok=True)
    size = 0
    with path.open("ab") as file:
        if not file.tell():
            file.write(trained_record.RECORD_MAGIC)
        for step, version, ticket in entries:
            payload = codec.encode(group(ticket))
            size = trained_record.write_entry(
                file, Head(step, version, ticket, lease, 0, len(payload), dropped, groups), payload
            )
    return size


def found(path: Path) -> list[tuple[int, int, list[str]]]:
    return [
        (of.step, of.version, [place.head.ticket_id for place in of.trained])
        for of in trained_record.read_record(path).steps
    ]


def test_what_was_written_is_read_by_step(tmp_path: Path) -> None:
    write(trained_record.record_part(tmp_path, 1), (1, 1, "0.0"), (1, 1, "1.0"), (2, 2, "3.0"))
    write(trained_record.record_part(tmp_path, 2), (3, 3, "2.0"))
    assert found(tmp_path) == [(1, 1, ["0.0", "1.0"]), (2, 2, ["3.0"]), (3, 3, ["2.0"])]
    assert found(trained_record.record_part(tmp_path, 2)) == [(3, 3, ["2.0"])]
    place = trained_record.read_record(tmp_path).steps[1].trained[0]
    assert codec.encode(place.group()) == codec.encode(group("3.0"))


def test_parts_are_read_by_number_and_not_by_name(tmp_path: Path) -> None:
    for number in (1_000_000, 999_999):
        write(trained_record.record_part(tmp_path, number), (number, number, "0.0"))
    assert [step for step, _, _ in found(tmp_path)] == [999_999, 1_000_000]


def test_a_resume_ends_the_time_line_that_it_gave_up(tmp_path: Path) -> None:
    """Steps 3 and 4 are made again from a checkpoint of step 2, and the run is at step 3."""
    write(trained_record.record_part(tmp_path, 1), *((step, step, f"{step}.0") for step in (1, 2, 3, 4)))
    write(trained_record.record_part(tmp_path, 2), (3, 6, "3.0"), (3, 6, "9.0"))
    assert found(tmp_path) == [(1, 1, ["1.0"]), (2, 2, ["2.0"]), (3, 6, ["3.0", "9.0"])]


def test_a_step_that_was_written_before_the_queue_died_and_again_after_it_counts_once(tmp_path: Path) -> None:
    write(trained_record.record_part(tmp_path, 1), (1, 1, "0.0"), (2, 2, "1.0"), (2, 2, "2.0"))
    write(trained_record.record_part(tmp_path, 2), (2, 2, "1.0"), (2, 2, "2.0"), (3, 3, "3.0"))
    assert found(tmp_path) == [(1, 1, ["0.0"]), (2, 2, ["1.0", "2.0"]), (3, 3, ["3.0"])]


def test_a_batch_that_was_left_out_stands_apart_from_the_one_that_took_its_step(tmp_path: Path) -> None:
    path = trained_record.record_part(tmp_path, 1)
    write(path, (1, 1, "0.0"))
    write(path, (2, 2, "1.0"), (2, 2, "2.0"), dropped="bad", lease="a")
    write(path, (2, 2, "3.0"), dropped="bad", lease="b")
    write(path, (2, 2, "4.0"))
    (_, second) = trained_record.read_record(tmp_path).steps
    assert [place.head.ticket_id for place in second.trained] == ["4.0"]
    left_out = {lease: [place.head.ticket_id for place in of] for lease, of in second.left_out.items()}
    assert left_out == {"a": ["1.0", "2.0"], "b": ["3.0"]}


def test_a_part_may_end_anywhere(tmp_path: Path) -> None:
    """A kill cuts its last entry short; what follows in another part counts."""
    path = trained_record.record_part(tmp_path, 1)
    last = write(path, (1, 1, "0.0"), (2, 2, "1.0"))
    whole = path.read_bytes()
    write(trained_record.record_part(tmp_path, 2), (2, 2, "1.0"))
    for cut in range(1, last + 1):
        path.write_bytes(whole[:-cut])
        assert found(tmp_path) == [(1, 1, ["0.0"]), (2, 2, ["1.0"])], cut
    for length in range(len(trained_record.RECORD_MAGIC) + 1):
        path.write_bytes(whole[:length])
        assert found(tmp_path) == [(2, 2, ["1.0"])]


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (0, "not a record of groups, or one of another release"),
        (len(trained_record.RECORD_MAGIC) + 3, "damaged at byte 28: its head would have"),
        (len(trained_record.RECORD_MAGIC) + 5, "damaged at byte 28: the checksum of 0.0 does not fit"),
        (-1, r"damaged at byte \d+: the checksum of 0.0 does not fit"),
    ],
)
def test_what_is_damaged_is_named_and_not_trained_on(tmp_path: Path, place: int, says: str) -> None:
    path = trained_record.record_part(tmp_path, 1)
    write(path, (1, 1, "0.0"))
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(RecordError, match=f"part-000001.groups: {says}"):
        trained_record.read_record(tmp_path)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert trained_record.read_record(tmp_path).steps == []
    with pytest.raises(RecordError, match=r"gone.groups: cannot be read: No such file"):
        trained_record.read_record(tmp_path / "gone.groups")


def test_a_step_of_which_a_kill_cut_groups_off_is_left_out_with_a_word(tmp_path: Path) -> None:
    path = trained_record.record_part(tmp_path, 1)
    write(path, (1, 1, "0.0"), (1, 1, "1.0"), groups=2)
    last = write(path, (2, 2, "2.0"), (2, 2, "3.0"), groups=2)
    whole = path.read_bytes()
    assert trained_record.read_record(tmp_path).warnings == []
    for cut in (1, last - 1, last, last + 1, 2 * last - 1):
        path.write_bytes(whole[:-cut])
        read = trained_record.read_record(tmp_path)
        assert [of.step for of in read.steps] == [1], cut
        (told,) = read.warnings or [""]
        assert told.startswith("step 2 is left out: 1 of its 2 groups are there") is (cut <= last), cut
    write(trained_record.record_part(tmp_path, 2), (2, 2, "2.0"), (2, 2, "3.0"), groups=2)
    read = trained_record.read_record(tmp_path)
    assert found(tmp_path)[-1] == (2, 2, ["2.0", "3.0"])
    assert read.warnings == [], "the queue wrote it again when it came back"


def test_a_batch_that_was_tried_in_vain_is_left_out_where_it_is_not_whole(tmp_path: Path) -> None:
    path = trained_record.record_part(tmp_path, 1)
    write(path, (1, 1, "0.0"), dropped="bad", lease="a", groups=2)
    write(path, (1, 1, "1.0"), groups=1)
    read = trained_record.read_record(tmp_path)
    assert found(tmp_path) == [(1, 1, ["1.0"])]
    assert not read.steps[0].left_out
    assert read.warnings == ["step 1: batch a, which failed, is left out: 1 of its 2 groups are there"]


def test_what_comes_before_damage_can_be_replayed_and_the_rest_has_a_remedy(tmp_path: Path) -> None:
    path, later = trained_record.record_part(tmp_path, 1), trained_record.record_part(tmp_path, 2)
    last = write(path, (1, 1, "0.0"), (2, 2, "1.0"), (3, 3, "2.0"), groups=1)
    write(later, (4, 4, "3.0"), groups=1)
    data = bytearray(path.read_bytes())
    data[-last - 1] ^= 0xFF  # of step 2's group
    path.write_bytes(data)
    assert found(tmp_path) == [(1, 1, ["0.0"])]
    (told,) = trained_record.read_record(tmp_path).warnings
    assert re.fullmatch(
        rf"{path}: damaged at byte \d+: the checksum of 1.0 does not fit; what it holds up to step 1 can be replayed; "
        rf"put an intact copy of that file there, if you have one; a later part can be replayed by itself, as RECORD: "
        rf"{later}",
        told,
    )
    assert found(later) == [(4, 4, ["3.0"])]


def test_of_a_record_of_an_earlier_release_the_step_at_the_damage_may_lack_groups(tmp_path: Path) -> None:
    path = trained_record.record_part(tmp_path, 1)
    last = write(path, (1, 1, "0.0"), (2, 2, "1.0"), (2, 2, "2.0"))
    path.write_bytes(path.read_bytes()[: -last + 40] + b"?" * (last - 40))
    read = trained_record.read_record(tmp_path)
    assert [of.step for of in read.steps] == [1]
    assert read.warnings[0].startswith("step 2 is left out: nothing says whether all of its groups are there")
