"""`<|tool_call|>[{"name": ..., "arguments": ...}]<|/tool_call|>`: Phi-4-mini."""

from rollout_worker.chat.parsers.tagged_json import TaggedJson

NOTATION = TaggedJson("<|tool_call|>", "<|/tool_call|>")
