"""`docs/from_trl.md` answers for every field of TRL's configs, and names only settings that exist."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from docs.generate.from_trl import page
from slipstream.protocol.config import RunConfig
from slipstream.trl.configs import DEFAULTS
from slipstream.trl.fields import FIELDS

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "from_trl.md").read_text(encoding="utf-8")
LIST = json.loads((HERE / "trl_1_16_fields.json").read_text(encoding="utf-8"))
CONFIGS = ("GRPOConfig", "RLOOConfig", "AsyncGRPOConfig")
SETTINGS = {
    f"{section}.{key}"
    for section, field in RunConfig.model_fields.items()
    if field.annotation is not None
    for key in field.annotation.model_fields
}


def rows() -> list[tuple[str, str]]:
    """Return each field of the tables with its answer, the second column, and each field that is listed as ignored."""
    tables, ignored = PAGE.split("field by field", 1)[1].split("### Ignored", 1)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables.splitlines() if "|" in line]
    answers = [
        (name, re.sub(r"the same, in \[(\w+)\]", rf"`\1.{name}`", row[1]))
        for row in cells
        for name in re.findall(r"`(\w+)`", row[0])
    ]
    lists = [line.partition(":")[0] for line in ignored.splitlines() if line.startswith("- ")]
    return answers + [(name, "no") for names in lists for name in re.findall(r"`(\w+)`", names)]


ANSWERS = dict(rows())


def test_every_field_of_trl_has_one_row_with_an_answer() -> None:
    wanted = {field for config in CONFIGS for field in LIST["fields"][config]}
    assert wanted <= set(ANSWERS), f"no row for {sorted(wanted - set(ANSWERS))}"
    assert all(ANSWERS.values())
    assert len(rows()) == len(ANSWERS), "a field has two rows"


@pytest.mark.parametrize("field", ANSWERS)
def test_an_answer_names_settings_that_exist_or_says_no(field: str) -> None:
    answer = ANSWERS[field]
    named = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", answer))
    assert named <= SETTINGS, f"{named - SETTINGS} is not a setting"
    assert named or "Task(" in answer or re.match(r"no\b|not yet|always|.*, always", answer), answer


@pytest.mark.parametrize("config", CONFIGS)
def test_the_list_of_fields_is_that_of_trl(config: str) -> None:
    """Where the TRL of that version is installed, its source is read; elsewhere the list stands for it."""
    found = importlib.util.find_spec("trl")
    if found is None or version("trl") != LIST["trl"]:
        assert len(LIST["fields"][config]) > 30
        return
    (package,) = found.submodule_search_locations or []
    classes = {
        node.name: node
        for file in Path(package).rglob("*_config.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    own = {
        statement.target.id
        for name in (config, "_BaseConfig")
        for statement in classes[name].body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    assert own == set(LIST["fields"][config])


def test_the_tables_are_those_of_the_code() -> None:
    assert page() == PAGE, "renew the page: python -m docs.generate from_trl"


@pytest.mark.parametrize(("config", "letter"), list(zip(CONFIGS, "GRA", strict=True)))
def test_the_table_knows_which_config_has_which_field(config: str, letter: str) -> None:
    later = {"packing"} if letter == "A" else set()  # of a release that is not in the list
    assert {name for name, field in FIELDS.items() if letter in field.of} - later == set(LIST["fields"][config])


def test_the_table_knows_every_field_of_training_arguments() -> None:
    transformers = pytest.importorskip("transformers")
    assert {name for name, field in FIELDS.items() if "T" in field.of} == {
        field.name for field in dataclasses.fields(transformers.TrainingArguments)
    }


def test_a_field_that_is_set_names_a_setting() -> None:
    assert {".".join(field.setting) for field in FIELDS.values() if field.how == "set"} <= SETTINGS


@pytest.mark.parametrize("config", CONFIGS)
def test_the_defaults_that_shape_training_are_trl_s(config: str) -> None:
    transformers = pytest.importorskip("transformers")
    if importlib.util.find_spec("trl") is None or version("trl") != LIST["trl"]:
        pytest.skip(f"TRL {LIST['trl']} is not installed")
    defaults = {field.name: field.default for field in dataclasses.fields(transformers.TrainingArguments)}
    for name in ("_BaseConfig", config):
        defaults |= defaults_in_source(name)
    assert {name: defaults[name] for name in DEFAULTS[config]} == DEFAULTS[config]


def defaults_in_source(name: str) -> dict[str, Any]:
    """Return the fields of a TRL dataclass that are written as `field(default=...)`."""
    (package,) = importlib.util.find_spec("trl").submodule_search_locations or []  # type: ignore[union-attr]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in Path(package).rglob("*_config.py")]
    (found,) = [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return {
        statement.target.id: ast.literal_eval(word.value)
        for statement in found.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(statement.value, ast.Call)
        for word in statement.value.keywords
        if word.arg == "default"
    }
