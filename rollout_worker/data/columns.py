"""Checks rows: all have the same columns, and a prompt that is text or a list of messages, or is filled in."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.protocol.config import ConfigError
from slipstream.protocol.config.text import nearest
from slipstream.rollout_worker.data.rows import Row, RowPosition, Rows

# Slipstream passes these arguments to reward functions, so no column of the data set may have such a name.
GIVEN = ("completions", "prompts", "completion_ids", "trainer_state", "log_metric", "log_extra")

# A task with environments passes these objects under this name besides.
ENVIRONMENTS = "environments"

# Stands for the prompt of a row that has none: an environment's reset provides the real one, or an agent writes it.
EMPTY_PROMPT: list[dict[str, Any]] = [{"role": "user", "content": ""}]

# Maximum rows of a table that are checked before a run, as far as they can be read in BUDGET_S seconds; of a stream the
# first STREAM_ROWS.
MAX_ROWS = 100_000

FIRST_ROWS = 1000

STREAM_ROWS = 64

BUDGET_S = 10.0

# Columns of data sets for other kinds of training, and how to make prompts of them.
_OTHER_FORMS = {
    "messages": "the messages up to the policy's turn are the prompt: dataset.rename_column('messages', 'prompt'), and "
    "leave the last answer out",
    "conversations": "make each prompt a list of messages with 'role' and 'content'",
    "chosen": "it is a preference data set: make a prompt of what 'chosen' and 'rejected' have in common",
    "text": "it is for language modelling; rename it: dataset.rename_column('text', 'prompt')",
}


@dataclass(frozen=True)
class Findings:
    """Results of a check of rows.

    Attributes:
        looked_at: Number of checked rows.
        unusable: Reason for each row that will be dropped, by number.
        mixed: For each column with values of several kinds, the first row of each kind.
    """

    looked_at: int = 0
    unusable: dict[int, str] = field(default_factory=dict)
    mixed: dict[str, dict[str, int]] = field(default_factory=dict)


def missing_column(taker: str, name: str, columns: Mapping[str, Any], remedy: str = "") -> ConfigError:
    """Return the error for a function that needs a column which the rows do not have.

    Args:
        taker: The task's argument and the function, such as "Task(rewards=...): accuracy".
        remedy: Follows the list of the columns.
    """
    known = [str(column) for column in columns]
    close = nearest(name, known)
    meant = f"did you mean {close}? " if close else ""
    return ConfigError(
        f"{taker} takes {name!r}, which is not a column of the data set; {meant}the columns are: "
        f"{', '.join(known)}{remedy}"
    )


def check_first(columns: Any, has_tools: bool, has_environment: bool = False) -> None:
    """Raise `ConfigError` for a first row that no run could use."""
    if isinstance(columns, BaseException):
        raise ConfigError(
            f"Task(dataset=...): the first row cannot be read: {type(columns).__name__}: {columns}; fix the data set"
        )
    if "prompt" not in columns:
        hint = next((f"; {hint}" for name, hint in _OTHER_FORMS.items() if name in columns), "; add one")
        raise ConfigError(f"Task(dataset=...): the first row has no 'prompt' column, it has {sorted(columns)}{hint}")
    if taken := [name for name in (*GIVEN, *([ENVIRONMENTS] if has_environment else [])) if name in columns]:
        raise ConfigError(
            f"Task(dataset=...): the column {taken[0]!r} is a name that reward functions already get; rename it"
        )
    prompt = columns["prompt"]
    if (has_tools or has_environment) and isinstance(prompt, str):
        taker, need = ("tools", "tools need") if has_tools else ("environment", "an environment needs")
        raise ConfigError(
            f"Task({taker}=...): the prompts are text, and {need} a conversation; make each prompt a list of messages: "
            f"[{{'role': 'user', 'content': ...}}]"
        )
    is_messages = isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)
    if not isinstance(prompt, str) and not is_messages:
        raise ConfigError(
            f"Task(dataset=...): the first prompt is a {type(prompt).__name__}; give text or a list of messages"
        )


def check_rows(rows: Rows, clock: Callable[[], float] = time.monotonic) -> Findings:
    """Check all rows of a data set, or as many as can be read in `BUDGET_S` seconds. `clock`: seconds, monotonic.

    Raises `ConfigError` for rows that differ in their columns or in the kind of their prompt: rewards could not be
    written for both.
    """
    if rows.size is None:
        return _look(rows, STREAM_ROWS)
    began = clock()
    found = _look(rows, FIRST_ROWS)
    affordable = int(FIRST_ROWS * BUDGET_S / max(clock() - began, 1e-9))
    most = min(rows.size, MAX_ROWS, affordable)
    return _look(rows, most) if most > FIRST_ROWS else found


def prompt_fault(prompt: Any) -> str | None:
    """Return why no episode can begin with a prompt; None if one can."""
    if isinstance(prompt, str):
        return lone_surrogate(prompt) if prompt else "its prompt is empty"
    if not isinstance(prompt, list):
        return f"its prompt is {prompt!r:.60}, not text or a list of messages"
    if not prompt:
        return "its prompt is empty"
    for place, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            return f"message {place} of its prompt is {message!r:.60}, not a mapping with 'role' and 'content'"
        if not isinstance(message.get("role"), str):
            hint = "; 'from' and 'value' are to be 'role' and 'content'" if "from" in message else ""
            return f"message {place} of its prompt has no 'role', it has {sorted(map(str, message))}{hint}"
        if "content" not in message and "tool_calls" not in message:
            return f"message {place} of its prompt has no 'content', it has {sorted(map(str, message))}"
    try:
        return lone_surrogate(prompt)
    except RecursionError:
        return "its prompt is nested too deeply"


def lone_surrogate(prompt: Any) -> str | None:
    """Return the fault of a prompt with half a UTF-16 surrogate pair in a text, which no tokenizer takes; else None."""
    if isinstance(prompt, str):
        if prompt.isascii():
            return None
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            return f"its prompt has {prompt[error.start]!a}, half a character, which no tokenizer takes: fix the text"
        return None
    parts = [*prompt.keys(), *prompt.values()] if isinstance(prompt, Mapping) else prompt
    if not isinstance(parts, list | tuple):
        return None
    return next((fault for part in parts if (fault := lone_surrogate(part)) is not None), None)


def _look(rows: Rows, most: int) -> Findings:
    looked_at, unusable = 0, {}
    first: tuple[int, set[str]] | None = None
    kind = ""
    kinds: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for number, columns in rows.sample(most):
        looked_at += 1
        if isinstance(columns, ConfigError):
            raise columns
        if isinstance(columns, BaseException):
            unusable[number] = f"{type(columns).__name__}: {columns}"
            continue
        if first is None:
            first = number, set(columns)
        if differing := first[1].symmetric_difference(columns):
            name = min(differing, key=repr)
            has, lacks = (first[0], number) if name in first[1] else (number, first[0])
            raise ConfigError(
                f"Task(dataset=...): row {lacks} has no column {name!r}, which row {has} has; give all rows the same "
                f"columns, with None where there is no value"
            )
        if fault := prompt_fault(columns["prompt"]):
            unusable[number] = fault
            continue
        its = "text" if isinstance(columns["prompt"], str) else "messages"
        if its != (kind := kind or its):
            raise ConfigError(
                f"Task(dataset=...): the prompt of row {number} is {its}, and those before it are {kind}; rewards get "
                f"completions of the same kind: make all prompts {kind}, or all {its}"
            )
        for name, value in columns.items():
            if name != "prompt" and value is not None:
                kinds[str(name)].setdefault(_kind_of(value), number)
    mixed = {name: firsts for name, firsts in kinds.items() if len(firsts) > 1}
    return Findings(looked_at, unusable, mixed)


def _kind_of(value: Any) -> str:
    """Name the kind of a value. All numbers are of one kind."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return "a number" if number else "text" if isinstance(value, str) else type(value).__name__


class WithPrompts:
    """Adds an empty prompt to rows without one."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @property
    def size(self) -> int | None:
        return self._rows.size

    @property
    def by_number(self) -> bool:
        return self._rows.by_number

    def column(self, name: str) -> Sequence[Any]:
        return self._rows.column(name)

    def place_of(self, index: int, seed: int, shuffle: bool) -> RowPosition:
        return self._rows.place_of(index, seed, shuffle)

    def row_for(self, index: int, seed: int, shuffle: bool) -> Row:
        row = self._rows.row_for(index, seed, shuffle)
        return row._replace(columns=_with_prompt(row.columns))

    def sample(self, most: int) -> Iterator[tuple[int, Any]]:
        for number, columns in self._rows.sample(most):
            yield number, _with_prompt(columns)


def _with_prompt(columns: Any) -> Any:
    if not isinstance(columns, Mapping) or "prompt" in columns:
        return columns
    return {"prompt": [dict(message) for message in EMPTY_PROMPT], **columns}


def without_empty_prompt(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns that the data set has itself."""
    if columns.get("prompt") != EMPTY_PROMPT:
        return columns
    return {name: value for name, value in columns.items() if name != "prompt"}
