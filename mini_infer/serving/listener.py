"""The socket that a server listens on."""

import errno
import socket

from mini_infer.core.errors import InvalidConfigError

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to the address.

    Raises:
        InvalidConfigError: the port is in use or not allowed, or the host is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidConfigError(f"can't listen on --host {host}: {error.strerror}") from None
    except UnicodeError:  # a label that is too long, or no text
        raise InvalidConfigError(f"--host {host!r:.80} is no host name") from None
    try:
        # Without it a restart would have to wait for the old connections' end.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two servers may bind one port with SO_REUSEADDR, but only one may listen on it.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        option = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise InvalidConfigError(
            f"can't listen on {host} port {port}: {error.strerror}; choose another with {option}"
        ) from None
    return listener


def url_of(host: str, port: int) -> str:
    """What a person on this machine types to reach it."""
    shown = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
