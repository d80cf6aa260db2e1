"""What a replay makes of a record that is not whole, and of a run that several ranks made."""

from __future__ import annotations

from pathlib import Path

import msgspec

from slipstream.learner.replay import ranks_of
from slipstream.protocol import checkpoints as places
from slipstream.protocol import trained_record
from slipstream.protocol.config import RunConfig
from tests.kit.live_queue import live_queue
from tests.learner.test_resume import replayed, settings, train


def recorded(model_path: Path, tmp_path: Path) -> RunConfig:
    here = settings(model_path, tmp_path, queue={"record": True}, steps=3)
    with live_queue(here) as queue:
        train(here, queue)
    return here


def test_only_steps_that_are_whole_are_replayed_and_the_others_told(model_path: Path, tmp_path: Path) -> None:
    here = recorded(model_path, tmp_path)
    (part,) = trained_record.record_parts(here.run_dir / trained_record.RECORD_FOLDER)
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    outcome, said = replayed(here, tmp_path / "cut")
    assert (outcome.steps, outcome.first_difference) == (2, None)
    assert "step 3 is left out: 1 of its 2 groups are there" in said
    places_of_two = trained_record.read_record(part).steps[1].trained
    damaged = bytearray(whole)
    damaged[places_of_two[0].offset] ^= 0xFF
    part.write_bytes(damaged)
    outcome, said = replayed(here, tmp_path / "damaged")
    assert (outcome.steps, outcome.first_difference) == (1, None)
    assert "what it holds up to step 1 can be replayed; put an intact copy of that file there" in said


def test_of_a_run_of_several_ranks_differences_of_rounding_are_expected(model_path: Path, tmp_path: Path) -> None:
    here = recorded(model_path, tmp_path)
    state = places.complete(here.run_dir)[3] / places.STATE
    info = msgspec.json.decode(state.read_bytes())
    info["settings"]["learner.ranks"] = "2"  # as a launcher had it, and the run file does not
    state.write_bytes(msgspec.json.encode(info))
    line, *rest = (here.run_dir / "metrics.jsonl").read_bytes().splitlines()
    first = msgspec.json.decode(line)
    first["loss"] += 1e-9
    (here.run_dir / "metrics.jsonl").write_bytes(b"\n".join([msgspec.json.encode(first), *rest, b""]))
    outcome, said = replayed(here, tmp_path / "out")
    assert (outcome.ranks, outcome.first_difference) == (2, 1)
    assert "2 ranks made the run's steps, and one makes them here: they agree but for rounding" in said
    assert "of steps that 2 ranks made, differences of rounding are expected" in said
    several = here.model_copy(update={"learner": here.learner.model_copy(update={"ranks": 4})})
    assert ranks_of(several) == 4
