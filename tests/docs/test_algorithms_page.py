"""`docs/algorithms.md` is what the code says, and each variant says when to choose it, and from where it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.generate.algorithms import page
from slipstream.protocol.config import LearnerSection
from slipstream.protocol.config.checks import check_algorithm
from slipstream.protocol.config.sections.algorithm import AlgorithmSection
from slipstream.protocol.config.sections.presets import ABOUT, PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
ENTRIES = {entry.split("\n", 1)[0]: entry.split("\n## ")[0] for entry in PAGE.split("\n### ")[1:]}


def test_the_page_is_up_to_date() -> None:
    assert page() == PAGE, "make it again: python -m docs.generate algorithms"


def test_every_preset_has_a_row() -> None:
    assert list(ABOUT) == list(PRESETS)


@pytest.mark.parametrize("part", ["advantage", "normaliser", "objective", "correction", "proximal"])
def test_every_variant_has_an_entry(part: str) -> None:
    variants = LearnerSection.model_json_schema()["properties"][part]["enum"]
    assert all(any(title.startswith(f'`{part} = "{name}"`') for title in ENTRIES) for name in variants)


@pytest.mark.parametrize("title", ENTRIES)
def test_an_entry_says_when_to_choose_it_and_how(title: str) -> None:
    assert re.search(r"^Choose it", ENTRIES[title], re.MULTILINE), "its docstring needs a paragraph: Choose it ..."
    options = dict(re.findall(r"--learner\.(\w+) (\S+?)[ `]", ENTRIES[title]))
    options |= dict(re.findall(r'`(\w+) = "(\w+)"`', title))
    assert options
    check_algorithm(LearnerSection.model_validate({name: _value(text) for name, text in options.items()}))


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def test_every_setting_of_an_algorithm_is_named() -> None:
    missing = [name for name in AlgorithmSection.model_fields if name not in PAGE]
    assert not missing
