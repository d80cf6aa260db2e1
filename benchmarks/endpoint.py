"""Measures the way `endpoint` of `benchmarks.worker`: agents play the episodes of `ours` through their endpoints.

The agents' loops, clients and tools run in a separate process. The worker's CPU seconds are therefore only those of
the boundary around user code, the endpoint, and the sampling behind it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import uvloop

from benchmarks.worker_ways import IN_FLIGHT, ROWS, accuracy, measured, worker_config
from slipstream.rollout_worker.task.agent import Endpoint
from slipstream.rollout_worker.tools.toolbox import ToolBox
from tests.kit.worker import multiply, task


def endpoint(url: str, model: str, groups: int, turns: int, api: str = "chat/completions") -> dict[str, float]:
    """Measure our worker with agents that run in another process.

    Args:
        api: Path of the API that they ask by: chat/completions, responses or messages.
        url: Address of the fake vLLM.
        model: Folder of the model.
        groups: Number of groups to measure.
        turns: Turns of an episode.

    Returns:
        The figures of `measured`, by name.

    Raises:
        RuntimeError: If an episode did not run as scripted.
    """
    with players(api) as port, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_endpoint(url, model, groups, turns, port))


async def _endpoint(url: str, model: str, groups: int, turns: int, port: int) -> dict[str, float]:
    the_task = task(dataset=ROWS, tools=(), rewards=[accuracy], agent=_Elsewhere(port).play)
    found, rollouts = await measured(url, worker_config(model, turns, IN_FLIGHT), the_task, groups)
    if any(r.reward != 1.0 or r.turns != turns or len(r.segments) != 1 for r in rollouts):
        raise RuntimeError(f"episodes did not run as scripted: {rollouts[0]}")
    return found


class _Elsewhere:
    """Sends episodes over one connection to the process that plays them, at a port of this machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connected: asyncio.Task[asyncio.StreamWriter] | None = None
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def play(self, endpoint: Endpoint, prompt: list[dict[str, Any]]) -> None:
        if self._connected is None:
            self._connected = asyncio.create_task(self._connect())
        writer = await asyncio.shield(self._connected)
        done = self._waiting[endpoint.api_key] = asyncio.get_running_loop().create_future()
        writer.write(json.dumps([endpoint.base_url, endpoint.api_key, endpoint.model, prompt]).encode() + b"\n")
        await done

    async def _connect(self) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._reading = asyncio.create_task(self._read(reader))
        return writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            self._waiting.pop(line.decode().strip()).set_result(None)


@contextmanager
def players(api: str) -> Iterator[int]:
    """Run the process that plays episodes, and yield the port that it listens at."""
    command = [sys.executable, "-m", "benchmarks.endpoint", api]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def _chat(body: dict[str, Any], messages: list[Any]) -> bool:
    """Add an answer and its results to the messages. Returns whether there is more to ask."""
    message = body["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls") or []:
        product = multiply(**json.loads(call["function"]["arguments"]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(product)})
    return bool(message.get("tool_calls"))


def _responses(body: dict[str, Any], messages: list[Any]) -> bool:
    messages += body["output"]
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    for call in calls:
        product = str(multiply(**json.loads(call["arguments"])))
        messages.append({"type": "function_call_output", "call_id": call["call_id"], "output": product})
    return bool(calls)


def _messages(body: dict[str, Any], messages: list[Any]) -> bool:
    messages.append({"role": "assistant", "content": body["content"]})
    calls = [block for block in body["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": str(multiply(**call["input"]))} for call in calls
    ]
    if results:
        messages.append({"role": "user", "content": results})
    return bool(calls)


_FUNCTION = ToolBox([multiply]).schemas[0]["function"]
# By path: how an answer is read, the field of the conversation, and the tools.
APIS = {
    "chat/completions": (_chat, "messages", {"type": "function", "function": _FUNCTION}),
    "responses": (_responses, "input", {"type": "function", **_FUNCTION}),
    "messages": (_messages, "messages", {**_FUNCTION, "input_schema": _FUNCTION["parameters"]}),
}


async def _players(api: str) -> None:
    read, conversation, tool = APIS[api]
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def play(line: bytes, writer: asyncio.StreamWriter) -> None:
            base_url, key, model, messages = json.loads(line)
            headers = {"Authorization": f"Bearer {key}"}
            while True:
                body = {"model": model, conversation: messages, "tools": [tool]}
                async with session.post(f"{base_url}/{api}", json=body, headers=headers) as response:
                    if not read(await response.json(), messages):
                        break
            writer.write(key.encode() + b"\n")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with asyncio.TaskGroup() as tasks:
                while line := await reader.readline():
                    tasks.create_task(play(line, writer))

        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_players(sys.argv[1]))
