"""Text of the user's made fit to be sent: bounded, and of what UTF-8 can write.

Text is cut before anything copies it, so that a gigabyte of it costs no more than what is kept.
"""

from __future__ import annotations

# Of a tool's result, behind the boundary; the worker cuts it further, by tokens.
MAX_CHARACTERS = 1024 * 1024


def encodable(text: str) -> str:
    """`text` as a plain str; what UTF-8 cannot write, a lone surrogate, is replaced: no message takes it, and no
    tokenizer."""
    return str.encode(text, "utf-8", "replace").decode("utf-8")


def bounded(text: str, most: int = MAX_CHARACTERS) -> str:
    """`text` as a plain str, encodable; of more than `most` characters the middle is left out, with a note."""
    return encodable(without_middle(text, most))


def without_middle(text: str, most: int) -> str:
    """`text`, of which the characters in the middle are left out, with a note, where there are more than `most`."""
    size = str.__len__(text)
    if size <= most:
        return text
    half = most // 2
    head, tail = str.__getitem__(text, slice(most - half)), str.__getitem__(text, slice(size - half, size))
    return f"{head}... ({size - most} characters left out) ...{tail}"


def type_name(value: object) -> str:
    """The name of its type, without running the type's own code: a metaclass may answer for `__name__`."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return bounded(name, 200)
