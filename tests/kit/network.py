"""Hosts with addresses of their own on one machine: network namespaces, and a switch with latency, loss and a rate.

The kernel of a small machine may lack netem, so the switch is a process that passes frames on between TAP devices. It
needs root, `ip` and /dev/net/tun. Nothing outside of these namespaces can be reached from them; this machine itself is
one of the hosts, `observer`.

    python -m tests.kit.network LATENCY_S LOSS MBIT DEVICE ...    # the switch; reads "cut DEVICE", "join DEVICE" lines
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# linux/if_tun.h
_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000

# Seconds of frames that wait in front of a link; what comes on top is dropped, as a router would.
_QUEUED_S = 0.5

OBSERVER = "observer"


def why_not() -> str | None:
    """Say why there can be no network here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` here (Debian's iproute2)"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun here"
    made = subprocess.run(["ip", "netns", "add", "slipstream-try"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", "slipstream-try"], capture_output=True, check=False)
    return f"no network namespace can be made: {made.stderr.strip()}" if made.returncode else None


@dataclass
class Host:
    """A host. Programs run in it by `inside`."""

    name: str
    device: str
    address: str
    space: str | None

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs `command` in the host."""
        return list(command) if self.space is None else ["ip", "netns", "exec", self.space, *command]

    def move(self, address: str) -> None:
        """Give the host another address in place of its own, as a laptop that changes networks."""
        _ip(*self._within(), "addr", "flush", "dev", self.device)
        _ip(*self._within(), "addr", "add", f"{address}/24", "dev", self.device)
        self.address = address

    def _within(self) -> tuple[str, ...]:
        return () if self.space is None else ("-n", self.space)


class Network:
    """Hosts by name, and their links."""

    def __init__(self, hosts: dict[str, Host], switch: subprocess.Popen[str]) -> None:
        self.hosts = hosts
        self._switch = switch

    def cut(self, name: str) -> None:
        """Drop every frame from and to a host, without a word to either end."""
        self._say(f"cut {self.hosts[name].device}")

    def join(self, name: str) -> None:
        """Mend what `cut` did."""
        self._say(f"join {self.hosts[name].device}")

    def _say(self, line: str) -> None:
        assert self._switch.stdin is not None
        self._switch.stdin.write(line + "\n")
        self._switch.stdin.flush()


@contextmanager
def network(names: list[str], latency_s: float = 0.02, loss: float = 0.01, mbit: float = 50.0) -> Iterator[Network]:
    """Make hosts and the switch between them; all are gone at the end.

    Args:
        names: Names of hosts; `observer` is this machine, and always there.
        latency_s: From one host to another, in one direction.
        loss: Share of frames that are lost.
        mbit: Rate of each link, in Mbit/s.
    """
    net, hosts = os.getpid() % 200 + 20, dict[str, Host]()
    for number, name in enumerate([*names, OBSERVER], 1):
        device = f"sl{os.getpid() % 10000}x{number}"
        space = None if name == OBSERVER else f"slipstream-{os.getpid()}-{name}"
        hosts[name] = Host(name, device, f"10.231.{net}.{number}", space)
    arguments = [str(latency_s), str(loss), str(mbit), *(host.device for host in hosts.values())]
    switch = subprocess.Popen(
        [sys.executable, "-m", "tests.kit.network", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert switch.stdout is not None
        assert switch.stdout.readline() == "ready\n", "the switch did not start"
        for host in hosts.values():
            if host.space is not None:
                _ip("netns", "add", host.space)
                _ip("link", "set", host.device, "netns", host.space)
                _ip("-n", host.space, "link", "set", "lo", "up")
            within = () if host.space is None else ("-n", host.space)
            _ip(*within, "addr", "add", f"{host.address}/24", "dev", host.device)
            _ip(*within, "link", "set", host.device, "up")
        yield Network(hosts, switch)
    finally:
        switch.kill()  # its devices go with it
        switch.wait()
        for host in hosts.values():
            if host.space is not None:
                subprocess.run(["ip", "netns", "del", host.space], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class _Switch:
    """Learns which address is behind which device, and passes frames on when their time has come."""

    def __init__(self, latency_s: float, loss: float, mbit: float, devices: list[str]) -> None:
        self._latency_s, self._loss, self._bytes_a_s = latency_s, loss, mbit * 125_000
        self._random = random.Random(0)
        self._files = {device: _tap(device) for device in devices}
        self._devices = {file: device for device, file in self._files.items()}
        self._cut: set[int] = set()
        self._behind: dict[bytes, int] = {}
        self._free_at = dict.fromkeys(self._devices, 0.0)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        """Pass frames on until stdin ends."""
        with selectors.DefaultSelector() as selector:
            for file in [*self._devices, sys.stdin.fileno()]:
                selector.register(file, selectors.EVENT_READ)
            print("ready", flush=True)
            while True:
                wait = self._waiting[0][0] - time.monotonic() if self._waiting else None
                for key, _ in selector.select(wait if wait is None else max(0.0, wait)):
                    if key.fd == sys.stdin.fileno():
                        line = sys.stdin.readline()
                        if not line:
                            return
                        word, device = line.split()
                        (self._cut.add if word == "cut" else self._cut.discard)(self._files[device])
                    else:
                        self._take(key.fd)
                self._deliver()

    def _take(self, file: int) -> None:
        for _ in range(64):
            try:
                frame = os.read(file, 65536)
            except (BlockingIOError, OSError):
                return
            self._behind[frame[6:12]] = file
            target = self._behind.get(frame[:6])
            targets = [target] if target is not None else [other for other in self._devices if other != file]
            if file in self._cut or self._random.random() < self._loss:
                continue
            for other in targets:
                if other not in self._cut and other != file:
                    self._send_later(other, frame)

    def _send_later(self, file: int, frame: bytes) -> None:
        now = time.monotonic()
        begins = max(now, self._free_at[file])
        if begins - now > _QUEUED_S:
            return
        self._free_at[file] = begins + len(frame) / self._bytes_a_s
        self._count += 1
        heapq.heappush(self._waiting, (self._free_at[file] + self._latency_s, self._count, file, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, file, frame = heapq.heappop(self._waiting)
            if file not in self._cut:
                try:
                    os.write(file, frame)
                except OSError:  # the host is down or its queue is full: a lost frame
                    continue


def _tap(device: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", device.encode(), _TAP | _NO_HEADER))
    return file


if __name__ == "__main__":
    _Switch(float(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]).run()
