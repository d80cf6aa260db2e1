"""The hosts of `tests.kit.network` reach one another, as late as it says, and not while a link is cut."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.kit.network import Host, Network, network, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ANSWERS = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("up", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(peer.recv(100))
    peer.close()
"""
ASKS = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])) as peer:
    peer.sendall(b"word")
    assert peer.recv(100) == b"word"
print(time.monotonic() - began)
"""


def asked(there: Network, host: Host, within_s: float) -> float | None:
    """Return the seconds of a question and its answer; None if there is none in time."""
    command = there.hosts["a"].inside(sys.executable, "-c", ASKS, host.address, str(within_s))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(done.stdout) if done.returncode == 0 else None


def test_hosts_reach_one_another_unless_a_link_is_cut_or_an_address_has_moved() -> None:
    with network(["a", "b"], latency_s=0.05, loss=0.0) as there:
        b = there.hosts["b"]
        with subprocess.Popen(b.inside(sys.executable, "-c", ANSWERS), stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"up\n"
            took = asked(there, b, 10.0)
            assert took is not None
            assert took >= 0.2, "connect and answer are a way and back each"
            there.cut("b")
            assert asked(there, b, 1.0) is None
            there.join("b")
            deadline = time.monotonic() + 30
            while asked(there, b, 5.0) is None:
                assert time.monotonic() < deadline
            before = b.address
            b.move(f"{before.rpartition('.')[0]}.99")
            assert asked(there, b, 10.0) is not None
            b.address = before
            assert asked(there, b, 1.0) is None
            server.kill()


def test_outside_of_a_network_nothing_is_left() -> None:
    with network(["a"]) as there:
        space = there.hosts["a"].space
        assert space is not None
    assert space not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
