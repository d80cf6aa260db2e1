"""Places for programs that a policy wrote, behind one interface: `run(code)` returns what was printed, within limits
of time, memory and output (docs/environments.md)."""

from slipstream.processes import Limits
from slipstream.sandboxes.base import Sandbox
from slipstream.sandboxes.container import ContainerSandbox
from slipstream.sandboxes.remote import DaytonaSandbox, E2BSandbox, ModalSandbox
from slipstream.sandboxes.sealed import SealedSandbox

__all__ = ["ContainerSandbox", "DaytonaSandbox", "E2BSandbox", "Limits", "ModalSandbox", "Sandbox", "SealedSandbox"]
