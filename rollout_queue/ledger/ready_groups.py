"""The groups that are ready to be leased, in the order of their leases and by the servers that sampled them.

No look at them costs more with their number: a lease looks at those that it takes, a change of a server at those that
the server sampled by the versions in question.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection
from itertools import chain

from slipstream.rollout_queue.ledger.records import ServerRecord, TicketRecord
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry

# What the order goes by. The next group to lease has the highest place, since lists are short to change at their end.
_Place = tuple[int, int, str]


class ReadyGroups:
    """Ready groups. Those with the oldest tokens are leased first: they are the next to grow over-age.

    A group that awaits the proof of its weights is set aside. It is looked at again once the record of one of its
    servers has changed.
    """

    def __init__(self) -> None:
        self._records: dict[str, TicketRecord] = {}
        self._order: list[_Place] = []
        # By server, and by the newest version by which it sampled a group.
        self._sampled: dict[str, dict[int, dict[str, TicketRecord]]] = {}
        # By server: its record when groups were set aside, and their ids.
        self._aside: dict[str, tuple[ServerRecord | None, set[str]]] = {}
        self._aside_ids: set[str] = set()

    def add(self, record: TicketRecord) -> None:
        self._records[record.id] = record
        insort(self._order, _place(record))
        for server, version in record.group.newest.items():
            self._sampled.setdefault(server, {}).setdefault(version, {})[record.id] = record

    def remove(self, ticket_id: str) -> None:
        record = self._records.pop(ticket_id)
        if ticket_id in self._aside_ids:
            self._take_from_aside(record)
        elif self._order[-1][-1] == ticket_id:  # the usual course
            self._order.pop()
        else:
            del self._order[bisect_left(self._order, _place(record))]
        for server, version in record.group.newest.items():
            of_server = self._sampled[server]
            del of_server[version][ticket_id]
            if not of_server[version]:
                del of_server[version]
            if not of_server:
                del self._sampled[server]

    def choose(
        self, fleet: ServerRegistry, count: int, besides: Collection[str] = ()
    ) -> tuple[list[TicketRecord], list[TicketRecord]]:
        """Choose the next groups to lease.

        Args:
            fleet: Decides which groups may be trained.
            count: Maximum number of groups.
            besides: Ids of groups to pass over.

        Returns:
            The groups in their order, and the groups met before the last of them that a failed proof taints.
        """
        self._take_back(fleet)
        chosen: list[TicketRecord] = []
        tainted: list[TicketRecord] = []
        stay: list[_Place] = []
        position = len(self._order)
        while position > 0 and len(chosen) < count:
            position -= 1
            record = self._records[self._order[position][-1]]
            if record.id not in besides:
                if fleet.distrusted(record.group, record.serial) is not None:
                    tainted.append(record)
                elif fleet.unproven(record.group) is None:
                    chosen.append(record)
                else:
                    self._set_aside(record, fleet)
                    continue
            stay.append(self._order[position])
        self._order[position:] = reversed(stay)
        return chosen, tainted

    def sampled_by(self, server: str, oldest: int) -> list[TicketRecord]:
        """Return the groups of which a server sampled tokens by version `oldest` or a newer one, in their order."""
        of_versions = (records for version, records in self._sampled.get(server, {}).items() if version >= oldest)
        return sorted(chain.from_iterable(records.values() for records in of_versions), key=_place, reverse=True)

    def awaited(self, fleet: ServerRegistry) -> list[str]:
        """Return the servers whose proof some group awaits, by name."""
        newest = {server: max(of_server) for server, of_server in self._sampled.items()}
        return sorted(server for server, version in newest.items() if not fleet.is_proven(server, version))

    def _set_aside(self, record: TicketRecord, fleet: ServerRegistry) -> None:
        self._aside_ids.add(record.id)
        for server in record.group.newest:
            self._aside.setdefault(server, (fleet.record(server), set()))[1].add(record.id)

    def _take_back(self, fleet: ServerRegistry) -> None:
        """Put the groups that were set aside in order again if a record of their servers has changed."""
        changed = [ids for server, (seen, ids) in self._aside.items() if fleet.record(server) is not seen]
        if changed:
            records = [self._records[ticket_id] for ticket_id in set().union(*changed)]
            for record in records:
                self._take_from_aside(record)
            self._order += map(_place, records)
            self._order.sort()

    def _take_from_aside(self, record: TicketRecord) -> None:
        self._aside_ids.remove(record.id)
        for server in record.group.newest:
            _, ids = self._aside[server]
            ids.remove(record.id)
            if not ids:
                del self._aside[server]


def _place(record: TicketRecord) -> _Place:
    return (-record.group.oldest_version, -record.index, record.id)
