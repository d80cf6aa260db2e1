"""What the queue goes by of a group, its payload aside: how large it is, and what sampled it."""

from __future__ import annotations

import msgspec

from protocol.messages import Group, VersionSpan

# Of one server in one group, far above any real one; what is beyond is taken to be one range.
_MOST_RANGES = 32


class SampledBy(msgspec.Struct, frozen=True, array_like=True):
    """Versions that one server sampled of a group, from oldest to newest, both ends included."""

    server: str
    oldest: int
    newest: int


class GroupFacts(msgspec.Struct, frozen=True):
    """What the ledger keeps of a group: its size as submitted, its sampled tokens, and what sampled them: for each
    server the ranges of versions without a gap, as what it sampled before and after a failed proof is good."""

    bytes: int = 0
    tokens: int = 0
    oldest_version: int = 0
    servers: tuple[SampledBy, ...] = ()

    @classmethod
    def of(cls, group: Group, size: int) -> GroupFacts:
        """The facts of a valid group of `size` bytes. A server that is named but sampled no token of it is left out."""
        spans: dict[str, list[VersionSpan]] = {}
        for rollout in group.rollouts:
            for segment in rollout.segments:
                for span in segment.version_spans:
                    spans.setdefault(group.server_names[span.server], []).append(span)
        servers = tuple(
            SampledBy(name, oldest, newest)
            for name, of_it in sorted(spans.items())
            for oldest, newest in _ranges({span.version for span in of_it})
        )
        return cls(size, group.sampled_tokens, min(sampled.oldest for sampled in servers), servers)

    def sampled_within(self, first: int, end: int) -> bool:
        """Whether some token is by a version from `first` up to, and without, `end`."""
        return any(sampled.oldest < end and sampled.newest >= first for sampled in self.servers if first < end)


def _ranges(versions: set[int]) -> list[tuple[int, int]]:
    """The runs of consecutive integers, ascending; the newest ones as one where they are too many."""
    ranges: list[tuple[int, int]] = []
    for version in sorted(versions):
        if ranges and (version == ranges[-1][1] + 1 or len(ranges) == _MOST_RANGES):
            ranges[-1] = (ranges[-1][0], version)
        else:
            ranges.append((version, version))
    return ranges
