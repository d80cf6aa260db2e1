"""That the table of which variants read a setting is what their code says: a wrong line would refuse a good run file,
or take one whose setting does nothing."""

from __future__ import annotations

import ast
import inspect

import pytest

from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.corrections import CORRECTIONS
from learner.algorithm.objectives import OBJECTIVES
from protocol.config import LearnerSection
from protocol.config.algorithm import READERS

PARTS = {"advantage": ADVANTAGES, "objective": OBJECTIVES, "correction": CORRECTIONS}


def reads(variant: type) -> set[str]:
    """The settings that the code of a class reads, and that of its bases but the face: what that reads, all read."""
    found = set()
    for of in variant.__mro__[:-1]:
        if of.__module__.endswith(".base") or not of.__module__.startswith("learner."):
            continue
        found |= {node.attr for node in ast.walk(ast.parse(inspect.getsource(of))) if isinstance(node, ast.Attribute)}
    return found & set(LearnerSection.model_fields)


@pytest.mark.parametrize("part", PARTS)
def test_the_variants_that_read_a_setting_are_those_that_do(part: str) -> None:
    by_variant = {name: reads(variant) for name, variant in PARTS[part].items()}
    for setting in sorted(set().union(*by_variant.values())):
        actual = {name for name, settings in by_variant.items() if setting in settings}
        if actual == set(by_variant):
            continue
        assert set(READERS.get(setting, {}).get(part, ())) == actual, f"{part}: who reads {setting}"
    for setting, readers in READERS.items():
        if setting != "reward_clip":  # applied before any variant sees the rewards
            assert not set(readers.get(part, ())) - {
                name for name, settings in by_variant.items() if setting in settings
            }
