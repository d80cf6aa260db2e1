"""`<TOOLCALL>[{"name": ..., "arguments": ...}]</TOOLCALL>`: Nemotron before its third generation, which is qwen3_xml."""

from rollout_worker.chat.parsers.tagged_json import TaggedJson

NOTATION = TaggedJson("<TOOLCALL>", "</TOOLCALL>")
