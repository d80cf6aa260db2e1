"""Plays agents, and checks that one by another API leaves the same data as one by chat completions."""

from tests.kit.agent import agent_task
from tests.kit.worker import TOKENIZER, accuracy, fake, roll

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'


async def rolled(agent, server=None, **options):
    run = await roll(agent_task(agent, **options.pop("task", {})), server or fake(), **options)
    assert run.queue.failures == {}, run.queue.failures
    return run.rollouts


async def plays_as(by_chat, agent):
    """Check that both agents, of a tool loop of one call, leave the same segment, counts, reward and messages."""
    (chat, _), (other, _) = [await rolled(each, task={"rewards": [accuracy]}) for each in (by_chat, agent)]
    (segment,), (same,) = chat.segments, other.segments
    text = TOKENIZER.decode(same.token_ids[same.loss_mask], skip_special_tokens=False)
    assert text == CALL + "<|im_end|>408<|im_end|>"
    assert same.token_ids.tolist() == segment.token_ids.tolist()
    assert same.loss_mask.tolist() == segment.loss_mask.tolist()
    assert (other.reward, other.turns, other.tool_calls) == (1.0, 2, 1)
    assert other.messages == chat.messages
