"""A real Ray cluster of three nodes on this machine, for the tests of one process.

Each node has 8 CPUs as Ray counts them, and 2 GPUs that are not there.
"""

from __future__ import annotations

from typing import Any

CPUS, GPUS, NODES = 8, 2, 3

# Ray's default is a third of the memory for each node's object store; nothing here puts an object into one.
STORE_BYTES = 80 * 2**20


class RayNodes:
    """Start it, connect to its `address`, and close it."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._node = {"num_cpus": CPUS, "num_gpus": GPUS, "object_store_memory": STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args={**self._node, "include_dashboard": False})
        try:
            for _ in range(NODES - 1):
                self.add()
        except BaseException:
            self.close()
            raise
        self.address: str = self._cluster.address

    def add(self) -> Any:
        """Add a node and return it."""
        return self._cluster.add_node(**self._node)

    def lose(self, node: Any) -> None:
        """Let a node go without notice."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()
