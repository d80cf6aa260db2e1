"""The tables of docs/from_trl.md: `python -m slipstream.trl.page` writes them into the page anew."""

from __future__ import annotations

from pathlib import Path

from slipstream.trl.fields import REST, TABLES, Field

BEGIN, END = "<!-- fields: written by python -m slipstream.trl.page -->", "<!-- end of fields -->"
PAGE = Path(__file__).parents[2] / "docs" / "from_trl.md"

# How a field is taken, as the last column says it.
_TAKEN = {"set": "set", "worked": "set", "idle": "ignored", "told": "ignored, and said so", "only": "refused"}


def tables() -> str:
    """The tables, as markdown."""
    parts = [f"### {title}\n\n{_table(fields)}" for title, fields in TABLES.items()]
    parts.append(_rest())
    return "\n\n".join(parts)


def written(page: str) -> str:
    """`page` with its tables as they have to be."""
    head, rest = page.split(BEGIN, 1)
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END, 1)[1]}"


def _table(fields: tuple[Field, ...]) -> str:
    rows = [f"| `{field.name}` | {field.here} | {field.note} | {_taken(field)} |" for field in fields]
    return "\n".join(["| field | here | | by `slipstream.trl` |", "|---|---|---|---|", *rows])


def _taken(field: Field) -> str:
    fine = " or ".join(f"`{value!r}`" for value in field.fine if value is not None)
    if field.how == "only":
        return f"refused, but for {fine}" if fine else "refused"
    return _TAKEN[field.how]


def _rest() -> str:
    refused = ", ".join(f"`{field.name}` ({field.note})" for field in REST if field.how == "only")
    ignored = ", ".join(f"`{field.name}`" for field in REST if field.how != "only")
    return (
        f"### The rest of TrainingArguments\n\nRefused, unless left at their defaults: {refused}.\n\n"
        f"Taken and without a meaning here: {ignored}."
    )


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
