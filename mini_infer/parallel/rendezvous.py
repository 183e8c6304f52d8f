"""Where the ranks of a model find each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LOOPBACK = Path("/sys/class/net/lo")


class Rendezvous(Protocol):
    """What all ranks of a model know of each other from the start."""

    @property
    def interface(self) -> str | None:
        """The network interface that gloo is to use; None: its own choice."""
        ...

    def store(self, size: int) -> "Store":
        """Where ``size`` ranks leave word for each other."""
        ...


@dataclass(frozen=True)
class FolderRendezvous:
    """A file in a ``folder`` of one host, which only its user can enter."""

    folder: Path

    @property
    def interface(self) -> str | None:
        # Else gloo listens where the host's name leads.
        return LOOPBACK.name if LOOPBACK.exists() else None

    def store(self, size: int) -> "Store":
        from torch._C._distributed_c10d import FileStore

        return FileStore(str(self.folder / "ranks"), size)


@dataclass(frozen=True)
class AddressRendezvous:
    """A store that the engine keeps at ``host:port``, for ranks of several hosts."""

    host: str
    port: int
    interface: str | None

    def store(self, size: int) -> "Store":
        from torch._C._distributed_c10d import TCPStore

        return TCPStore(self.host, self.port, size, is_master=False)
