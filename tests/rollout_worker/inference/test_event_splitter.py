from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout_worker.inference.client import EventSplitter

EVENTS = st.lists(st.binary(min_size=1, max_size=300).filter(lambda data: b"\n" not in data), max_size=6)


@given(EVENTS, st.lists(st.integers(1, 40), max_size=50))
def test_events_are_the_same_however_the_bytes_arrive(events, sizes):
    data = b"".join(b"data: " + event + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    splitter = EventSplitter()
    found = []
    for size in sizes:
        found += splitter.feed(data[:size])
        data = data[size:]
    found += splitter.feed(data)
    assert found == [event for event in events if event != b"[DONE]"]
