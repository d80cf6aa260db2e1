"""Measures the learner's cost of `http` with many servers, and the bytes that deltas save. Needs no vLLM.

    python -m benchmarks.weight_transfer [--json] [--millions 38] [--receivers 1 4 16] [--delta-millions 38]

`http`: `--receivers` processes pull weights of `--millions` million float32 values. Once all pull from the learner
(`direct`), and once from each other too, as the transport does it (`shared`).

seconds: Seconds until the last receiver has everything, verified.
learner_cpu_s: CPU seconds of the serving process.
learner_bytes: Bytes that it sent, in multiples of the weights.
copy_s: Seconds of a plain copy of the same bytes, in the same run.

`delta`: AdamW at 1e-6 on random gradients with float32 masters, published as bfloat16 and as float32.

share: Share of the values that changed in a step.
bytes: Bytes of the delta, divided by those of all weights.
encode_s, apply_s: Seconds to encode and to apply the delta, next to `copy_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from slipstream.weight_sync.server.cancellation import on_thread
from slipstream.weight_sync.transports.http.blob_server import BlobServer
from slipstream.weight_sync.transports.http.chunks import ChunkList, digest_of
from slipstream.weight_sync.transports.http.offers import Offer
from slipstream.weight_sync.transports.http.pull import Pull
from slipstream.weight_sync.transports.http.staging import Record, SharedStaging
from slipstream.weight_sync.vllm.chunk_route import serve_chunks
from slipstream.weight_sync.weights.delta_codec import apply, encode_delta
from slipstream.weight_sync.weights.manifest import Manifest

LEARNING_RATE = 1e-6


class Receiver:
    """Runs a process that stages chunks on request, and serves them to others as vLLM's API process does."""

    def __init__(self, number: int) -> None:
        self.key = f"{number:016x}"
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(theirs, self.key, tempfile.gettempdir()), daemon=True)
        self._process.start()

    def url(self) -> str:
        """Return the address of its staged chunks for the others. Blocks until it runs."""
        return f"http://127.0.0.1:{self._pipe.recv()}/slipstream/chunks/{self.key}"

    def pull(self, chunks: ChunkList, secret: str, urls: list[str]) -> None:
        """Pull all chunks. Blocks until it has everything.

        Raises:
            RuntimeError: If the receiver failed.
        """
        self._pipe.send((chunks.as_dict(), secret, urls))
        if error := self._pipe.recv():
            raise RuntimeError(error)

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join(20)
        self._process.kill()


def _receive(pipe: Connection, key: str, folder: str) -> None:
    tempfile.tempdir = folder
    asyncio.run(_stage_and_serve(pipe, key))


async def _stage_and_serve(pipe: Connection, key: str) -> None:
    import socket

    import uvicorn

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await serve_chunks(scope, send)

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve([listener]))
    staging = SharedStaging(key)
    pipe.send(listener.getsockname()[1])
    while (order := await on_thread(pipe.recv)) is not None:
        fields, secret, urls = order
        chunks = ChunkList(**fields)
        try:
            await on_thread(_stage, staging, chunks, secret, urls)
            pipe.send(None)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
    staging.close()
    server.should_exit = True
    await serving


def _stage(staging: SharedStaging, chunks: ChunkList, secret: str, urls: list[str]) -> None:
    def fill(into: torch.Tensor, before: Record | None) -> None:
        Pull(chunks, secret, urls, memoryview(into.numpy()), 300).run()

    record = Record(0, 0, chunks.total_bytes, chunks.root, secret_hash=digest_of(memoryview(secret.encode())))
    staging.receive(record, fill, 300)


async def http_case(flat: torch.Tensor, receivers: int, shared: bool) -> dict[str, Any]:
    servers = [Receiver(number) for number in range(receivers)]
    places = [server.url() for server in servers]
    with BlobServer("127.0.0.1") as depot:

        async def bring(server: Receiver, place: str, offer: Offer, chunks: ChunkList) -> None:
            if not shared:
                await on_thread(server.pull, chunks, depot.secret, [depot.url_of(offer.key)])
                return
            async with offer.seat(place) as urls:
                await on_thread(server.pull, chunks, depot.secret, urls)

        rounds = []
        for turn in range(3):  # The first turn maps the memory.
            flat[:8] = turn
            cpu, began, sent = time.process_time(), time.perf_counter(), depot.served
            chunks = ChunkList.of(flat)
            hashed = time.perf_counter()
            key = depot.put(flat)
            offer = Offer(key, depot.url_of(key), chunks)
            await asyncio.gather(*(bring(*pair, offer, chunks) for pair in zip(servers, places, strict=True)))
            rounds.append(
                {
                    "seconds": time.perf_counter() - began,
                    "hash_s": hashed - began,
                    "learner_cpu_s": time.process_time() - cpu,
                    "learner_bytes": (depot.served - sent) / len(flat),
                }
            )
            depot.drop(offer.key)
    for server in servers:
        server.stop()
    last = rounds[1:]
    figures = {name: round(statistics.fmean(one[name] for one in last), 4) for name in last[0]}
    return {"receivers": receivers, "way": "shared" if shared else "direct", **figures}


def delta_case(dtype: torch.dtype, millions: float, steps: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(torch.randn(int(millions * 1e6), generator=generator) * 0.02)
    optimiser = torch.optim.AdamW([master], lr=LEARNING_RATE)
    manifest = Manifest.of({"w": master}, dtype)
    held = master.detach().clone().to(dtype).view(torch.uint8)
    rounds = []
    for _ in range(steps):
        master.grad = torch.randn(master.shape, generator=generator) * 1e-3
        optimiser.step()
        new = master.detach().to(dtype).view(torch.uint8)
        began = time.perf_counter()
        delta = encode_delta(held, new, manifest)
        encoded = time.perf_counter()
        apply(delta.payload, held, manifest)
        applied = time.perf_counter()
        held.clone()
        rounds.append(
            {
                "share": delta.share,
                "bytes": len(delta.payload) / len(new),
                "encode_s": encoded - began,
                "apply_s": applied - encoded,
                "copy_s": time.perf_counter() - applied,
            }
        )
        assert torch.equal(held, new), "the delta must give every bit"
    figures = {name: round(statistics.fmean(one[name] for one in rounds), 5) for name in rounds[0]}
    return {"dtype": str(dtype).removeprefix("torch."), "millions": millions, "lr": LEARNING_RATE, **figures}


def copy_seconds(flat: torch.Tensor) -> float:
    target = torch.zeros_like(flat)
    began = time.perf_counter()
    target.copy_(flat)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON; otherwise one line a case")
    parser.add_argument("--millions", type=float, default=38)
    parser.add_argument("--receivers", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--delta-millions", type=float, default=38)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = int(arguments.millions * 4e6)
    flat = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    result: dict[str, Any] = {"cores": os.cpu_count(), "bytes": size, "copy_s": round(copy_seconds(flat), 4)}
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        result["http"] = [
            asyncio.run(http_case(flat, count, shared)) for count in arguments.receivers for shared in (False, True)
        ]
    tempfile.tempdir = None
    result["delta"] = [
        delta_case(dtype, arguments.delta_millions, arguments.steps)
        for dtype in (torch.bfloat16, torch.float32)
        if arguments.delta_millions
    ]
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        for line in value if isinstance(value, list) else [value]:
            print(name, line)


if __name__ == "__main__":
    main()
