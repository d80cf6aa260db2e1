"""The APIs that agents' endpoints answer: each reads requests as one conversation, and writes one kind of answer."""
