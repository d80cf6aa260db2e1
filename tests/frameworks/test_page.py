"""docs/frameworks.md without its frameworks: each snippet is an agent, and has its row in the table."""

import ast
import re

import pytest

from tests.frameworks.test_frameworks import PAGE, SNIPPETS


def test_the_table_has_a_row_for_each_snippet():
    table = PAGE.partition("## ")[0]
    assert re.findall(r"^\| (.+?) \|", table, re.MULTILINE)[1:] == [snippet.name for snippet in SNIPPETS]
    assert len(SNIPPETS) == len(re.findall(r"^## ", PAGE, re.MULTILINE))


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[snippet.name for snippet in SNIPPETS])
def test_each_snippet_is_an_agent_of_those_columns(snippet):
    (agent,) = [
        each
        for each in ast.parse(snippet.code).body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == "agent"
    ]
    assert [argument.arg for argument in agent.args.args] == ["endpoint", "question", "answer"]
