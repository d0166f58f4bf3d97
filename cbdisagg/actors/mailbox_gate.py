"""What keeps strangers out of a mailbox on tcp, and what is said of them: never more than a line a second."""

from __future__ import annotations

import asyncio
import logging

import zmq
from zmq.utils import z85

from cbdisagg.actors.mailbox_place import Keys

log = logging.getLogger(__name__)

COMPLAINT_S = 1.0
"""Between two lines of the log about what strangers send."""


class Complaints:
    """Warnings that strangers can cause: the first at once, then for each second one line with a count. Loop only."""

    def __init__(self) -> None:
        self._more = 0
        self._last = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, line: str) -> None:
        if self._timer is None:
            log.warning(line)
            self._timer = asyncio.get_running_loop().call_later(COMPLAINT_S, self._sum_up)
        else:
            self._more, self._last = self._more + 1, line

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._tell()

    def _sum_up(self) -> None:
        quiet = not self._more
        self._tell()
        self._timer = None if quiet else asyncio.get_running_loop().call_later(COMPLAINT_S, self._sum_up)

    def _tell(self) -> None:
        if self._more:
            log.warning("%d more like this: %s", self._more, self._last)
            self._more = 0


class Gate:
    """Lets in only who holds the service's own key pair: the ZAP handler (ZeroMQ RFC 27) of the mailbox's context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._allowed = z85.decode(keys.public)
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        self._complaints = Complaints()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self._answer)
        loop.call_soon(self._answer)

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._complaints.close()
        self._socket.close()

    def _answer(self) -> None:
        while not self._socket.closed:
            try:
                version, request, _domain, address, _identity, mechanism, *credentials = self._socket.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            ok = mechanism == b"CURVE" and credentials == [self._allowed]
            if not ok:
                who = address.decode(errors="replace")
                self._complaints.add(f"refused a connection from {who}: it does not hold the service's key")
            status = (b"200", b"OK") if ok else (b"400", b"unknown key")
            self._socket.send_multipart((version, request, *status, b"", b""))
