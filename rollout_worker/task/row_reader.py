"""Reads a ticket's row as plain data, behind the boundary around user code, because the data set is the user's.

A row belongs to its ticket: no other ticket sees changes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from slipstream.protocol.config import TaskSection
from slipstream.rollout_worker.data.columns import lone_surrogate
from slipstream.rollout_worker.data.order import order_of
from slipstream.rollout_worker.data.rows import Row
from slipstream.rollout_worker.task.task import Task
from slipstream.rollout_worker.user_code import Kind, NotCalled, UserCode, UserCodeError, failure_of
from slipstream.rollout_worker.user_code.values import copied, plain
from slipstream.rollout_worker.vision.messages import column_with_images, has_images, seen_prompt
from slipstream.rollout_worker.vision.processor import ImageProcessor, Seen

TIMEOUT_S = 60.0


class RowReader:
    """Reads rows of a task.

    Args:
        task_file: Absolute path of its file.
        order: Settings of the order of the rows.
        images: Opens the images of prompts; None for text alone.
    """

    def __init__(
        self,
        task: Task,
        task_file: str,
        code: UserCode,
        order: TaskSection,
        timeout_s: float = TIMEOUT_S,
        images: ImageProcessor | None = None,
    ) -> None:
        self._images = images
        self._task = task
        self._task_file = task_file
        self._code = code
        self._order = order
        self._timeout_s = timeout_s

    async def read(self, index: int, seed: int, row: int | None = None) -> Row:
        """Read the row of a training ticket's running `index`, or the `row` that the queue chose for it. Raises
        `UserCodeError`, whose text names the row, and `NotCalled`."""
        return await self._called(self._read, index=index, seed=seed, row=row)

    async def read_eval(self, number: int) -> Row:
        """Read a row of the eval_dataset. Raises as `read` does."""
        return await self._called(self._read_eval, index=number)

    async def _called(self, read: Callable[..., Row], index: int, **arguments: int | None) -> Row:
        try:
            row: Row = await self._code.call(read, _same, self._timeout_s, Kind.DATA, index=index, **arguments)
            return row
        except NotCalled:
            raise
        except UserCodeError as error:
            if str(error).startswith("row "):
                raise
            raise UserCodeError(f"the row of index {index} of the data set: {error}", error.kind, None) from None

    def _read(self, index: int, seed: int, row: int | None) -> Row:
        order = order_of(self._task.rows, self._order)
        _, number = order.place_of(index, seed, row)
        return self._plain(lambda: order.row_for(index, seed, row), f"row {number} of the data set")

    def _read_eval(self, index: int) -> Row:
        return self._plain(lambda: self._task.eval_rows.row_for(index, 0, False), f"row {index} of the eval_dataset")

    def _plain(self, row_of: Callable[[], Row], name: str) -> Row:
        try:
            row = row_of()
            return row._replace(columns=plain_columns(row.columns, self._images))
        except BaseException as error:
            failure = failure_of(error, self._task_file)
            raise UserCodeError(f"{name}: {failure}", failure.kind, failure.where) from None


def plain_columns(row: Any, images: ImageProcessor | None = None) -> dict[str, Any]:
    """Copy a row's columns, with the prompt as text or as messages of plain data, and its images opened. Raises
    `ValueError`."""
    if not isinstance(row, Mapping):
        raise ValueError(f"it is a {type(row).__name__}; give a mapping of columns, such as a dict")
    columns = {str(name): value for name, value in row.items()}
    if "prompt" not in columns:
        raise ValueError(f"it has no column 'prompt', it has {sorted(columns)}"[:500])
    prompt = columns.pop("prompt")
    is_messages = isinstance(prompt, list | tuple | np.ndarray) and all(
        isinstance(message, Mapping) for message in prompt
    )
    if not is_messages and not isinstance(prompt, str):
        raise ValueError(f"its prompt is a {type(prompt).__name__}; give text or a list of messages")
    if images is not None:
        prompt = seen_prompt(prompt, columns, images)
    elif is_messages and has_images(prompt):
        raise ValueError("its prompt has an image, and images.enabled = false: set it to true, with a model that sees")
    elif column := column_with_images(columns):
        raise ValueError(
            f"its column {column!r} holds an image, and images.enabled = false, so that the policy would not see it: "
            f"set it to true, with a model that sees, or rename the column"
        )
    copy = plain(prompt, "prompt", keep=(Seen,))
    if not copy:
        raise ValueError("its prompt is empty")
    if fault := lone_surrogate(copy):
        raise ValueError(fault)
    return {"prompt": copy, **{name: copied(value) for name, value in columns.items()}}


def _same(row: Row) -> Row:
    return row
