"""Asks the teacher for its log-probs of the tokens that the policy sampled.

The teacher is any vLLM server of a model with the same vocabulary. It gets the ids of an episode and scores them
(`prompt_logprobs`), at temperature 1. With `teacher.prompt` it sees another system message before the same tokens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.protocol.config import ConfigError
from slipstream.protocol.config.sections import TeacherSection
from slipstream.protocol.messages import TeacherTop
from slipstream.rollout_worker.chat.base import OPENING, ChatFormat, PromptError
from slipstream.rollout_worker.chat.parsers.base import Message
from slipstream.rollout_worker.episodes.episode import Episode

# Requests at once of one worker, and sequences in each.
MAX_REQUESTS = 8
MAX_SEQUENCES = 8

# Bytes of the server's own words that are shown.
_MAX_SHOWN = 300

# Ids, spread over the vocabulary, that policy and teacher must write alike.
_COMPARED = 512

# Statuses that blame the request, which would get the same answer again. With others the groups wait: a proxy may have
# no server behind it, or the server another model.
_REFUSALS = frozenset({400, 413, 422})

# Environment variable with the key that the server was started with, if any (vLLM's --api-key).
KEY_VARIABLE = "TEACHER_API_KEY"

_CHECKED_WITHIN_S = 60.0

# Seconds of one request after which the teacher is told as slow.
_SLOW_AFTER_S = 20.0

_T = TypeVar("_T")
_Floats = npt.NDArray[np.float32]


class TeacherError(Exception):
    """The teacher's answer cannot be used, and would not change. The text names the server and the remedy."""


class _Passing(Exception):
    """The teacher does not answer now. The text says how."""


class _Entry(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    index: int
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Text(msgspec.Struct):
    prompt: str


@dataclass(frozen=True, slots=True)
class Scored:
    """The teacher's view of T tokens.

    Attributes:
        logprobs: float32 [T], of each token after those before it; NaN for the first.
        ids: int32 [T, k], its likeliest ids in each place, and `top`: float32 [T, k], their log-probs.
    """

    logprobs: _Floats
    ids: npt.NDArray[np.int32]
    top: _Floats


class Teacher:
    """A teacher's server.

    Args:
        url: Its address.
        notify: Told once why no log-probs come, while they do not.
        pause_s: Seconds before the next attempt, by the number of attempts.
        token: Bearer token that is sent to it; None for that of TEACHER_API_KEY, if any.
        tokenizer: The policy's, whose vocabulary the server's model must have; None where `check` gives it.
    """

    def __init__(
        self,
        url: str,
        section: TeacherSection,
        notify: Callable[[str], None],
        pause_s: Callable[[int], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        token: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._top_k = section.top_k
        self._sequences = max(1, MAX_SEQUENCES // (1 + section.top_k))
        self._prompt, self._timeout_s = section.prompt, section.timeout_s
        self._notify, self._pause_s, self._sleep = notify, pause_s, sleep
        self._free = asyncio.Semaphore(MAX_REQUESTS)
        self._tokenizer = tokenizer
        self._model: str | None = None

    async def teach(self, episodes: Sequence[Episode], columns: Mapping[str, Any]) -> None:
        """Put the teacher's log-probs into the segments of a group. Waits as long as the server does not answer.

        Args:
            columns: The row's, which `teacher.prompt` may name.

        Raises:
            TeacherError: The server refuses, or its answer is none.
            PromptError: `teacher.prompt` cannot be shown.
        """
        drafts = [(episode, draft) for episode in episodes for draft in episode.drafts]
        if any(draft.images for _, draft in drafts):
            raise TeacherError("teacher.url: a teacher scores token ids, and this episode has images; leave it out")
        heads: dict[int, tuple[list[int], list[int]]] = {}
        asked: list[list[int]] = []
        moved: list[int] = []
        for episode, draft in drafts:
            if id(episode.prompt) not in heads:
                heads[id(episode.prompt)] = await self._heads(episode, columns)
            shown, own = heads[id(episode.prompt)]
            if draft.ids[: len(shown)] != shown:
                raise PromptError("the episode does not begin with its prompt, so teacher.prompt has no place in it")
            asked.append([*own, *draft.ids[len(shown) :]])
            moved.append(len(own) - len(shown))
        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [
                    tasks.create_task(self._scored(asked[start : start + self._sequences]))
                    for start in range(0, len(asked), self._sequences)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        scored = [each for answer in answers for each in answer.result()]
        for (_, draft), found, by in zip(drafts, scored, moved, strict=True):
            places = np.flatnonzero(draft.mask) + by
            teacher, top = found.logprobs[places], found.top[places].ravel()
            values = np.concatenate([teacher, top])
            if len(wrong := values[~(np.isfinite(values) & (values <= 0))]):
                raise TeacherError(f"teacher.url = {self._url}: a log-prob is {wrong[0]}; is it a vLLM server?")
            draft.teacher = teacher
            if self._top_k:
                draft.teacher_top = TeacherTop(found.ids[places].ravel(), top, self._top_k)

    async def _heads(self, episode: Episode, columns: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Return the ids with which the episode begins and which the teacher does not see, and those that it sees in
        their place."""
        if self._prompt is None:
            return [], []
        if episode.chat is None:
            raise PromptError(
                "teacher.prompt needs an episode that begins with its row's prompt, and an agent writes its own"
            )
        return await heads(episode.chat, episode.prompt, filled(self._prompt, columns))

    async def _scored(self, sequences: Sequence[Sequence[int]]) -> list[Scored]:
        """Score some sequences, however long it takes."""
        attempt = 0
        while True:
            try:
                async with self._free:
                    return await self._asked(sequences)
            except _Passing as error:
                self._notify(str(error))
            self._model = None  # it may be started again with another one
            await self._sleep(self._pause_s(attempt))
            attempt += 1

    async def _asked(self, sequences: Sequence[Sequence[int]]) -> list[Scored]:
        """Ask, and tell of a wait that is long."""
        slow = (
            f"teacher.url = {self._url}: {len(sequences)} sequences wait longer than {_SLOW_AFTER_S:g} s for their "
            f"log-probs; give the teacher more cores or GPUs, or take a smaller one"
        )
        told = asyncio.get_running_loop().call_later(_SLOW_AFTER_S, self._notify, slow)
        try:
            return await self._ask(sequences)
        finally:
            told.cancel()

    async def _ask(self, sequences: Sequence[Sequence[int]]) -> list[Scored]:
        body = {
            "model": self._model or (await self._find()).id,
            "prompt": [list(ids) for ids in sequences],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self._top_k,
            "add_special_tokens": False,
        }
        reply = await self._post("/v1/completions", body, _Reply)
        choices = sorted(reply.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(len(sequences))):
            raise TeacherError(
                f"teacher.url = {self._url}: {len(choices)} answers for {len(sequences)} sequences; is it vLLM?"
            )
        try:
            return await asyncio.to_thread(lambda: [*map(self._read, sequences, choices)])
        except (ValueError, OverflowError) as error:
            raise TeacherError(f"teacher.url = {self._url}: an id is none: {error}; is it vLLM?") from None

    def _read(self, ids: Sequence[int], choice: _Choice) -> Scored:
        given = choice.prompt_logprobs
        if given is None or len(given) != len(ids):
            count = "no log-probs" if given is None else f"{len(given)} log-probs"
            raise TeacherError(
                f"teacher.url = {self._url}: {count} for {len(ids)} tokens; it must be a vLLM server that takes "
                f"prompt_logprobs"
            )
        shape = len(ids), self._top_k
        found = Scored(
            np.full(len(ids), np.nan, np.float32), np.zeros(shape, np.int32), np.full(shape, np.nan, np.float32)
        )
        for place, (token, entries) in enumerate(zip(ids, given, strict=True)):
            if entries is None:
                continue
            if (entry := entries.get(str(token))) is not None:
                found.logprobs[place] = entry.logprob
            for other, entry in entries.items():
                if entry.rank is not None and 1 <= entry.rank <= self._top_k:
                    found.ids[place, entry.rank - 1] = int(other)
                    found.top[place, entry.rank - 1] = entry.logprob
        return found

    async def _find(self) -> _Model:
        """Return the server's model, which has the policy's vocabulary."""
        models = (await self._get("/v1/models", _Models)).data
        if not models:
            raise TeacherError(f"teacher.url = {self._url}: it serves no model; look at its log")
        await self._check_vocabulary(models[0].id)
        self._model = models[0].id
        return models[0]

    async def check(self, tokenizer: Any, context: int) -> str | None:
        """Try the teacher before a run.

        Args:
            tokenizer: The policy's.
            context: Maximum tokens of an episode.

        Returns: A warning, where its context is too short for the longest episodes.

        Raises:
            ConfigError: It does not answer, or has another vocabulary.
        """
        try:
            async with asyncio.timeout(_CHECKED_WITHIN_S):
                self._tokenizer = tokenizer
                model = await self._find()
                (scored,) = await self._ask([compared_ids(tokenizer)[:8]])
        except TimeoutError:
            raise ConfigError(
                f"teacher.url = {self._url}: no answer within {_CHECKED_WITHIN_S:g} s; look at the server's log"
            ) from None
        except _Passing as error:
            raise ConfigError(f"{error}; a teacher is started with: slipstream serve MODEL --port PORT") from None
        except TeacherError as error:
            raise ConfigError(str(error)) from None
        if not np.isfinite(scored.logprobs[1:]).all() or not np.isfinite(scored.top[1:]).all():
            raise ConfigError(f"teacher.url = {self._url}: it gives no log-probs of a prompt's tokens; is it vLLM?")
        if model.max_model_len is not None and model.max_model_len <= context:
            return (
                f"teacher.url = {self._url}: its context is {model.max_model_len} tokens, and an episode may have "
                f"{context}, which it needs and one more; start it with --max-model-len {context + 1}"
            )
        return None

    async def _check_vocabulary(self, model: str) -> None:
        ids = compared_ids(self._tokenizer)
        theirs = (await self._post("/detokenize", {"model": model, "tokens": ids}, _Text)).prompt
        if differs := difference(str(self._tokenizer.decode(ids)), theirs):
            raise _Passing(f"teacher.url = {self._url}: {model} {differs}")

    async def _get(self, route: str, kind: type[_T]) -> _T:
        return await self._request("GET", route, None, kind)

    async def _post(self, route: str, body: Mapping[str, Any], kind: type[_T]) -> _T:
        return await self._request("POST", route, msgspec.json.encode(body), kind)

    async def _request(self, method: str, route: str, body: bytes | None, kind: type[_T]) -> _T:
        """Raises `_Passing` where the server may answer later, and `TeacherError` where it will not."""
        import aiohttp  # a child process that runs a tool need not wait for it

        headers = {"Content-Type": "application/json"}
        if token := self._token or os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {token}"
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.request(method, self._url + route, data=body, headers=headers) as response,
            ):
                answer, status = await response.read(), response.status
        except TimeoutError:
            raise _Passing(f"teacher.url = {self._url}: no answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Passing(f"teacher.url = {self._url}: {type(error).__name__}: {error}") from None
        if status != 200:
            words = answer[:_MAX_SHOWN].decode("utf-8", "replace")
            text = f"teacher.url = {self._url}: {route} answers {status}: {words}"
            if status in (401, 403):
                text += f"; set {KEY_VARIABLE} in the environment"
            raise TeacherError(text) if status in _REFUSALS else _Passing(text)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise TeacherError(f"teacher.url = {self._url}: {route} is not answered as by vLLM: {error}") from None


def filled(prompt: str, columns: Mapping[str, Any]) -> str:
    """Put a row's columns into `teacher.prompt`. Raises `PromptError` for a column that the row does not have, or of
    which it has None."""
    columns = {name: value for name, value in columns.items() if value is not None}
    try:
        return prompt.format_map(columns)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise PromptError(
            f"it cannot be filled from the row's columns {', '.join(columns)}: "
            f"{type(error).__name__}: {error}; write a brace that is none as {{{{ or }}}}"
        ) from None


async def heads(chat: ChatFormat, prompt: str | Sequence[Message], told: str) -> tuple[list[int], list[int]]:
    """Return the ids before which a conversation is the same for policy and teacher.

    Args:
        chat: The format that shows the prompt.
        told: What the teacher's system message says, after any that is there.

    Returns:
        The first ids of the prompt, and those that the teacher sees in their place.

    Raises:
        PromptError: The prompt is text, or the format does not show the message.
    """
    if isinstance(prompt, str):
        raise PromptError("teacher.prompt is a system message, and the prompts are text: make them lists of messages")
    shown = chat.shown(prompt)
    first = shown[0] if not isinstance(shown, str) and shown[0].get("role") in OPENING else None
    if first is None:
        taught = [{"role": "system", "content": told}, *shown]
    elif isinstance(first["content"], str):
        taught = [{**first, "content": f"{first['content']}\n\n{told}"}, *shown[1:]]
    else:
        raise PromptError("teacher.prompt cannot be added to a system message that is no text")
    policys, teachers = await chat.prompt_ids(prompt), await chat.prompt_ids(taught)
    same = 0
    for a, b in zip(reversed(policys), reversed(teachers), strict=False):
        if a != b:
            break
        same += 1
    own = teachers[: len(teachers) - same]
    if not own:
        raise PromptError("the chat format shows nothing of teacher.prompt")
    return policys[: len(policys) - same], own


def difference(ours: str, theirs: str) -> str:
    """Return how a teacher differs that writes ids as `theirs` and not as the policy's `ours`; "" if they are equal."""
    place = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if place is None and len(ours) == len(theirs):
        return ""
    place = min(len(ours), len(theirs)) if place is None else place
    return (
        f"has another vocabulary than the policy: the ids of {ours[place : place + 20]!r} are "
        f"{theirs[place : place + 20]!r} there; take a teacher with the policy's tokenizer"
    )


def compared_ids(tokenizer: Any) -> list[int]:
    """Return ids spread over a vocabulary, its special ones among them."""
    size = len(tokenizer)
    return sorted({*range(0, size, max(1, size // _COMPARED)), size - 1, *tokenizer.all_special_ids})
