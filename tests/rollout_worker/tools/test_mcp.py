"""Tools of MCP servers: real ones, as child processes, over both transports."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import PIL.Image
import psutil
import pytest
from mcp import MCPError

from slipstream.protocol import reasons
from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.chat.build import build_chat_format
from slipstream.rollout_worker.chat.parsers.base import ToolCall
from slipstream.rollout_worker.tools import mcp, mcp_connection
from slipstream.rollout_worker.tools.mcp import check_addresses, mcp_tools
from slipstream.rollout_worker.tools.toolbox import ToolBox
from slipstream.rollout_worker.user_code import UserCodeError
from tests.kit import WORKER, config
from tests.kit.fake_vllm.policies import in_turn, scripted
from tests.kit.ports import free_port
from tests.kit.seeing import build_seeing
from tests.kit.worker import TOKENIZER, fake, roll, task, until

HERE = Path(__file__).parent
PROGRAM = HERE.parents[1] / "kit" / "programs" / "mcp_program.py"
STDIO = shlex.join([sys.executable, str(PROGRAM), "stdio"])


def command(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def started(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@asynccontextmanager
async def http_server(port: int | None = None, *words: str) -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that answers, by its URL."""
    port = port or free_port()
    process = started(str(PROGRAM), str(port), *words)
    try:
        async with asyncio.timeout(60):
            while True:
                with suppress(OSError):
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    break
                assert process.poll() is None
                await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def box_of(*addresses: str, timeout_s: float = 60.0, **options: object) -> AsyncIterator[ToolBox]:
    async with mcp_tools(addresses, HERE, **options) as tools:
        yield ToolBox(tools, timeout_s)


async def one(box: ToolBox, name: str, **arguments: object):
    (result,) = await box.run([ToolCall(name, arguments)])
    return result


@asynccontextmanager
async def either(transport: str) -> AsyncIterator[str]:
    if transport == "stdio":
        yield STDIO
        return
    async with http_server() as (url, _):
        yield url


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_a_server_s_tools_are_called_over_either_transport(transport, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "hidden")
    monkeypatch.setenv("KIT_KEY", "seen")
    async with either(transport) as address, box_of(address) as box:
        add = next(schema for schema in box.schemas if schema["function"]["name"] == "add")
        assert add["function"]["description"] == "Add two integers."
        assert add["function"]["parameters"]["properties"]["a"]["type"] == "integer"
        assert (await one(box, "add", a=20, b=22)).content == "42"
        coerced = await one(box, "add", a="20", b=22)
        assert (coerced.content, coerced.coerced) == ("42", True)
        assert (await one(box, "picture")).content == "a cat\n(image left out)"
        assert (await one(box, "files")).content == (
            "report.csv: file:///report.csv, text/csv\nthe notes\n(resource file:///data.bin left out)"
        )
        failed = await one(box, "fail")
        assert (failed.reason, failed.counted_as) == (reasons.TOOL_RAISED, "fail")
        assert "fail" in json.loads(failed.content)["error"]
        assert (await one(box, "add", a="many", b=1)).reason == reasons.TOOL_ARGUMENTS
        assert (await one(box, "upper", text="a\ud800b")).content == "A?B", "a surrogate would end the connection"
        assert (await one(box, "add", a=10**20, b=float("nan"))).reason == reasons.TOOL_ARGUMENTS
        assert (await one(box, "add", a=10**30, b=0)).content == str(10**30)
        if transport == "stdio":
            assert (await one(box, "secret")).content == "None seen"
        assert len((await one(box, "upper", text="ß" * 600_000)).content) > 1_000_000, "more than httpx2's own limit"
        results = await box.run([ToolCall("add", {"a": number, "b": 0}) for number in range(200)])
        assert [result.content for result in results] == [str(number) for number in range(200)]


async def test_a_policy_that_sees_gets_a_server_s_images(tmp_path):
    images = build_chat_format(config(model={"path": str(build_seeing(tmp_path))}, images={"enabled": True}), []).images
    async with mcp_tools([STDIO], HERE) as tools:
        box = ToolBox(tools, 60.0, images=images)
        text, picture = (await one(box, "picture")).content
        assert text == {"type": "text", "text": "a cat"}
        assert (picture["type"], picture["image"].size) == ("image", (32, 24))
        PIL.Image.new("RGB", (8, 8)).save(tmp_path / "mine.png")
        shown = (await one(box, "files", seen=True)).content
        assert [part.get("text", part["type"]) for part in shown] == [
            "a cat",
            "image",
            "(audio left out)",
            "(empty resource file:///scan.pdf)",
        ]
        assert "it is damaged" in (await one(box, "picture", data=str(tmp_path / "mine.png"))).content
        assert (await one(box, "add", a=20, b=22)).content == "42"


async def test_all_pages_of_the_list_and_structured_content():
    async with box_of(f"{STDIO} low") as box:
        assert [schema["function"]["name"] for schema in box.schemas] == ["tool_0", "tool_1", "tool_2"]
        assert (await one(box, "tool_2")).content == '{"called": "tool_2"}'
        failed = await one(box, "tool_2", fail=True)
        assert (failed.reason, "low says that the call failed, and not why" in failed.content) == ("raised", True)
        broken = await one(box, "tool_1")
        assert (broken.reason, broken.content) == (None, '{"called": "tool_1"}'), "its schema of results is not its own"
        assert (await one(box, "tool_0")).content == '{"called": "tool_0"}'


async def test_a_tool_on_two_pages_is_one_and_a_title_stands_for_a_description():
    async with box_of(f"{STDIO} low overlap") as box:
        described = {schema["function"]["name"]: schema["function"]["description"] for schema in box.schemas}
        assert described == {"tool_0": "One.", "tool_1": "The second.", "tool_2": "One."}


@pytest.mark.parametrize("word", ["same", "ignored", "empty"])
async def test_a_list_whose_cursors_lead_to_no_new_page_ends(word):
    """The cursor stays the same, another one leads to the same page, and an empty one."""
    async with box_of(f"{STDIO} low {word}") as box:
        assert [schema["function"]["name"] for schema in box.schemas] == ["tool_0"]


@pytest.mark.parametrize(
    ("texts", "structured", "shown"),
    [
        (["Created."], {"key": "K-12"}, 'Created.\n{"key": "K-12"}'),
        (['{\n  "key": "K-12", "n": 1\n}'], {"n": 1, "key": "K-12"}, '{\n  "key": "K-12", "n": 1\n}'),
        (["Found:", '{"key": "K-12"}'], {"key": "K-12"}, 'Found:\n{"key": "K-12"}'),
        (["true"], {"result": True}, "true"),
        (["a", "2"], {"result": ["a", 2]}, "a\n2"),
        (["a"], {"result": ["a", "b"]}, 'a\n{"result": ["a", "b"]}'),
        ([], {"key": "é"}, '{"key": "é"}'),
        ([], {"result": []}, '{"result": []}'),
        (["2 rows"], [{"a": 1}, {"a": 2}], '2 rows\n{"result": [{"a": 1}, {"a": 2}]}'),
        (["5"], 5, "5"),
    ],
)
async def test_structured_content_is_shown_unless_a_text_says_the_same(texts, structured, shown):
    async with box_of(f"{STDIO} low") as box:
        result = await one(box, "tool_0", texts=texts, structured=structured)
        assert result.content == shown
        failed = await one(box, "tool_0", texts=texts, structured=structured, fail=True)
        assert json.loads(failed.content) == {"error": shown}


async def test_a_schema_that_is_none_is_refused_naming_the_server():
    async with mcp_tools([f"{STDIO} low bad"], HERE) as tools:
        with pytest.raises(ConfigError, match=r"from the MCP server .* low bad is not a tool's JSON schema: 'objekt'"):
            ToolBox(tools)


async def test_a_tool_whose_name_models_cannot_write_is_left_out_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(mcp, "NAME", re.compile("tool_[12]"))
    async with box_of(f"{STDIO} low") as box:
        assert [schema["function"]["name"] for schema in box.schemas] == ["tool_1", "tool_2"]
    assert "has a tool that is named 'tool_0', which models cannot write: it is left out" in caplog.text


async def test_a_server_with_very_many_tools_or_a_huge_one_is_refused_saying_so(monkeypatch, caplog):
    monkeypatch.setattr(mcp, "MAX_TOOLS", 2)
    with pytest.raises(ConfigError, match=r"it has more than 2 tools, .* or name those that are needed in include$"):
        async with box_of(f"{STDIO} low"):
            pass
    assert not caplog.records, "its process is waited for"
    monkeypatch.setattr(mcp, "MAX_SCHEMA_CHARACTERS", 200)
    with pytest.raises(ConfigError, match=r"its tool add has a description and schema of \d+ .*; name it in exclude"):
        async with box_of({"address": STDIO, "include": ["add"]}):
            pass


async def test_a_slow_call_times_out_and_the_others_go_on():
    async with box_of(STDIO, timeout_s=0.5) as box:
        slow, quick = await box.run([ToolCall("wait", {"seconds": 60}), ToolCall("add", {"a": 1, "b": 2})])
        assert (slow.reason, quick.content) == (reasons.TIMEOUT, "3")
        assert f"the MCP server {STDIO[:50]}" in slow.content
        assert (await one(box, "add", a=2, b=3)).content == "5"


async def test_a_silent_server_is_started_again_if_it_hangs_and_not_if_it_is_at_work(monkeypatch, caplog):
    pings = []
    ping = mcp_connection.McpServer._ping
    monkeypatch.setattr(mcp_connection.McpServer, "_ping", lambda *given: pings.append(1) or ping(*given))
    monkeypatch.setattr(mcp_connection, "PING_WITHIN_S", 0.5)
    async with mcp_tools([STDIO], HERE) as tools:
        box, hasty = ToolBox(tools), ToolBox(tools, 0.3)
        first = (await one(box, "pid")).content
        assert (await one(hasty, "wait", seconds=60)).reason == reasons.TIMEOUT
        assert (await one(box, "pid")).content == first
        hung = await hasty.run([ToolCall("hang", {})] * 3)
        assert {result.reason for result in hung} == {reasons.TIMEOUT}
        await until(lambda: "hangs: it answered neither a call in time nor a ping" in caplog.text)
        assert (await one(box, "pid")).content != first
        assert len(pings) == 2
    assert caplog.text.count("hangs") == 1
    assert ended(json.loads(first)[0])


async def test_a_server_that_dies_fails_its_calls_once_and_is_connected_again():
    async with box_of(STDIO) as box:
        results = await box.run([ToolCall("wait", {"seconds": 60}), ToolCall("die", {})])
        assert {result.reason for result in results} == {reasons.TOOL_RAISED}
        assert all("MCP server" in result.content for result in results)
        assert all("it wrote last: the disk is full" in result.content for result in results)
        assert (await one(box, "add", a=2, b=3)).content == "5"


async def test_some_tools_of_a_server_under_names_of_the_task(monkeypatch):
    monkeypatch.setattr(mcp, "MAX_TOOLS", 2)  # of those that are used
    some = {"address": STDIO, "prefix": "math_", "include": ["add", "upper", "fail"], "exclude": ["fail"]}
    async with box_of(some) as box:
        assert [schema["function"]["name"] for schema in box.schemas] == ["math_add", "math_upper"]
        assert (await one(box, "math_add", a=2, b=3)).content == "5"
        assert (await one(box, "math_upper", text="so")).content == "SO"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"include": ["ad"]}, "no tool 'ad', which include names; did you mean add"),
        ({"exclude": ["everything"]}, "no tool 'everything', which exclude names; it has add, upper"),
        ({"include": ["add"], "exclude": ["add"]}, "no tools that can be used"),
    ],
)
async def test_a_choice_of_tools_that_cannot_be_meant_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        async with box_of({"address": STDIO, **fields}):
            pass


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"adress": STDIO}, "address: Field required"),
        ({"address": STDIO, "prefix": "a b"}, "prefix"),
        ({"address": STDIO, "transport": "sse"}, "leave out transport"),
        ({"address": "ws://host/mcp"}, "only http:// and https://"),
    ],
)
def test_a_server_with_fields_that_cannot_be_is_refused_in_the_task_and_in_the_run_file(given, words):
    with pytest.raises(ConfigError, match=words):
        check_addresses([given])
    with pytest.raises(ValueError, match="mcp_servers"):
        config(task={"path": "task.py:task", "mcp_servers": [given]})
    some = config(task={"path": "task.py:task", "mcp_servers": [STDIO, {"address": STDIO, "prefix": "p_"}]})
    assert some.task.mcp_servers[1].prefix == "p_"


async def test_a_server_over_sse():
    port = free_port()
    async with http_server(port, "sse"), box_of({"address": f"http://127.0.0.1:{port}/sse", "transport": "sse"}) as box:
        assert (await one(box, "add", a=2, b=3)).content == "5"


async def test_what_a_server_writes_to_stderr_is_passed_on(tmp_path):
    with await asyncio.to_thread(open, tmp_path / "stderr", "w") as errors:
        async with mcp_tools([STDIO], HERE, errors=errors) as tools:
            with pytest.raises(UserCodeError, match="the disk is full"):
                await next(tool for tool in tools if tool.schema["function"]["name"] == "die").call({}, 30.0)
        assert "the disk is full" in (tmp_path / "stderr").read_text()


async def test_an_http_server_that_is_started_again_is_connected_again(monkeypatch):
    monkeypatch.setattr("slipstream.rollout_worker.tools.mcp_connection.RETRY_AFTER_S", 0.0)
    port = free_port()
    async with http_server(port) as (url, process), box_of(url) as box:
        process.kill()
        process.wait()
        lost, still = await one(box, "add", a=2, b=3), await one(box, "add", a=2, b=3)
        assert (lost.reason, still.reason) == (reasons.TOOL_RAISED, reasons.TOOL_RAISED)
        assert "was lost" in lost.content
        assert "cannot be reached" in still.content
        async with http_server(port):
            assert (await one(box, "add", a=2, b=3)).content == "5"


async def test_a_call_whose_session_the_server_has_forgotten_is_made_in_a_new_one():
    port = free_port()
    async with http_server(port) as (url, process), box_of(url) as box:
        assert (await one(box, "add", a=1, b=1)).content == "2"
        process.kill()
        process.wait()
        async with http_server(port):
            results = [await one(box, "add", a=2, b=number) for number in range(3)]
    assert [result.content for result in results][1:] == ["3", "4"]
    assert results[0].content == "2" or "was lost" in results[0].content


@pytest.mark.parametrize("code", [-32001, -32004, 404])
async def test_any_error_of_a_session_leads_to_a_new_one_and_one_that_stays_is_told(code, monkeypatch):
    """Servers of other languages than the library's have codes of their own."""
    run, made = mcp_connection._Connection.run, []

    async def forgets(connection, work):
        made.append(connection)
        if len(made) == 2 or len(made) > 3:
            raise MCPError(code, "Session not found")
        return await run(connection, work)

    monkeypatch.setattr(mcp_connection._Connection, "run", forgets)
    async with box_of(STDIO) as box:  # the list of tools is the first use
        assert (await one(box, "add", a=2, b=3)).content == "5"
        assert made[1] is not made[2]
        assert "Session not found" in (await one(box, "add", a=2, b=3)).content
    assert len(made) == 5


async def test_calls_of_a_server_that_stays_away_share_one_try(monkeypatch):
    """No storm of connections, or of processes: not of calls at one time, nor of those in the pause after it."""
    tries = []
    monkeypatch.setattr("slipstream.rollout_worker.tools.mcp_connection.RETRY_AFTER_S", 600.0)
    async with http_server() as (url, process), box_of(url) as box:
        process.kill()
        process.wait()
        await one(box, "add", a=2, b=3)
        opened = mcp_connection._Connection.open
        monkeypatch.setattr(mcp_connection._Connection, "open", lambda *given: tries.append(1) or opened(*given))
        for _ in range(2):
            results = await box.run([ToolCall("add", {"a": 2, "b": 3})] * 20)
            assert all("cannot be reached" in result.content for result in results)
    assert len(tries) == 1


async def test_a_stdio_server_ends_with_the_context():
    async with box_of(STDIO) as box:
        server, guard = json.loads((await one(box, "pid")).content)
    assert ended(server)
    assert ended(guard)


async def test_no_process_of_a_server_outlives_a_worker_that_is_killed(tmp_path):
    """This includes one that does not read its stdin, and one that it has started itself."""
    (tmp_path / "stubborn.py").write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} end')\n"
        "time.sleep(600)\n"
    )
    worker = (
        "import asyncio\nfrom pathlib import Path\nfrom slipstream.rollout_worker.tools.mcp import mcp_tools\n"
        "async def main():\n"
        f"    async with mcp_tools([{shlex.join([sys.executable, 'stubborn.py'])!r}], Path({str(tmp_path)!r})): pass\n"
        "asyncio.run(main())\n"
    )
    process = started("-c", worker)
    pids = tmp_path / "pids"
    try:
        await until(lambda: pids.exists() and pids.read_text().endswith("end"), 60)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    for pid in map(int, pids.read_text().split()[:2]):
        await until(lambda pid=pid: ended(pid))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://127.0.0.1:9/mcp?key=secret", r"http://127.0.0.1:9/mcp cannot be reached.*start it"),
        ("http://127.0.0.1:9", r"has no path, which usually is /mcp: write http://127.0.0.1:9/mcp, or start it$"),
        ("no-such-program --serve", "no program 'no-such-program'.*install it"),
        (command("print('hello', flush=True); import time; time.sleep(600)"), "did not answer within 1 s"),
        (command("raise SystemExit(3)"), "cannot be reached: .*look at what it wrote to stderr"),
        (
            command("import os; os.environ['DB_URL']"),
            "cannot be reached: .*it wrote last: .*KeyError: 'DB_URL'; fix its command line",
        ),
        (command("import time; time.sleep(600)"), "did not answer within 1 s"),
    ],
)
async def test_a_server_that_gives_no_tools_is_refused_with_a_remedy(address, message):
    patience_s = 1.0 if "within 1 s" in message else 30.0
    with pytest.raises(ConfigError, match=message) as caught:
        async with mcp_tools([address], HERE, connect_timeout_s=patience_s):
            pass
    assert "secret" not in str(caught.value)
    assert ("stderr" in str(caught.value)) <= (not address.startswith("http"))
    for child in psutil.Process().children(recursive=True):
        assert "process_guard" not in " ".join(child.cmdline())


async def test_a_server_that_refuses_over_http_is_named_with_its_status():
    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match=r"HTTP status 401; .* can stand in its address, as a key"):
            async with mcp_tools([f"http://127.0.0.1:{port}/mcp"], HERE):
                pass


@pytest.mark.parametrize("address", ["", "http://", "ws://host/mcp", "server 'unclosed", 3])
def test_what_cannot_be_an_address_is_refused_without_connecting(address):
    with pytest.raises(ConfigError, match="mcp_servers"):
        check_addresses([address])


async def test_a_name_that_two_servers_have_is_refused_naming_both():
    def add(a: int) -> int:
        """Add.

        Args:
            a: One.
        """
        return a

    async with mcp_tools([STDIO], HERE) as tools:
        with pytest.raises(
            ConfigError, match=f"two tools are named 'add', one from the function at {__file__}:.*, one from the MCP"
        ):
            ToolBox([add, *tools])


async def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("slipstream.rollout_worker.tools.mcp.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream-rl\[mcp\]'"):
        async with mcp_tools([STDIO], HERE):
            pass


def test_a_task_with_servers_connects_to_none_when_it_is_made():
    made = task(mcp_servers=[f"{sys.executable} -c 'raise SystemExit'", f"http://127.0.0.1:{os.getpid()}/mcp"])
    assert len(made.mcp_servers) == 2
    with pytest.raises(ConfigError, match="prompts are text"):
        task(dataset=[{"prompt": "text", "answer": 1}], tools=[], mcp_servers=[STDIO])


async def test_episodes_call_the_servers_of_the_task_and_of_the_run_file():
    def calling(tool: str) -> str:
        return f'<tool_call>{{"name": "{tool}", "arguments": {{"a": 20, "b": 22}}}}</tool_call>'

    policy = scripted(TOKENIZER, in_turn([calling("add") + calling("tool_2") + calling("multiply"), "done"]))
    roomy = {"max_turn_tokens": 600, "max_episode_tokens": 2000}
    of_the_run = {"mcp_servers": [f"{STDIO} low"]}
    run_config = config(WORKER, task=of_the_run, rollout=roomy, vllm={"max_model_len": 8000})
    run = await roll(task(mcp_servers=[STDIO]), fake(policy), config=run_config)
    for rollout in run.rollouts:
        said = [message["content"] for message in json.loads(rollout.messages) if message["role"] == "tool"]
        assert said == ["42", '{"called": "tool_2"}', "440"]
        assert rollout.tool_failures == 0
    assert len(run.rollouts) == 2
