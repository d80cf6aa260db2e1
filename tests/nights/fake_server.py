"""A fake vLLM server with real weights: `python -m tests.nights.fake_server --model FOLDER --port N`.

It says what the example's tool asks for, by script, and tells the log-probs that the weights it holds give to what it
said. It receives weights with the real end of the http transport. So labels, proofs and a wrong swap mean what they
mean on a real server, at a hundredth of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.protocol import access
from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.transports.http.receiver import HttpReceiver
from slipstream.weight_sync.transports.receiver import Worker, of_one_version
from slipstream.weight_sync.weights.parts import joined
from tests.kit.fake_vllm import FakeEngine, FakeVllm, serving
from tests.kit.fake_vllm.engine import EngineError, Sample
from tests.kit.fake_vllm.policies import persistent, scripted

LATENCY_S = float(os.environ.get("FAKE_LATENCY_S", "0.1"))
# The share of its answers that are right, so that a group's rewards differ.
RIGHT = 0.6
REPLY = persistent(2)


class WeighedEngine(FakeEngine):
    """An engine whose log-probs are those of a model."""

    model: Any = None

    def state(self) -> dict[str, Any]:
        return {**super().state(), "transport": "http"}

    async def sample(
        self, token_ids: list[int], index: int, max_tokens: int, stops: list[int], aborted: asyncio.Event
    ) -> Sample:
        sample = await super().sample(token_ids, index, max_tokens, stops, aborted)
        # Nothing is awaited between the scores and their label.
        if sample.token_ids:
            sample.logprobs = self.scores([*token_ids, *sample.token_ids])[-len(sample.token_ids) :]
        sample.version = self.weight_version
        return sample

    @torch.no_grad()
    def scores(self, token_ids: list[int]) -> list[float]:
        """Return the log-probs of all tokens but the first."""
        ids = torch.tensor([token_ids])
        logits = self.model(ids).logits[0, :-1].float()
        found = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return found.clamp(max=0.0).tolist()  # type: ignore[no-any-return]


class WeighedVllm(FakeVllm):
    """A server around it, whose proofs score whole sequences."""

    engine: WeighedEngine

    def _log_probs(self, token_ids: list[int], engine: int = 0) -> list[float]:
        return self.engine.scores(token_ids)

    async def _facts(self, request: web.Request) -> web.Response:
        told = await super()._facts(request)
        assert isinstance(told.body, bytes)
        return web.json_response({**json.loads(told.body), "transport": "http"})


class ReceivingEnd:
    """The engine's end of the http transport, as hooks: receives on a thread, and loads at the swap.

    Attributes:
        wrong: Whether the next swap changes the label alone.
    """

    def __init__(self, engine: WeighedEngine) -> None:
        self.wrong = False
        self._engine = engine
        self._receivers: list[HttpReceiver] = []  # one for each rank of the learner
        self._arrived: asyncio.Future[dict[str, torch.Tensor]] | None = None
        engine.hooks |= {
            "init_weight_transfer_engine": self._join,
            "update_weights": self._receive,
            "staged": self._look,
            "swap": self._load,
        }

    async def _join(self, init_info: dict[str, Any]) -> None:
        for receiver in self._receivers:
            receiver.close()
        self._receivers = []
        try:
            for info in init_info["shares"]:
                receiver = await asyncio.to_thread(HttpReceiver, info, Worker(1, torch.device("cpu")))
                self._receivers.append(receiver)
        except TransferError as error:
            raise EngineError(str(error)) from error

    def _receive(self, update_info: dict[str, Any]) -> None:
        try:
            updates = of_one_version(update_info["shares"])
        except ValueError as error:
            raise EngineError(str(error)) from error
        receivers = self._receivers

        def receive() -> dict[str, torch.Tensor]:
            pieces = (
                dict(piece)
                for receiver, update in zip(receivers, updates, strict=True)
                for piece in receiver.receive(update).pieces
            )
            arrived = {name: tensor.clone() for name, tensor in joined(pieces)}
            for name, here in self._engine.model.state_dict().items():
                if name in arrived and arrived[name].shape != here.shape:
                    raise ValueError(f"{name} has shape {[*arrived[name].shape]}, and the model's is {[*here.shape]}")
            return arrived

        self._arrived = asyncio.ensure_future(asyncio.to_thread(receive))

    async def _look(self, body: dict[str, Any]) -> None:
        arrived = self._arrived
        assert arrived is not None
        await asyncio.wait([arrived], timeout=body["wait_s"])
        error = arrived.exception() if arrived.done() else None
        stage = "receiving" if not arrived.done() else "ready" if error is None else "failed"
        said = None if error is None else f"{type(error).__name__}: {error}"
        self._engine.staged = {"stage": stage, "error": said, "seconds": {}}

    def _load(self, body: Any) -> None:
        if self._arrived is None or not self._arrived.done():
            raise EngineError("no update is ready")
        if not self.wrong:
            self._engine.model.load_state_dict(self._arrived.result(), strict=False)
        self.wrong = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    arguments, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    asyncio.run(serve(arguments.model, arguments.host, arguments.port))


async def serve(model: str, host: str, port: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = WeighedEngine(
        policy=scripted(tokenizer, now_and_then_wrong),
        stop_token_ids=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")],
        latency_s=lambda index: LATENCY_S * (1 + index % 4),
        max_num_seqs=1024,
        max_model_len=512,
    )
    engine.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    received = ReceivingEnd(engine)
    fake = WeighedVllm(engine, token=access.given_token(), says={"max_model_len": 512})

    async def swap_wrongly(request: web.Request) -> web.Response:
        received.wrong = True
        return web.json_response({})

    fake.app.add_routes([web.post("/_wrong_swap", swap_wrongly)])
    async with serving(fake, host, port):
        await asyncio.Event().wait()


def now_and_then_wrong(text: str, index: int) -> str:
    """Say what the task asks for, or 0 in place of the product."""
    said = REPLY(text, index)
    return "0" if said.isdigit() and random.random() > RIGHT else said


if __name__ == "__main__":
    main()
