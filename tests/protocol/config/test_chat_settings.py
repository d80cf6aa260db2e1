"""What a run file may say of chat formats, tools and reward servers, before any model or library is asked."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from slipstream.protocol.addresses import checked_url, mcp_command
from slipstream.protocol.config.checks import RESERVED
from tests.kit import config


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        ({"renderer": ""}, "renderer\n  String should have at least 1 character"),
        ({"template": ""}, 'chat.template = "": names nothing'),
        (
            {"parser": "p.py:"},
            "chat.parser = p.py:: the file is named without a function; write it as path/to/file.py:function",
        ),
        (
            {"renderer": "qwen3", "template": "a.jinja"},
            "chat.template = a.jinja does nothing with chat.renderer = qwen3: .*leave one of them out",
        ),
        ({"renderer": "qwen3", "parser": "hermes"}, "chat.parser = hermes does nothing with chat.renderer = qwen3"),
        ({"format": "renderer", "parser": "hermes"}, "chat.parser = hermes does nothing with chat.format = renderer"),
        ({"format": "template", "renderer": "qwen3"}, "chat.renderer = qwen3 does nothing with chat.format = template"),
        (
            {"parser": "hermes", "renderer_options": {"a": 1}},
            "chat.parser = hermes does nothing with chat.renderer_options",
        ),
        ({"chat_template_kwargs": {"tools": 1, "messages": []}}, "messages, tools cannot be set by .*leave it out"),
        ({"chat_template_kwargs": {"tokenize": True}}, "tokenize cannot be set by the run file, .*leave it out"),
    ],
)
def test_settings_of_the_chat_format_that_contradict_are_refused_by_name(chat: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        config(chat=chat)


def test_variables_of_a_template_and_the_defaults_written_out_are_taken() -> None:
    config(chat={"chat_template_kwargs": {"enable_thinking": False, "documents": []}, "parser": "auto"})
    config(chat={"format": "renderer", "renderer": "qwen3", "renderer_options": {"enable_thinking": False}})


def test_every_parameter_of_transformers_rendering_is_answered_for() -> None:
    theirs = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert theirs - RESERVED == {"documents", "kwargs"}, "documents are a template's variable"


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"mcp_servers": [""]}, "'' is not an MCP server; give a URL such as"),
        ({"mcp_servers": ["http://a/mcp", 'python "unclosed']}, "is not a command line: .*close the quotes"),
        ({"mcp_servers": ['""']}, "names no program"),
        ({"mcp_servers": ["ftp://x"]}, "only http:// and https:// are supported"),
        ({"mcp_servers": ["http:///mcp"]}, "is not a URL; write it as http://host:port/mcp"),
        ({"reward_servers": {"org/judge": "judge"}}, "'judge' is not a URL; write it as http://host:port"),
        ({"reward_servers": {"": "http://judge:1"}}, "a classifier without a name"),
    ],
)
def test_an_address_that_no_server_can_have_is_refused_before_anything_starts(task: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        config(task=task)


def test_addresses_that_a_server_can_have_are_taken() -> None:
    assert mcp_command("python 'my server.py' --fast") == ["python", "my server.py", "--fast"]
    assert mcp_command("https://host/mcp") == []
    assert checked_url("http://[::1]:8300/") == "http://[::1]:8300"


@pytest.mark.parametrize("url", ["judge:8300", "ftp://x", "http://", "http://[::1", "http://a:port", "http://a b"])
def test_what_is_not_a_url_is_told(url: str) -> None:
    with pytest.raises(ValueError, match="is not a URL; write it as http://host:port"):
        checked_url(url)
