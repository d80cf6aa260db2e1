"""`<tool_call>{"name": ..., "arguments": ...}</tool_call>`: Hermes, Qwen2.5, Qwen3.

https://huggingface.co/docs/transformers/chat_extras
"""

from rollout_worker.chat.parsers.json_calls import TaggedJson

NOTATION = TaggedJson("<tool_call>", "</tool_call>")
