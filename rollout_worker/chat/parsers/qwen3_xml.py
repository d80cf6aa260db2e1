"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5 and on,
Nemotron 3. Some of them leave the outer tag out."""

import re

from rollout_worker.chat.parsers.tagged_calls import TaggedValues

NOTATION = TaggedValues(
    opening=re.compile(r"<tool_call>(?:\s*<function=)?|<function="),
    name=re.compile(r"(?<=<function=)(?P<name>[^<>\n]{1,256})>"),
    key=re.compile(r"<parameter=(?P<key>[^<>\n]{1,256})>"),
    ends_value=re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))"),
    closing=re.compile(r"</function>(?:\s*</tool_call>)?"),
    shape="function=name, then parameter=key and a value for each argument, all tags closed",
    lines=True,
)
