"""The adapters' middleware inside vLLM's API process, over a stand-in for vLLM's list of adapters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from slipstream.protocol.versions import name_of
from slipstream.weight_sync.vllm.engine_state import status_of
from slipstream.weight_sync.weights.snapshot import adapter_digest

pytest.importorskip("vllm")

FILE, CONFIG = b"weights", '{"r": 8}'


class Models:
    """vLLM's `OpenAIServingModels`, as far as adapters go. `refuses`: an error of the engine."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}
        self.refuses: str | None = None

    async def load_lora_adapter(self, request: Any) -> Any:
        if self.refuses:
            return SimpleNamespace(error=SimpleNamespace(message=self.refuses, code=500))
        assert (Path(request.lora_path) / "adapter_model.safetensors").is_file()
        self.lora_requests[request.lora_name] = SimpleNamespace(
            lora_name=request.lora_name, lora_int_id=len(self.lora_requests) + 1, lora_path=request.lora_path
        )
        return "Success"

    async def unload_lora_adapter(self, request: Any) -> str:
        del self.lora_requests[request.lora_name]
        return "Success"


class Engine:
    """vLLM's client. `running`: the adapters of requests in flight; `calls`: of the workers."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_lora_rank=8))
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 100, max_model_len=64)
        self.output_processor = SimpleNamespace(request_states={})
        self.calls: list[Any] = []
        self.reply: dict[str, Any] = {"logprobs": [[-1.0, -2.0]]}

    def runs(self, *names: str | None) -> None:
        states = {str(i): SimpleNamespace(lora_name=name) for i, name in enumerate(names)}
        self.output_processor.request_states = states

    @property
    def engine_core(self) -> Engine:
        return self

    async def call_utility_all_async(self, utility: str, method: str, args: Any) -> list[dict[str, Any]]:
        assert utility == "slipstream_workers"
        self.calls.append((method, args))
        return [{"answers": [self.reply], "error": None}]


class Answer:
    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.status: int = messages[0]["status"]
        self.headers: Mapping[bytes, bytes] = dict(messages[0].get("headers", ()))
        self.body: Any = json.loads(b"".join(part.get("body", b"") for part in messages[1:]) or b"null")

    @property
    def served(self) -> str | None:
        value = self.headers.get(b"slipstream-adapter")
        return value.decode() if value is not None else None

    @property
    def error(self) -> str:
        return str(self.body["error"]["message"])


class Server:
    """The middleware in front of an application that answers every request with its path."""

    def __init__(self) -> None:
        from slipstream.weight_sync.vllm.adapters import Adapters

        self.models, self.engine = Models(), Engine()
        state = SimpleNamespace(engine_client=self.engine, openai_serving_models=self.models)
        self._app = SimpleNamespace(state=state)
        self._middleware = Adapters(self._answer)

    async def ask(self, method: str, path: str, body: Any = None, header: str | None = None) -> Answer:
        path, _, query = path.partition("?")
        sent: list[dict[str, Any]] = []
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()

        async def receive() -> Any:
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [] if header is None else [(b"slipstream-adapter", header.encode())]
        scope = {"type": "http", "app": self._app, "method": method, "path": path, "headers": headers}
        await self._middleware({**scope, "query_string": query.encode()}, receive, send)
        return Answer(sent)

    async def put(self, version: int, file: bytes = FILE) -> str:
        name = name_of(version, adapter_digest(file, CONFIG))
        path = f"/slipstream/adapters/{name}?start=0&blake3={blake3(file).hexdigest()}"
        assert (await self.ask("PUT", path, file)).body == {"received": len(file)}
        return name

    async def load(self, name: str, file: bytes = FILE) -> Answer:
        body = {"config": CONFIG, "blake3": adapter_digest(file, CONFIG)}
        return await self.ask("POST", f"/slipstream/adapters/{name}/load", body)

    async def serve(self, version: int) -> str:
        file = FILE + bytes([version])
        name = await self.put(version, file)
        assert (await self.load(name, file)).status == 200
        assert (await self.ask("POST", f"/slipstream/adapters/{name}/serve", {})).status == 200
        return name

    async def generate(self, header: str | None = "policy") -> Answer:
        return await self.ask("POST", "/inference/v1/generate", {}, header)

    async def state(self) -> dict[str, Any]:
        state: dict[str, Any] = (await self.ask("GET", "/slipstream/adapters")).body
        return state

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(scope["path"]).encode()})


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return Server()


def files(tmp_path: Path) -> list[Path]:
    """Return the files in the server's folder."""
    return list(next(tmp_path.iterdir()).iterdir())


def is_there(folder: str | Path) -> bool:
    return Path(folder).is_dir()


async def test_i5_what_is_loaded_is_named_to_nobody_before_it_serves(server: Server) -> None:
    name = await server.put(1)
    assert (await server.load(name)).status == 200
    assert await server.state() == {"enabled": True, "max_rank": 8, "served": None, "loaded": [name]}
    assert (await server.generate(None)).served is None
    await server.ask("POST", f"/slipstream/adapters/{name}/serve", {})
    assert (await server.generate()).served == name
    assert status_of(server.engine).adapter == "1"


async def test_i5_a_request_that_knows_of_no_adapter_is_refused_once_one_serves(server: Server) -> None:
    name = await server.serve(1)
    answer = await server.generate(None)
    assert (answer.status, answer.served) == (409, name)
    assert name in answer.error
    assert (await server.ask("GET", "/health")).body == "/health"


async def test_the_last_three_can_be_asked_for_and_older_files_go(server: Server, tmp_path: Path) -> None:
    names = [await server.serve(version) for version in range(6)]
    assert (await server.state())["loaded"] == names[-3:]
    assert len(files(tmp_path)) <= 4


async def test_the_file_of_an_adapter_stays_while_a_request_may_need_it(server: Server) -> None:
    first = await server.serve(0)
    folder = Path(server.models.lora_requests[first].lora_path)
    server.engine.runs(first, None)
    for version in range(1, 6):
        await server.serve(version)
    assert first not in (await server.state())["loaded"]
    assert is_there(folder)
    server.engine.runs()
    await server.serve(6)
    assert not is_there(folder)


async def test_an_adapter_that_was_never_served_goes_with_the_next_one(server: Server) -> None:
    name = await server.put(1)
    await server.load(name)
    served = await server.serve(2)
    assert (await server.state())["loaded"] == [served]


async def test_a_refusal_of_vllm_is_said_and_nothing_of_the_adapter_stays(server: Server, tmp_path: Path) -> None:
    server.models.refuses = "LoRA rank 16 is greater than max_lora_rank 8."
    name = await server.put(1)
    answer = await server.load(name)
    assert answer.status == 422
    assert "LoRA rank 16 is greater" in answer.error
    assert files(tmp_path) == []


async def test_loading_twice_is_harmless(server: Server) -> None:
    name = await server.put(1)
    answers = await asyncio.gather(server.load(name), server.load(name))
    assert [answer.status for answer in answers] == [200, 200]


async def test_scores_are_asked_of_the_workers_under_the_adapter(server: Server) -> None:
    name = await server.serve(1)
    path = f"/slipstream/adapters/{name}/score"
    answer = await server.ask("POST", path, {"token_ids": [[1, 2, 3]]})
    assert answer.body == {"engines": [[[-1.0, -2.0]]]}
    [(method, (ids, (asked, number, folder)))] = server.engine.calls
    assert (method, ids, asked, number) == ("slipstream_score", [[1, 2, 3]], name, 1)
    assert is_there(folder)
    server.engine.reply = {"cannot": "its layers are spread over a pipeline"}
    assert (await server.ask("POST", path, {"token_ids": [[1, 2, 3]]})).status == 501


async def test_what_its_layers_hold_is_asked_of_the_workers(server: Server) -> None:
    name = await server.serve(1)
    server.engine.reply = {"checked": 8, "wrong": ["q_proj.lora_A"], "unread": []}
    answer = await server.ask("POST", f"/slipstream/adapters/{name}/layers", {})
    assert answer.body == {"checked": 8, "wrong": ["q_proj.lora_A"], "unread": []}
    [(method, ((asked, _, folder),)), (last, _)] = server.engine.calls
    assert (method, asked, last) == ("slipstream_read_adapter", name, "slipstream_layers")
    assert is_there(folder)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/slipstream/adapters/x", None, 404),
        ("DELETE", "/slipstream/adapters", None, 404),
        ("POST", f"/slipstream/adapters/{name_of(1, 'a' * 64)}/serve", {}, 409),
        ("POST", f"/slipstream/adapters/{name_of(1, 'a' * 64)}/score", {"token_ids": [[1, 2]]}, 409),
        ("POST", f"/slipstream/adapters/{name_of(1, 'a' * 64)}/layers", {}, 409),
        ("POST", f"/slipstream/adapters/{name_of(1, 'a' * 64)}/load", {"config": 1, "blake3": "x"}, 400),
        ("POST", f"/slipstream/adapters/{name_of(1, 'a' * 64)}/load", {"config": "{}", "blake3": "x"}, 409),
        ("POST", "/slipstream/adapters/../../etc/load", {"config": "{}", "blake3": "x"}, 404),
        ("PUT", f"/slipstream/adapters/{name_of(1, 'a' * 64)}?start=-1&blake3=x", b"x", 400),
        ("PUT", f"/slipstream/adapters/{name_of(1, 'a' * 64)}?start=0&blake3=x", b"x", 400),
        ("PUT", "/slipstream/adapters/policy?start=0&blake3=x", b"x", 400),
        ("PUT", f"/slipstream/adapters/{name_of(1, 'a' * 64)}?start=0&blake3=x", bytes((16 << 20) + 1), 413),
    ],
)
async def test_i8_bad_input_is_refused(server: Server, method: str, path: str, body: Any, status: int) -> None:
    assert (await server.ask(method, path, body)).status == status


async def test_a_server_without_lora_says_so(server: Server) -> None:
    server.engine.vllm_config.lora_config = None  # type: ignore[assignment]
    assert (await server.state())["enabled"] is False


@pytest.mark.parametrize("path", ["/slipstream/swap", "/start_weight_update"])
async def test_i5_no_adapter_outlives_the_base_that_it_was_proven_over(server: Server, path: str) -> None:
    await server.serve(1)
    assert (await server.ask("POST", path, {})).body == path
    state = await server.state()
    assert (state["served"], state["loaded"]) == (None, [])
    assert status_of(server.engine).adapter is None
    assert (await server.generate(None)).status == 200
