"""An MCP server for tests, as a program: `mcp_program.py stdio` or `mcp_program.py PORT`, which with `sse`
as a further word speaks that.

`low` as a further word: one made by hand that serves its list of tools in pages; `bad`: whose schemas are none; `same`,
`ignored`, `empty`: whose cursor stays the same, is not read, or is empty.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
import time
from typing import Any

import mcp.types as types
import PIL.Image
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("kit")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@server.tool()
def upper(text: str) -> str:
    """Write in capitals."""
    return text.upper()


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("on purpose")


@server.tool()
def die() -> str:
    """End the server."""
    print("the disk is full", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def pid() -> str:
    """The server's process and its parent."""
    return f"[{os.getpid()}, {os.getppid()}]"


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
async def hang() -> str:
    """Answer nothing any more."""
    time.sleep(600)  # noqa: ASYNC251
    return "done"


@server.tool(structured_output=False)
def picture(data: str = "") -> list[Any]:
    """Text and an image, or one of this data."""
    if data:
        return [types.ImageContent(type="image", data=data, mime_type="image/png")]
    file = io.BytesIO()
    PIL.Image.new("RGB", (32, 24), "red").save(file, "PNG")
    return ["a cat", Image(data=file.getvalue(), format="png")]


@server.tool(structured_output=False)
def files(seen: bool = False) -> list[Any]:
    """A link to a resource, one with its text, and one with bytes; or an image, sound and a resource without text."""
    if seen:
        sound = types.AudioContent(type="audio", data="AAAA", mime_type="audio/wav")
        empty = types.TextResourceContents(uri="file:///scan.pdf", text="")
        return [*picture(), sound, types.EmbeddedResource(type="resource", resource=empty)]
    link = types.ResourceLink(type="resource_link", name="report.csv", uri="file:///report.csv", mime_type="text/csv")
    text = types.TextResourceContents(uri="file:///notes.txt", text="the notes")
    data = types.BlobResourceContents(uri="file:///data.bin", blob="AAAA")
    return [link, *(types.EmbeddedResource(type="resource", resource=each) for each in (text, data))]


@server.tool()
def secret() -> str:
    """Return what the server sees of its starter."""
    return f"{os.environ.get('SLIPSTREAM_TOKEN')} {os.environ.get('KIT_KEY')}"


def paged() -> Server[Any]:
    async def listed(context: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        page = int((params.cursor if params else None) or 0)
        properties = {"a": {"type": "objekt"}} if "bad" in sys.argv else {}
        schema = {"type": "object", "properties": properties}
        tools = [types.Tool(name=f"tool_{page}", description="One.", input_schema=schema)]
        if page == 1:  # it breaks this promise
            tools[0].output_schema = {"type": "object", "required": ["promised"]}
            tools[0].description, tools[0].title = None, "The second."
        if "overlap" in sys.argv and page:
            tools.insert(0, types.Tool(name="tool_0", description="One.", input_schema=schema))
        following = str(page + 1) if page < 2 else None
        if word := next((word for word in ("same", "ignored", "empty") if word in sys.argv), ""):
            tools[0].name = "tool_0"
            following = {"same": "0", "ignored": str(page + 1), "empty": ""}[word]
        return types.ListToolsResult(tools=tools, next_cursor=following)

    async def called(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        given = params.arguments or {}
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=text) for text in given.get("texts", [])],
            structured_content=given.get("structured", None if "fail" in given else {"called": params.name}),
            is_error="fail" in given,
        )

    return Server("paged", on_list_tools=listed, on_call_tool=called)


async def serve_paged() -> None:
    from mcp.server.stdio import stdio_server

    low = paged()
    async with stdio_server() as (read, write):
        await low.run(read, write, low.create_initialization_options())


if __name__ == "__main__":
    if "low" in sys.argv:
        asyncio.run(serve_paged())
    elif sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("sse" if "sse" in sys.argv else "streamable-http", port=int(sys.argv[1]))
