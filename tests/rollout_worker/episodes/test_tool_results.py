"""Long tool results: cut before they are tokenised."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout_worker.chat.template import TemplateFormat
from slipstream.rollout_worker.episodes.tool_results import cut, cut_result, token_counter
from slipstream.rollout_worker.tools.base import ToolResult
from tests.kit.worker import END_OF_TURN, TOKENIZER

COUNT = token_counter(TOKENIZER)


def counting(count=COUNT):
    """A counter, and the lengths of the texts that it was given."""
    lengths = []

    async def counted(text):
        lengths.append(len(text))
        return await count(text)

    return counted, lengths


async def test_a_short_result_is_not_even_counted():
    counted, lengths = counting()
    assert await cut("x" * 100, 100, counted) == "x" * 100
    assert lengths == []


async def test_a_result_of_few_tokens_stays_whole():
    async def two_words(text):
        return len(text.split())

    assert await cut("word " * 100, 100, two_words) == "word " * 100


@pytest.mark.parametrize("text", ["abc, def. " * 2000, "\u4f60\u597d" * 5000, " " * 30_000, "\n\t{}[]" * 4000])
async def test_the_middle_is_left_out_and_most_of_the_room_is_used(text):
    shorter = await cut(text, 400, COUNT)
    assert 300 <= await COUNT(shorter) <= 400
    head, _, rest = shorter.partition("... (")
    number, _, tail = rest.partition(" characters left out) ...")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + int(number) + len(tail) == len(text)
    assert abs(len(head) - len(tail)) <= 1


async def test_i9_five_megabytes_are_cut_before_they_are_tokenised():
    """They took 9 s and 2.9 GB."""
    counted, lengths = counting()
    shorter = await cut("lorem ipsum " * 420_000, 512, counted)
    assert await COUNT(shorter) <= 512
    assert max(lengths) < 512 * 8 + 100
    assert len(lengths) <= 4


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=300), st.integers(1, 60))
async def test_never_more_tokens_than_allowed(text, most):
    assert await COUNT(await cut(text, most, COUNT)) <= most


async def test_results_are_cut_one_by_one():
    chat = TemplateFormat(TOKENIZER, [END_OF_TURN], [], "the tiny model")
    results = [ToolResult("a", "x" * 90), ToolResult("b", "y" * 900, reason="raised", call_id="c1")]
    short, long = [await cut_result(result, 100, chat) for result in results]
    assert short is results[0]
    assert (long.name, long.failed, long.call_id) == ("b", True, "c1")
    assert "characters left out" in long.content
