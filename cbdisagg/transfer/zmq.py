"""Pushing pages through ZeroMQ sockets of their own (ipc, or tcp with CURVE). Receiver-placed.

Knows sockets, threads and the bound on bytes in flight; what a box may write is `Landing`'s business. A context of
its own keeps megabytes of KV out of the way of control messages.

Sender: one `ZmqLink` per peer. The runner's thread gathers a box and hands it to the socket; beyond IN_FLIGHT boxes
it waits for the peer, and is woken when the connection breaks or `close` is called. A broken link is never mended:
what was in flight is lost, so the peer is reported and the link drops what follows. Receiver: one `ZmqReceiver`
with one thread, which places boxes and times the trials of senders.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from cbdisagg.messages import Address, PoolInfo, Probe, Push, WorkerInfo
from cbdisagg.transfer.base import BrokenCallback, LandedCallback, LinkFailed, Opened, Pool, Seen
from cbdisagg.transfer.boxes import (
    BOX_BYTES,
    BOX_MAX_BYTES,
    Box,
    Buffers,
    Gatherer,
    Message,
    Trial,
    decode_header,
    encode_header,
)
from cbdisagg.transfer.landing import Dropped, Landing
from cbdisagg.transfer.shm import make_pattern

KIND = "zmq"
IN_FLIGHT = 4
"""Boxes that may wait at each end of a connection."""
HEADER_MAX_BYTES = 1 << 20
TRIAL_ROUNDS, TRIAL_MESSAGES = 4, 8
CONNECT_TIMEOUT_MS = 5_000
TRIAL_TIMEOUT_S = 10.0
TRIALS_KEPT = 64
"""Self-tests that nobody has asked for yet: of a living peer that is a moment, so the oldest are of the dead."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Curve:
    """The key pair that all processes of a cluster share (z85). A client that has not got it is refused."""

    public_key: str
    secret_key: str


class ZmqLink:
    """The way from our pool to one peer's data socket."""

    kind = KIND

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        me: Address,
        peer: WorkerInfo,
        pool: Pool,
        curve: Curve | None,
        on_broken: BrokenCallback,
    ) -> None:
        """Waits until the peer has answered; raises LinkFailed."""
        self._me, self._peer, self._pages, self._on_broken = me, peer.address, pool.pages, on_broken
        self._buffers = Buffers(pool.info.page_bytes)
        self._gatherers: dict[int, Gatherer] = {}  # by serial; runner's thread only
        self._lock = threading.Lock()  # held by whoever uses the sockets
        self._closed = self._broken = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, IN_FLIGHT)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if curve:
            self._socket.curve_publickey = curve.public_key.encode()
            self._socket.curve_secretkey = curve.secret_key.encode()
        if peer.pool.data_endpoint.startswith("tcp:"):  # a vanished host sends no goodbye
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLOUT)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        try:
            self._connect(peer.pool, encrypted=curve is not None)
        except BaseException:
            self.close()
            raise

    def _connect(self, pool: PoolInfo, encrypted: bool) -> None:
        try:
            if encrypted:
                self._socket.curve_serverkey = pool.data_public_key.encode()
            self._socket.connect(pool.data_endpoint)
        except zmq.ZMQError as error:
            raise LinkFailed(f"{pool.data_endpoint}: {error}") from error
        if not self._monitor.poll(CONNECT_TIMEOUT_MS):
            raise LinkFailed(f"{pool.data_endpoint} does not answer")
        if recv_monitor_message(self._monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            raise LinkFailed(f"{pool.data_endpoint} refuses the connection")

    def test(self) -> Opened:
        """Send trial messages like full boxes. Only the receiver can time them; the seconds here are a lower bound."""
        pattern, best = make_pattern(self._me.incarnation, BOX_BYTES), float("inf")
        for round_ in range(TRIAL_ROUNDS):
            start = time.perf_counter()
            for number in range(TRIAL_MESSAGES):
                trial = Trial(
                    self._me.incarnation, self._peer.incarnation, round_, TRIAL_ROUNDS, number, TRIAL_MESSAGES
                )
                self._send((trial, pattern))
            best = min(best, (time.perf_counter() - start) / TRIAL_MESSAGES)
        return Opened(KIND, BOX_BYTES, zlib.crc32(pattern.data), best, "")

    def push(self, layer: int, push: Push) -> None:
        if self._closed:
            return
        if (gatherer := self._gatherers.get(push.serial)) is None:
            gatherer = Gatherer(self._me.incarnation, push, self._pages, self._buffers)
            self._gatherers[push.serial] = gatherer
        for message in gatherer.add(layer):
            self._send(message)

    def end(self, push: Push) -> None:
        if gatherer := self._gatherers.pop(push.serial, None):
            for message in gatherer.rest():
                self._send(message)

    def close(self) -> None:
        """Wake whoever waits for the peer, and close. What is in flight is dropped."""
        if not self._closed:
            self._closed = True
            os.eventfd_write(self._wake, 1)
            with self._lock:
                self._socket.disable_monitor()
                self._monitor.close(0)
                self._socket.close(0)
                os.close(self._wake)

    def _send(self, message: Message) -> None:
        frames = (encode_header(message[0]), message[1].data)
        with self._lock:
            while not self._closed and not self._is_broken():
                try:
                    self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
                    return
                except zmq.Again:
                    self._poller.poll()

    def _is_broken(self) -> bool:
        if not self._broken and self._monitor.poll(0):
            self._broken = True
            self._on_broken(self._peer, f"the data connection to {self._peer.name} broke")
        return self._broken


@dataclass(slots=True)
class _Trials:
    """What has arrived of one sender's self-test."""

    started: float = 0.0
    nbytes: int = 0
    bytes_per_s: float = 0.0
    checksum: int | None = None  # of the last message of the last round
    given_up: bool = False  # the sender has died
    awaited: bool = False


class ZmqReceiver:
    """Our data socket and the thread that reads it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        me: Address,
        bind: str,
        curve: Curve | None,
        landing: Landing,
        page_bytes: int,
        on_landed: LandedCallback,
    ) -> None:
        """Binds `bind`, an ipc or tcp endpoint; tcp may leave the port to the system ("tcp://127.0.0.1:*").

        Raises zmq.ZMQError; the context then still holds a socket.
        """
        self._me, self._landing, self._on_landed = me, landing, on_landed
        self.drops: Counter[str] = Counter()
        self._trials: dict[int, _Trials] = {}
        self._trial_done = threading.Condition()
        self._sink = np.empty(BOX_BYTES, np.uint8)
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, IN_FLIGHT)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(BOX_MAX_BYTES, page_bytes) + HEADER_MAX_BYTES)
        self._gate = _Gate(context, curve) if curve else None
        if curve:
            self._socket.curve_server = True
            self._socket.curve_secretkey = curve.secret_key.encode()
            self._socket.setsockopt(zmq.ZAP_DOMAIN, b"cbdisagg")
        self._socket.bind(bind)
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-receive", daemon=True)
        self._thread.start()

    def wait_for_trial(self, sender: Address, probe: Probe) -> Seen:
        """Wait until the sender's self-test is complete; how fast it was."""
        with self._trial_done:
            trials = self._trials.setdefault(sender.incarnation, _Trials())
            trials.awaited = True
            self._trial_done.wait_for(lambda: trials.checksum is not None or trials.given_up, TRIAL_TIMEOUT_S)
            self._trials.pop(sender.incarnation, None)
        if trials.checksum is None:
            why = "before its sender died" if trials.given_up else f"within {TRIAL_TIMEOUT_S:.0f} s"
            return Seen("", 0.0, f"zmq: the test pattern did not arrive {why}")
        if trials.checksum != probe.checksum:
            return Seen("", 0.0, "zmq: the test pattern arrived damaged")
        return Seen(KIND, trials.bytes_per_s, probe.note)

    def forget_trial(self, sender: Address) -> None:
        with self._trial_done:
            if (trials := self._trials.pop(sender.incarnation, None)) is not None:
                trials.given_up = True
                self._trial_done.notify_all()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop, zmq.POLLIN)
        handlers: dict[zmq.Socket[bytes], Callable[[], None]] = {self._socket: self._receive}
        if self._gate:
            handlers[self._gate.socket] = self._gate.answer
        for socket in handlers:
            poller.register(socket, zmq.POLLIN)
        while self._stop not in (ready := dict(poller.poll())):
            for socket in ready:
                handlers[socket]()
        for socket in handlers:
            socket.close(0)

    def _receive(self) -> None:
        frames = self._socket.recv_multipart(copy=False)
        try:
            if len(frames) != 2 or not len(frames[1]):
                raise Dropped("malformed")
            header, payload = decode_header(frames[0].buffer), np.frombuffer(frames[1].buffer, np.uint8)
            match header:
                case Box():
                    if self._landing.place(header, payload):
                        self._on_landed(header.attempt)
                case Trial():
                    self._time(header, payload)
        except msgspec.DecodeError:
            self._drop("malformed")
        except Dropped as reason:
            self._drop(str(reason))

    def _drop(self, reason: str) -> None:
        self.drops[reason] += 1
        log.debug("dropped KV %s (%d so far)", reason, self.drops[reason])

    def _time(self, trial: Trial, payload: NDArray[np.uint8]) -> None:
        """One message of a self-test: copied as a box would be, timed from the first of its round to the last."""
        if trial.addressee != self._me.incarnation or payload.size != BOX_BYTES:
            raise Dropped("malformed")
        self._sink[:] = payload
        now = time.perf_counter()
        with self._trial_done:
            trials = self._trials.setdefault(trial.sender, _Trials())
            if len(self._trials) > TRIALS_KEPT:
                unwanted = next((n for n, it in self._trials.items() if not it.awaited), None)
                if unwanted is not None:
                    del self._trials[unwanted]
            if trial.number == 0:
                trials.started, trials.nbytes = now, 0
            else:
                trials.nbytes += payload.size
            if trial.number == trial.count - 1:
                trials.bytes_per_s = max(trials.bytes_per_s, trials.nbytes / max(now - trials.started, 1e-9))
                if trial.round == trial.rounds - 1:
                    trials.checksum = zlib.crc32(payload.data)
                    self._trial_done.notify_all()


class _Gate:
    """Answers libzmq's question (ZAP, RFC 27) whether a CURVE client may connect: only with the cluster's key."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], curve: Curve) -> None:
        self._key = z85.decode(curve.public_key)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        allowed = mechanism == b"CURVE" and credentials == [self._key]
        verdict = (b"200", b"OK") if allowed else (b"400", b"not a key of this cluster")
        self.socket.send_multipart((version, request, *verdict, b"", b""))
