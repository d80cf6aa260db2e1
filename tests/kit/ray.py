"""A real Ray cluster of three nodes on this machine, for the tests of one process.

Each node has 8 CPUs as Ray counts them, 2 GPUs that are not there, and the label place=first.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.kit.ports import free_port

CPUS, GPUS, NODES = 8, 2, 3

# Ray's default is a third of the memory for each node's object store; nothing here puts an object into one.
STORE_BYTES = 80 * 2**20

_ASK = """
import ray, sys
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(ray.cluster_resources().get("CPU", 0), ray.available_resources().get("CPU", 0))
"""


class RayNodes:
    """Start it, connect to its `address`, or `client_address` as from outside, and close it."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._node = {"num_cpus": CPUS, "num_gpus": GPUS, "object_store_memory": STORE_BYTES}
        port = free_port()
        self.client_address = f"ray://127.0.0.1:{port}"
        head = {
            **self._node,
            "include_dashboard": False,
            "labels": {"place": "first"},
            "ray_client_server_port": port,
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(NODES - 1):
                self.add()
        except BaseException:
            self.close()
            raise
        self.address: str = self._cluster.address

    def add(self, label: str = "first") -> Any:
        """Add a node, labelled place=`label`, and return it."""
        return self._cluster.add_node(**self._node, labels={"place": label})

    def cpus(self) -> float:
        """Return the CPUs of all nodes."""
        return self._asked()[0]

    def free_cpus(self) -> float:
        """Return those that nothing is placed on."""
        return self._asked()[1]

    def _asked(self) -> tuple[float, float]:
        """Ask in its own process: one that is connected cannot connect to another cluster."""
        done = subprocess.run(
            [sys.executable, "-c", _ASK, self.address], capture_output=True, text=True, timeout=120, check=True
        )
        whole, free = done.stdout.split()
        return float(whole), float(free)

    def lose(self, node: Any) -> None:
        """Let a node go without notice."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()
