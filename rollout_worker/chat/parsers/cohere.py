"""`<|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": ...}]<|END_ACTION|>`: Command R7B and A."""

from rollout_worker.chat.parsers.json_calls import TaggedJson

NOTATION = TaggedJson("<|START_ACTION|>", "<|END_ACTION|>", arguments=("parameters",), name="tool_name")
