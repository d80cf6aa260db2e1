"""`<TOOLCALL>[{"name": ..., "arguments": ...}]</TOOLCALL>`: Nemotron before Nemotron 3, which writes qwen3_xml."""

from rollout_worker.chat.parsers.json_calls import TaggedJson

NOTATION = TaggedJson("<TOOLCALL>", "</TOOLCALL>")
