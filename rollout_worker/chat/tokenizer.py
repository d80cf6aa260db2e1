"""Loads a model's tokenizer, finds the ids that end a turn, and encodes long texts outside the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file

from slipstream.protocol.config import ConfigError, ModelSection

# Longer texts are tokenised in a thread, because a text of this length already takes about 1 ms.
_INLINE_CHARACTERS = 2048


def load_tokenizer(model: ModelSection) -> Any:
    """Load the tokenizer of `model.tokenizer`, or else of `model.path`, at `model.revision`.

    It avoids AutoTokenizer, which imports torch and so costs a worker seconds and memory. AutoTokenizer loads only
    tokenizers that have no tokenizer.json and are the model's own code. `model.trust_remote_code` must allow that.

    Returns:
        The transformers tokenizer.

    Raises:
        ConfigError: The tokenizer cannot be loaded.
    """
    path = model.tokenizer or model.path
    # The revision belongs to the model's repository. A separate tokenizer repository does not have it.
    revision = {} if model.revision is None or model.tokenizer else {"revision": model.revision}
    try:
        return PreTrainedTokenizerFast.from_pretrained(path, **revision)
    except Exception as error:  # the type depends on what is missing or broken
        if model.trust_remote_code:
            return _own_code(path, revision)
        raise _not_loaded(model, error) from error


def stop_ids(model: ModelSection, tokenizer: Any) -> list[int]:
    """Return the ids that end a turn.

    Returns:
        The tokenizer's id and those of generation_config.json, sorted.

    Raises:
        ConfigError: Neither of the two has an eos token, or generation_config.json cannot be read.
    """
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    revision = {} if model.revision is None else {"revision": model.revision}
    found = cached_file(
        model.path,
        "generation_config.json",
        **revision,
        _raise_exceptions_for_missing_entries=False,
    )
    if found is not None:
        given = _eos_of(Path(found))
        ids.update(given if isinstance(given, list) else [] if given is None else [given])
    if not ids:
        raise ConfigError(
            f"model.path = {model.path}: neither the tokenizer nor generation_config.json has an eos token; set one"
        )
    return sorted(ids)


def _eos_of(path: Path) -> Any:
    """Return `eos_token_id` of a generation_config.json. Raises `ConfigError` if that cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # what is no UTF-8 is a ValueError too
        raise ConfigError(f"model.path: {path} cannot be read: {error}; mend the file, or delete it") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model.path: {path} holds no JSON object; mend the file, or delete it")
    return found.get("eos_token_id")


class Codec:
    """Encodes and decodes with a tokenizer, safely in several threads.

    A fast tokenizer is used through its backend. Its own `__call__` would set truncation on it, which two threads must
    not do.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        # Another thread may be encoding at this moment, so change a setting only if it is on.
        if self._backend is not None and self._backend.truncation is not None:
            self._backend.no_truncation()
        if self._backend is not None and self._backend.padding is not None:
            self._backend.no_padding()

    async def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Encode a text, in a thread if it is long.

        Args:
            text: The text.
            special_tokens: Whether to add the special tokens that the tokenizer puts around a text.

        Returns:
            The token ids.
        """
        if len(text) < _INLINE_CHARACTERS:
            return self.encode_now(text, special_tokens)
        if self._backend is None:
            ids: list[int] = await asyncio.to_thread(self.encode_now, text=text, special_tokens=special_tokens)
            return ids
        # Only this function of the backend releases the interpreter lock; `encode` would block the event loop.
        (encoding,) = await asyncio.to_thread(
            self._backend.encode_batch_fast, input=[text], add_special_tokens=special_tokens
        )
        return encoding.ids  # type: ignore[no-any-return]

    def encode_now(self, text: str, special_tokens: bool = False) -> list[int]:
        if self._backend is None:
            return self._tokenizer.encode(text, add_special_tokens=special_tokens)  # type: ignore[no-any-return]
        return self._backend.encode(text, add_special_tokens=special_tokens).ids  # type: ignore[no-any-return]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, special tokens included."""
        if self._backend is None:
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)  # type: ignore[no-any-return]
        return self._backend.decode(ids, skip_special_tokens=False)  # type: ignore[no-any-return]


def _own_code(path: str, revision: dict[str, str]) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=True, **revision)
    except Exception as error:  # the model's own code may raise anything
        raise ConfigError(
            f"{path}: its tokenizer could not be loaded, neither from a tokenizer.json nor with the model's own code "
            f"({type(error).__name__}: {_first_line(error)})"
        ) from error


def _not_loaded(model: ModelSection, error: Exception) -> ConfigError:
    setting, path = ("model.tokenizer", model.tokenizer) if model.tokenizer else ("model.path", model.path)
    at = f" at model.revision = {model.revision}" if model.revision and not model.tokenizer else ""
    return ConfigError(
        f"{setting} = {path}{at}: no tokenizer.json could be loaded from it ({type(error).__name__}: "
        f"{_first_line(error)}); save the tokenizer there with tokenizer.save_pretrained, or name another with "
        f"model.tokenizer"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
