"""That the table of which variants read a setting is what their code says: a wrong line would refuse a good run file,
or take one whose setting does nothing."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest

from slipstream.learner.algorithm.advantages import ADVANTAGES
from slipstream.learner.algorithm.corrections import CORRECTIONS
from slipstream.learner.algorithm.credit import CREDITS
from slipstream.learner.algorithm.objectives import OBJECTIVES
from slipstream.protocol.config import LearnerSection
from slipstream.protocol.config.checks import READERS

# Settings that are applied where all variants of a part meet them.
APPLIED_BEFORE = {"reward_clip", "kl_in_reward", "proximal"}
PARTS = {"advantage": ADVANTAGES, "credit": CREDITS, "objective": OBJECTIVES, "correction": CORRECTIONS}


def reads(variant: type) -> set[str]:
    """The settings that the code of a class reads, and that of its bases but the face: what that reads, all read."""
    found = set()
    for of in variant.__mro__[:-1]:
        if of.__module__.endswith(".base") or not of.__module__.startswith("slipstream.learner."):
            continue
        source = ast.parse(textwrap.dedent(inspect.getsource(of)))
        found |= {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute) and _is_section(node.value)}
    return found & set(LearnerSection.model_fields)


def _is_section(node: ast.expr) -> bool:
    return getattr(node, "attr", getattr(node, "id", None)) == "section"


@pytest.mark.parametrize("part", PARTS)
def test_the_variants_that_read_a_setting_are_those_that_do(part: str) -> None:
    by_variant = {name: reads(variant) for name, variant in PARTS[part].items()}
    for setting in sorted(set().union(*by_variant.values())):
        actual = {name for name, settings in by_variant.items() if setting in settings}
        if actual == set(by_variant):
            continue
        assert set(READERS.get(setting, {}).get(part, ())) == actual, f"{part}: who reads {setting}"
    for setting, readers in READERS.items():
        if setting not in APPLIED_BEFORE:
            assert not set(readers.get(part, ())) - {
                name for name, settings in by_variant.items() if setting in settings
            }
