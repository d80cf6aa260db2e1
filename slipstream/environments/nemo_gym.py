"""Tasks of NeMo Gym: its resources server keeps a session, runs the tools and judges; the policy is asked here.

The loop is that of NeMo Gym's `simple_agent` (release 0.4.0): `/seed_session`, then Responses of the policy and
`/<tool>` for each of its calls, then `/verify`. The session is a cookie.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from slipstream.environments.base import metrics_of
from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.task.agent import Endpoint
from slipstream.rollout_worker.task.task import Task

# Column with the line of NeMo Gym's data set.
LINE = "nemo_gym_line"
PARAMS = "responses_create_params"
# Bytes of a tool's or a verdict's answer.
_MAX_BYTES = 4 << 20
# The endpoint ends an episode that is at a limit of the run with these.
_AT_A_LIMIT = ("context_length_exceeded", "turn_limit")


def nemo_gym_task(url: str, dataset: str | Path, *, max_steps: int = 64, timeout_s: float = 60.0) -> Task:
    """Make a task of a resources server of NeMo Gym.

    Args:
        url: Address of the resources server, such as http://127.0.0.1:8001.
        dataset: Its data set, JSON lines with `responses_create_params`.
        max_steps: Answers of the policy in an episode.
        timeout_s: Seconds that the server may take for an answer.

    Raises:
        ConfigError: The address is none, or the data set cannot be read.
    """
    if not str(url).startswith(("http://", "https://")):
        raise ConfigError(f"nemo_gym_task({url!r}): give the resources server's address, such as http://127.0.0.1:8001")
    return Task(dataset=_rows(Path(dataset)), agent=_Player(url.rstrip("/"), max_steps, timeout_s).play)


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"nemo_gym_task(dataset={str(path)!r}): it cannot be read: {error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            params = json.loads(line)[PARAMS]
            asked = params["input"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"nemo_gym_task(dataset={str(path)!r}): line {number} is no task of NeMo Gym, which has "
                f"{PARAMS}.input: {type(error).__name__}: {error}"
            ) from None
        rows.append({"prompt": _prompt(asked), LINE: line})
    if not rows:
        raise ConfigError(f"nemo_gym_task(dataset={str(path)!r}): it has no lines")
    return rows


def _prompt(asked: Any) -> list[dict[str, str]]:
    """Return the prompt that readers and reward functions see."""
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    messages = []
    for item in items:
        content = item.get("content", "")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content)
        messages.append({"role": str(item.get("role", "user")), "content": str(content)})
    return messages


class _Player:
    def __init__(self, url: str, max_steps: int, timeout_s: float) -> None:
        self._url = url
        self._max_steps = max_steps
        self._timeout_s = timeout_s

    async def play(self, endpoint: Endpoint, nemo_gym_line: str) -> dict[str, Any]:
        """Play one episode.

        Args:
            endpoint: Answers with the policy.
            nemo_gym_line: The line of the data set.

        Raises:
            RuntimeError: The server failed, or gave no reward.
        """
        line = json.loads(nemo_gym_line)
        # The session is a cookie, also of servers that are named by an address.
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar) as server, aiohttp.ClientSession() as policy:
            await self._asked(server, "/seed_session", line)
            response = await self._conversation(server, policy, endpoint, line[PARAMS])
            verdict = await self._asked(server, "/verify", {**line, "response": response})
        if not isinstance(verdict, Mapping) or "reward" not in verdict:
            raise RuntimeError(f"NeMo Gym: {self._url}/verify gave no reward: {json.dumps(verdict)[:500]}")
        return {**metrics_of(verdict), "reward": verdict["reward"]}

    async def _conversation(
        self,
        server: aiohttp.ClientSession,
        policy: aiohttp.ClientSession,
        endpoint: Endpoint,
        params: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the last response, with all that was said as its output."""
        asked = params["input"]
        given = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        tools = {tool.get("name") for tool in params.get("tools") or ()}
        said: list[dict[str, Any]] = []
        response: dict[str, Any] | None = None
        for _ in range(self._max_steps):
            answer = await self._answer(policy, endpoint, {**params, "model": endpoint.model, "input": [*given, *said]})
            if answer is None:
                break
            response = answer
            said += answer["output"]
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
            if answer.get("incomplete_details") or not calls:
                break
            for call in calls:
                output = await self._called(server, call, tools)
                said.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})
        if response is None:
            raise RuntimeError("NeMo Gym: the prompt is longer than vllm.max_model_len")
        return {**response, "output": said}

    async def _answer(
        self, policy: aiohttp.ClientSession, endpoint: Endpoint, body: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return the policy's response; None at a limit of the run."""
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        # The episode's own time-out bounds it.
        timeout = aiohttp.ClientTimeout(total=None)
        url = f"{endpoint.base_url}/responses"
        async with policy.post(url, json=body, headers=headers, timeout=timeout) as answer:
            found: dict[str, Any] = await answer.json()
        if answer.status == 200:
            return found
        error = found.get("error") or {}
        if error.get("code") in _AT_A_LIMIT:
            return None
        raise RuntimeError(f"NeMo Gym: the policy's endpoint refused {PARAMS}: {error.get('message', found)}")

    async def _called(self, server: aiohttp.ClientSession, call: Mapping[str, Any], tools: set[Any]) -> str:
        """Return what a call of the policy gives, or its error."""
        name = call["name"]
        if name not in tools:  # which would reach any route of the server
            return json.dumps({"error": f"there is no tool {name!r}"})
        try:
            arguments = json.loads(call["arguments"])
        except ValueError as error:
            return json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
        # As in `simple_agent`, an error of the server is what the call gives.
        _, text = await self._posted(server, f"/{name}", arguments)
        return text

    async def _asked(self, server: aiohttp.ClientSession, path: str, body: Any) -> Any:
        status, text = await self._posted(server, path, body)
        if status != 200:
            raise RuntimeError(f"NeMo Gym: {self._url}{path} answered {status}: {text[:500]}")
        try:
            return json.loads(text)
        except ValueError:
            raise RuntimeError(f"NeMo Gym: {self._url}{path} answered no JSON: {text[:500]}") from None

    async def _posted(self, server: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with server.post(self._url + path, json=body, timeout=timeout) as answer:
                read = bytearray()
                async for part in answer.content.iter_any():
                    read += part
                    if len(read) > _MAX_BYTES:
                        raise RuntimeError(
                            f"NeMo Gym: {self._url}{path} answered with more than {_MAX_BYTES >> 20} MiB"
                        )
                return answer.status, read.decode("utf-8", "replace")
        except TimeoutError:
            raise RuntimeError(
                f"NeMo Gym: {self._url}{path} had no answer in {self._timeout_s:g} s; raise timeout_s, or look at the "
                f"server"
            ) from None
        except aiohttp.ClientError as error:
            raise RuntimeError(f"NeMo Gym: {self._url}{path}: {error}") from None
