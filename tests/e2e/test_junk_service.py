"""Junk on every internal socket of a running service: its streams keep their text, its processes their lives."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import zmq

from cbdisagg.messages import (
    Address,
    AttemptId,
    Envelope,
    Finished,
    Generate,
    KvReady,
    Message,
    Prefill,
    Probe,
    PushStopped,
    RequestId,
    Sampled,
    Sampling,
    StopPush,
    Targets,
    encode,
    pack,
)
from cbdisagg.transfer.boxes import Box, encode_header

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "actors"))
from junk import Evil, dial, raw_junk, said
from tiny_service import Running, left_behind, make_model, settings, short_folder, started

pytestmark = pytest.mark.e2e

IDLE = 200
STRANGER = Address("decode-0", 5, "ipc:///nowhere")
MAY_GROW = 100 << 20


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One prefill and one decode worker that hand over through the data socket."""
    model = make_model(tmp_path_factory.mktemp("tiny"))
    config = tmp_path_factory.mktemp("config") / "1p1d.toml"
    config.write_text(settings(kind="zmq"))
    with short_folder() as folder:
        before = left_behind(folder)
        with started(model, config, folder) as it:
            yield it
            assert it.end(15) == 0
        assert left_behind(folder) == before


class Untroubled:
    """Streams that run while the block does what it does, again and again; then everything is as it was before."""

    _prompts = ("once upon a time " * 30, "rain")

    def __init__(self, it: Running, more: int = 4) -> None:
        """`more`: descriptors that a process may have more afterwards."""
        self._it, self._more = it, more
        self._wanted = [it.complete(prompt, 200) for prompt in self._prompts]
        self._stop = threading.Event()
        self._wrong: list[str] = []
        self._rounds = 0
        self._thread = threading.Thread(target=self._run)
        # Only now: the lines between two processes are opened when one first has something to tell the other.
        self._memory = [process.memory_info().rss for process in it.family]
        self._descriptors = [process.num_fds() for process in it.family]

    def _run(self) -> None:
        while not self._stop.is_set():
            for prompt, wanted in zip(self._prompts, self._wanted, strict=True):
                text = self._it.complete(prompt, 200)
                if text != wanted:
                    self._wrong.append(text)
            self._rounds += 1

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert not self._wrong and self._rounds
        root = psutil.Process(self._it.process.pid)
        assert [root, *root.children(recursive=True)] == self._it.family, "somebody has died"
        memory = [process.memory_info().rss for process in self._it.family]
        grown = [now - before for now, before in zip(memory, self._memory, strict=True)]
        assert max(grown) < MAY_GROW, grown
        while max(self._more_descriptors()) > self._more:
            time.sleep(0.05)  # no event tells of what another process closes; the test's time limit is the clock

    def _more_descriptors(self) -> list[int]:
        now = [process.num_fds() for process in self._it.family]
        return [count - before for count, before in zip(now, self._descriptors, strict=True)]


def test_only_this_user_reaches_the_internal_sockets(service: Running) -> None:
    (folder,) = service.folder.glob("cbdisagg-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    listening = {
        connection.laddr.port
        for process in service.family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {int(service.url.rpartition(":")[2])}, "no port but that of HTTP"
    names = {path.name.partition(".")[0] for path in service.sockets()}
    assert names == {"supervisor", "coordinator", "prefill-0", "decode-0", "api"}
    assert sum(path.name.endswith(".data") for path in service.sockets()) == 2


def test_raw_junk_beside_running_streams(service: Running, tmp_path: Path) -> None:
    """Every kind on every socket; all these connections stay open until the last has been made."""
    pwned = tmp_path / "pwned"
    with Untroubled(service), ExitStack() as lines:
        for path in service.sockets():
            kind = "PUSH" if path.name.endswith(".data") else "DEALER"
            for data in raw_junk(kind, pwned).values():
                lines.enter_context(said(f"ipc://{path}", data))
    assert not pwned.exists()


def test_connections_that_say_nothing_beside_running_streams(service: Running) -> None:
    with Untroubled(service):
        for path in service.sockets():
            lines = [dial(f"ipc://{path}") for _ in range(IDLE)]
            assert service.complete("and then", 4)
            for line in lines:
                line.close()


def senseless(decode: int) -> list[Message]:
    """Hand-overs as of a worker with this incarnation: pages out of range, negative, twice, too many, too few."""
    id = RequestId(1, 1)
    attempt = AttemptId(decode, id, 1)
    request = Generate(id, 0, pack(range(40)), b"", b"r" * 16, b"", Sampling(4), Targets(1.0, 0.1), 0.0)
    pages: list[bytes] = [
        pack([-1, -2, -3]),
        pack([1 << 30] * 3),
        pack([5, 5, 5]),
        pack(range(1 << 16)),
        b"\1\2\3",
        b"",
    ]
    prefills: list[Message] = [Prefill(attempt, request, first, each) for each in pages for first in (0, -7, 1 << 40)]
    return [
        *prefills,
        KvReady(attempt, Sampled((-1,)), 0.0, 0.0),
        KvReady(attempt._replace(decode=-5), Sampled(()), float("nan"), float("inf"), b"x"),
        StopPush(attempt),
        PushStopped(attempt, "stopped"),
        Probe("shm", -1, 0, float("nan")),
        Finished(id, 1 << 40, -1),
    ]


def test_messages_of_strangers_beside_running_streams(service: Running, tmp_path: Path) -> None:
    """Decodable ones, of incarnations that nobody has heard of, and of a predecessor to a predecessor; and pickles."""
    pwned = tmp_path / "pwned"
    evil = pickle.dumps(Evil(pwned))
    # A StopPush is answered, whoever sends it: a worker keeps a line to the stranger.
    with Untroubled(service, more=12), zmq.Context() as context:
        for path in service.sockets():
            is_data = path.name.endswith(".data")
            incarnation = int(path.name.removesuffix(".data").rpartition(".")[2])
            line = context.socket(zmq.PUSH if is_data else zmq.DEALER)
            line.linger = 10_000  # what has been said is said before the socket closes
            line.connect(f"ipc://{path}")
            if is_data:
                attempt = AttemptId(incarnation, RequestId(1, 1), 1)
                for pages in (pack([-1]), pack([0]), pack([1 << 30]), b"\1"):
                    line.send_multipart([encode_header(Box(5, incarnation, attempt, 0, 1, pages)), bytes(4096)])
                line.send_multipart([evil, evil])
            else:
                for number, message in enumerate(senseless(STRANGER.incarnation)):
                    for to in (incarnation, incarnation - 1):
                        line.send_multipart([encode(Envelope(STRANGER, to, number)), encode(message)])
                line.send_multipart([encode(Envelope(STRANGER, incarnation, number + 1)), evil])
            line.close()
    assert not pwned.exists()
