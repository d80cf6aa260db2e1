"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and on."""

import re

from rollout_worker.chat.parsers.tagged_calls import TaggedValues

NOTATION = TaggedValues(
    opening=re.compile(r"<tool_call>"),
    name=re.compile(r"\s*(?P<name>[^<>\s{}]{1,256})"),
    key=re.compile(r"<arg_key>(?P<key>[^<>\n]{1,256})</arg_key>\s*<arg_value>"),
    ends_value=re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))"),
    closing=re.compile(r"</tool_call>"),
    shape="name, then arg_key and arg_value for each argument, all tags closed",
)
