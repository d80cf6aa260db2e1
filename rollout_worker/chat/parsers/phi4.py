"""`<|tool_call|>[{"name": ..., "arguments": ...}]<|/tool_call|>`: Phi-4-mini."""

from rollout_worker.chat.parsers.json_calls import TaggedJson

NOTATION = TaggedJson("<|tool_call|>", "<|/tool_call|>")
