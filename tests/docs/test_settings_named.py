"""Every setting that a page names exists, so that a renamed one is renamed in the text too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slipstream.protocol.config import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = {
    name: set(field.annotation.model_fields)
    for name, field in RunConfig.model_fields.items()
    if field.annotation is not None
}
# Names of files, modules and attributes that look like a setting.
NOT_SETTINGS = {"py", "md", "toml", "jsonl", "log", "db"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_setting_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?:`|--)([a-z]+(?:_[a-z]+)?)\.([a-z_0-9]+)(?=[`\s=])", text)
    unknown = [
        f"{section}.{key}"
        for section, key in named
        if section in SECTIONS and key not in SECTIONS[section] and key not in NOT_SETTINGS
    ]
    assert not unknown, f"{page.name} names what is no setting: {unknown}"


def test_tables_of_the_run_file_name_settings() -> None:
    for page in PAGES:
        for block in re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            section = ""
            for line in block.splitlines():
                if title := re.match(r"\[([a-z_]+)(\.[a-z_.]+)?\]", line):
                    section = "" if title[2] else title[1]
                    assert title[1] in SECTIONS, f"{page.name} shows [{title[1]}], which is no section"
                elif section and (key := re.match(r"([a-z_0-9]+) *=", line)):
                    assert key[1] in SECTIONS[section], f"{page.name} shows {section}.{key[1]}, which is no setting"
