"""`<minimax:tool_call><invoke name="..."><parameter name="...">value</parameter></invoke></minimax:tool_call>`:
MiniMax M2. The outer tags may hold several."""

import re

from rollout_worker.chat.parsers.tagged_calls import TaggedValues

NOTATION = TaggedValues(
    opening=re.compile(r"(?:<minimax:tool_call>\s*)?<invoke name="),
    name=re.compile(r'"?(?P<name>[^"<>\n]{1,256})"?>'),
    key=re.compile(r'<parameter name="?(?P<key>[^"<>\n]{1,256})"?>'),
    ends_value=re.compile(r"</parameter>(?=\s*(?:<parameter name=|</invoke>))"),
    closing=re.compile(r"</invoke>(?:\s*</minimax:tool_call>)?"),
    shape='<invoke name="name"><parameter name="key">value</parameter></invoke>',
)
