"""Which cores the vLLM servers get on a CPU machine, and which the other processes.

Left to the scheduler, a server's processes take cores from the learner while they wait for one another; on two
cores a step then takes 1.4 times as long.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Core numbers for all servers together and for everything else; `server_threads` for one server."""

    servers: list[int]
    others: list[int]
    server_threads: int


def place(cores: list[int], servers: int) -> Placement | None:
    """Half of `cores` for the servers, the rest for the others; None where there is nothing to divide."""
    if len(cores) < 2:
        return None
    half = len(cores) // 2
    return Placement(cores[:half], cores[half:], max(1, half // max(1, servers)))
