"""Labels and adapters' names say whose version they are, and nothing else passes for one (I5)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocol.versions import Label, describe_label, label_in, label_of, name_of, new_run_id, parse

VERSIONS = st.integers(0, 10**18 - 1)


@given(st.text(max_size=80), VERSIONS)
def test_i5_whatever_a_run_is_called_its_labels_and_names_come_back(name: str, version: int) -> None:
    run = new_run_id(name)
    assert parse(label_of(run, version)) == Label(run, version)
    assert label_in(name_of(version, "0123456789abcdef" * 4, run)) == Label(run, version)
    assert str(Label(run, version)) == label_of(run, version)


def test_i5_two_runs_of_one_name_have_two_ids() -> None:
    assert new_run_id("multiply") != new_run_id("multiply")
    assert new_run_id("multiply").startswith("multiply-")


def test_other_texts_are_no_labels() -> None:
    for text in ("default", "", ":4", "a b:4", "a:b:4", "a:4.0", "a:-4", "a:²", "a:4\n", "a:" + "1" * 19):
        assert parse(text) is None
        assert describe_label(text, "a") == f"weights labelled {text!r}"
