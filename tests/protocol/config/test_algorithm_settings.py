"""Presets of [learner], and settings that the chosen algorithm would not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from slipstream.protocol.config import ConfigError, LearnerSection, RunConfig, load, to_toml
from slipstream.protocol.config.checks import READERS, find_algorithm_warnings
from slipstream.protocol.config.schema import OTHER_NAMES
from slipstream.protocol.config.sections.base import toml_value
from slipstream.protocol.config.sections.presets import PRESETS, SET_BY_PRESETS
from slipstream.trl.fields import FIELDS as FIELDS_OF_TRL

FIELDS = LearnerSection.model_fields


def run_file(folder: Path, *lines: str) -> Path:
    path = folder / "run.toml"
    learner = "\n".join(lines)
    path.write_text(f'[model]\npath = "org/model"\n[task]\npath = "task.py:task"\n[learner]\n{learner}\n')
    return path


def load_lines(folder: Path, *lines: str) -> RunConfig:
    return load(run_file(folder, *lines))


def refusal(folder: Path, *lines: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_lines(folder, *lines)
    return str(error.value)


def test_the_run_file_offers_every_preset() -> None:
    assert set(PRESETS) == set(get_args(FIELDS["algorithm"].annotation))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_says_and_the_rest_is_the_default(tmp_path: Path, name: str) -> None:
    learner = load_lines(tmp_path, f'algorithm = "{name}"').learner
    assert learner.algorithm == name
    expected = {key: PRESETS[name].get(key, field.default) for key, field in FIELDS.items()}
    assert learner.model_dump() == expected | {"algorithm": name}


def test_without_a_preset_it_is_grpo(tmp_path: Path) -> None:
    assert load_lines(tmp_path).learner == load_lines(tmp_path, 'algorithm = "grpo"').learner


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if "advantage" in preset])
def test_settings_of_the_run_file_and_of_the_command_line_go_before_the_preset_s(tmp_path: Path, name: str) -> None:
    path = run_file(tmp_path, f'algorithm = "{name}"', 'advantage = "rloo"')
    assert load(path).learner.advantage == "rloo"
    assert load(path, ["--learner.advantage", "dr_grpo"]).learner.advantage == "dr_grpo"
    path = run_file(tmp_path, 'advantage = "rloo"')
    assert load(path, ["--learner.algorithm", name]).learner.advantage == "rloo"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_that_was_printed_loads_to_the_same_even_if_a_part_is_replaced(tmp_path: Path, name: str) -> None:
    for lines in ([], ['advantage = "dr_grpo"'], ['objective = "importance"'], ['correction = "none"']):
        config = load_lines(tmp_path, f'algorithm = "{name}"', *lines)
        printed = tmp_path / "printed.toml"
        printed.write_text(to_toml(config), encoding="utf-8")
        assert load(printed) == config


@pytest.mark.parametrize("name", PRESETS)
def test_another_algorithm_in_a_printed_file_is_that_algorithm_whole(tmp_path: Path, name: str) -> None:
    for before in PRESETS:
        plain = load_lines(tmp_path, f'algorithm = "{before}"', "kl_coef = 0.1")
        printed = tmp_path / "printed.toml"
        printed.write_text(to_toml(plain).replace(f'algorithm = "{before}"', f'algorithm = "{name}"'))
        assert load(printed).learner == load_lines(tmp_path, f'algorithm = "{name}"', "kl_coef = 0.1").learner, before


def test_a_printed_file_holds_what_is_set_beside_the_preset_and_tells_the_preset_s(tmp_path: Path) -> None:
    lines = to_toml(load_lines(tmp_path, 'algorithm = "gspo"', 'objective = "ppo_clip"')).splitlines()
    assert any(line.startswith('objective = "ppo_clip" ') for line in lines)
    assert any(line.startswith('# normaliser = "sequences"') and "# the preset's: " in line for line in lines)
    assert any(line.startswith("# clip_high = 0.28 ") for line in lines), "which follows from the objective"


def test_what_stands_beside_a_preset_is_what_differs_from_it() -> None:
    assert LearnerSection(algorithm="rloo", clip_low=0.2, learning_rate=1e-5).beside_preset() == {}
    found = LearnerSection(algorithm="rloo", advantage="grpo", kl_coef=0.1).beside_preset()
    assert found == {"advantage": "grpo", "kl_coef": 0.1}, "kl_in_reward is off with another advantage"


def test_an_unknown_preset_is_told_with_the_ones_there_are(tmp_path: Path) -> None:
    message = refusal(tmp_path, 'algorithm = "grop"')
    assert 'learner.algorithm = "grop": must be ' in message
    assert all(f"'{name}'" in message for name in PRESETS)
    assert "\n" not in message
    assert "learner.algorithm = 3: must be " in refusal(tmp_path, "algorithm = 3")


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("dr-grpo", '"dr_grpo"'),
        ("RLOO", '"rloo"'),
        ("gspoo", '"gspo"'),
        ("glpo", '"grpo" or "gdpo" or "gspo"'),  # each is as near
    ],
)
def test_a_misspelt_preset_is_told_which_was_meant(tmp_path: Path, value: str, meant: str) -> None:
    assert f"; did you mean {meant}? (preset of the settings below" in refusal(tmp_path, f'algorithm = "{value}"')
    assert "did you mean" not in refusal(tmp_path, 'algorithm = "adam"')


@pytest.mark.parametrize(("name", "ours"), OTHER_NAMES.items())
def test_a_setting_by_its_name_elsewhere_is_told_ours(tmp_path: Path, name: str, ours: str) -> None:
    if name in FIELDS_OF_TRL:
        assert f"`{ours}`" in FIELDS_OF_TRL[name].here
    words = [f"--{name}"] if "." in name else [f"--learner.{name}", f"--{name}", f"--{name.replace('_', '-')}"]
    for arguments in ([word, "1"] for word in words):
        with pytest.raises(ConfigError, match=rf"did you mean (--)?{ours}\?"):
            load(run_file(tmp_path), arguments)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            ['advantage = "rloo"', "advantage_epsilon = 0.5"],
            'learner.advantage_epsilon = 0.5 does nothing with advantage = "rloo", normalise_advantages = false: '
            'leave it out, or set advantage = "grpo" or advantage = "batch" or advantage = "gdpo" or '
            "normalise_advantages = true",
        ),
        (
            ['algorithm = "gdpo"', "reward_clip = [-1, 1]"],
            'learner.reward_clip = [-1.0, 1.0] does nothing with advantage = "gdpo": leave it out, or set',
        ),
        (
            ["sapo_temperature_pos = 2.0"],
            'learner.sapo_temperature_pos = 2.0 does nothing with objective = "ppo_clip": leave it out, or set '
            'objective = "sapo"',
        ),
        (["clip_low = 0.1", 'algorithm = "cispo"'], 'learner.clip_low = 0.1 does nothing with objective = "cispo"'),
        (
            ['algorithm = "gdpo"', "kl_coef = 0.1", "kl_in_reward = true"],
            'learner.kl_in_reward = true does nothing with advantage = "gdpo": leave it out, or set',
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_refused_with_the_remedy(tmp_path: Path, lines: list[str], says: str) -> None:
    message = refusal(tmp_path, *lines)
    assert says in message
    assert "\n" not in message


def test_gspo_with_the_bounds_of_another_objective_is_a_warning() -> None:
    (finding,) = find_algorithm_warnings(LearnerSection(objective="gspo"))
    assert str(finding).startswith('learner.clip_low = 0.2 and learner.clip_high = 0.28 with objective = "gspo": ')
    assert str(finding).endswith("its paper has clip_low = 0.0003 and clip_high = 0.0004")
    (finding,) = find_algorithm_warnings(LearnerSection(algorithm="luspo", clip_high=0.1))
    assert str(finding).startswith("learner.clip_high = 0.1 with ")
    assert not [name for name in PRESETS if find_algorithm_warnings(LearnerSection.model_validate({"algorithm": name}))]


def test_a_setting_may_stand_there_at_its_default_and_where_something_reads_it(tmp_path: Path) -> None:
    load_lines(tmp_path, 'advantage = "rloo"', f"advantage_epsilon = {FIELDS['advantage_epsilon'].default}")
    load_lines(tmp_path, 'advantage = "rloo"', "advantage_epsilon = 0.5", "normalise_advantages = true")
    load_lines(tmp_path, "advantage_epsilon = 0.5")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("reward_clip = [1, 1]", "learner.reward_clip = [1, 1]: the first must be below the second"),
        ("reward_clip = [2, 1]", "learner.reward_clip = [2, 1]: the first must be below the second"),
        ("reward_clip = [1]", "has too few entries"),
        ("reward_clip = [0, 1, 2]", "has too many entries"),
        ("reward_clip = [-inf, 1]", "must be finite"),
        ("reward_clip = 1", "learner.reward_clip = 1: must be a list"),
    ],
)
def test_a_wrong_reward_clip_is_told(tmp_path: Path, line: str, says: str) -> None:
    assert says in refusal(tmp_path, line)


def test_the_readers_of_a_setting_are_variants_that_there_are() -> None:
    for name, readers in READERS.items():
        assert name in FIELDS
        for part, variants in readers.items():
            known: tuple[Any, ...] = get_args(FIELDS[part].annotation) or (True, False)
            assert set(variants) <= set(known), f"{name}: {part}"


@pytest.mark.parametrize("algorithm", PRESETS)
def test_a_preset_on_the_command_line_is_the_preset_beside_a_file_that_was_printed_whole(
    algorithm: str, tmp_path: Path
) -> None:
    """As earlier releases did: with every setting of its own preset in it."""
    plain, whole = run_file(tmp_path), tmp_path / "whole.toml"
    learner = dict(load(plain).learner)
    settings = "\n".join(f"{name} = {toml_value(learner[name])}" for name in sorted(SET_BY_PRESETS))
    whole.write_text(f'{plain.read_text()}algorithm = "grpo"\n{settings}\n')
    given = ["--learner.algorithm", algorithm]
    assert load(whole, given).learner == load(plain, given).learner


def test_a_preset_s_bounds_are_its_objective_s() -> None:
    assert LearnerSection(algorithm="gspo").clip_high == 4e-4
    assert LearnerSection(algorithm="gspo", objective="ppo_clip").clip_high == 0.28
    assert LearnerSection(algorithm="trl_grpo", objective="ppo_clip").clip_high == 0.2, "the preset's own objective"
    assert not LearnerSection(algorithm="rloo", advantage="gdpo").kl_in_reward, "whose rewards nobody would read"
    assert LearnerSection(algorithm="decoupled_ppo", correction="none").proximal == "recomputed"
