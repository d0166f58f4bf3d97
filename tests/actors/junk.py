"""What strangers send to a socket of ours: raw bytes, for any stream socket, and how to send them.

Knows ZMTP 3 (ZeroMQ RFC 23) as far as it takes to be let in by a socket without encryption and then to misbehave.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
LONG, MORE = 0x02, 0x01


class Evil:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (str(self.path), os.O_CREAT | os.O_WRONLY)


def ready(kind: str) -> bytes:
    """The command with which a peer of this socket type is let in."""
    name, value = b"Socket-Type", kind.encode()
    body = b"\x05READY" + bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
    return bytes([0x04, len(body)]) + body


def frame_head(size: int, flags: int = LONG) -> bytes:
    return bytes([flags]) + size.to_bytes(8, "big")


def raw_junk(kind: str, pwned: Path) -> dict[str, bytes]:
    """By name. `kind`: the ZeroMQ socket type that the socket talks to. `pwned`: what a loaded pickle would make."""
    rng = random.Random(0)
    let_in = GREETING + ready(kind)
    evil = pickle.dumps(Evil(pwned))
    return {
        "random": rng.randbytes(1 << 20),
        "zeros": bytes(1 << 20),
        "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "websocket": b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: AAAA\r\n\r\n",
        "pickle": evil,
        "half a greeting": GREETING[:33],
        "greeting, junk": GREETING + rng.randbytes(1 << 20),
        "another mechanism": GREETING.replace(b"NULL", b"EVIL") + ready(kind),
        "another socket type": GREETING + ready("SUB"),
        "a command of 40 MiB announced": GREETING + frame_head(40 << 20, 0x06) + b"\x05READY",
        "let in, then junk": let_in + rng.randbytes(1 << 20),
        "let in, a length of 2^63": let_in + frame_head(1 << 63) + bytes(1000),
        "let in, a length of 2^64 - 1": let_in + frame_head((1 << 64) - 1) + bytes(1000),
        "let in, a good length and silence": let_in + frame_head(3 << 20) + b"\x82",
        "let in, a pickle": let_in + bytes([0, len(evil)]) + evil,
        "let in, pickles for both frames": let_in + bytes([MORE, len(evil)]) + evil + bytes([0, len(evil)]) + evil,
        "let in, a thousand empty frames": let_in + bytes([MORE, 0]) * 1_000 + bytes([0, 0]),
        "let in, a message without an end": let_in + (bytes([MORE, 200]) + bytes(200)) * 1_000,
    }


def dial(endpoint: str) -> socket.socket:
    """A plain connection to an ipc: or tcp: endpoint."""
    kind, _, where = endpoint.partition("://")
    if kind == "ipc":
        line = socket.socket(socket.AF_UNIX)
        line.connect(where)
    else:
        host, _, port = where.rpartition(":")
        line = socket.create_connection((host, int(port)))
    line.settimeout(20)
    return line


@contextmanager
def said(endpoint: str, data: bytes) -> Iterator[socket.socket]:
    """A connection on which this has been said, as far as the other side let it."""
    with dial(endpoint) as line:
        with contextlib.suppress(ConnectionError):
            line.sendall(data)
        yield line
