"""Cores are divided between the servers and all else: none is given twice, none is left over."""

from __future__ import annotations

import pytest

from slipstream.deploy.servers.devices import place_devices


@pytest.mark.parametrize("cores", [[0, 1], [2, 5, 7], list(range(8)), list(range(63))])
@pytest.mark.parametrize("servers", [1, 2, 16])
def test_every_core_has_one_user(cores: list[int], servers: int) -> None:
    placement = place_devices(cores, servers)
    assert placement is not None
    assert sorted(placement.servers + placement.others) == cores
    assert placement.servers
    assert placement.others
    assert 1 <= placement.server_threads <= len(placement.servers)


def test_a_servers_threads_are_its_share_of_the_servers_cores() -> None:
    placement = place_devices(list(range(8)), servers=2)
    assert placement is not None
    assert placement.server_threads == 2
    assert (placement.servers, placement.others) == ([0, 1, 2, 3], [4, 5, 6, 7])


def test_one_core_is_not_divided() -> None:
    assert place_devices([3], servers=1) is None
