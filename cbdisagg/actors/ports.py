"""The HTTP port: to open it, to say why it cannot be opened, and what its URL is."""

from __future__ import annotations

import errno
import socket

from cbdisagg.config import ConfigError, Http

BACKLOG = 1024


def listen(http: Http) -> socket.socket:
    """The listening socket of `host` and `port`. Raises ConfigError: one line that names the port and the option."""
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(
            http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"--host {http.host}: no such address: {error.strerror or error}") from None
    port = socket.socket(family, kind)
    try:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(address)
        port.listen(BACKLOG)
        port.setblocking(False)
    except OSError as error:
        port.close()
        raise ConfigError(refusal(http, error)) from None
    return port


def refusal(http: Http, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {http.port} on {http.host} is in use; choose another with --port, or end who has it"
    return f"port {http.port} on {http.host} cannot be opened: {error.strerror or error}; see --port and --host"


def url_of(http: Http, port: socket.socket) -> str:
    """Where a client on this machine finds it, also if it listens on every address or chose its own port."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(http.host, http.host)
    number = port.getsockname()[1]
    return f"http://[{host}]:{number}" if ":" in host else f"http://{host}:{number}"
