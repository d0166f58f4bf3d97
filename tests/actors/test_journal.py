"""Journals: parts, records cut short, files that are none, and replay into the real cores."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cbdisagg.actors.journal import Header, Journal, JournalError, read_journal
from cbdisagg.actors.replay import replay
from cbdisagg.config import Config
from cbdisagg.core.coordinator import CoordinatorCore
from cbdisagg.core.events import CoordinatorEvent, FromCoordinatorInbox, Tick
from cbdisagg.core.worker import WorkerCore
from cbdisagg.messages import (
    Address,
    Generate,
    Hello,
    Lead,
    Members,
    PeerDown,
    PoolInfo,
    Reported,
    RequestId,
    Route,
    Sampling,
    Submit,
    Targets,
    Up,
    WorkerInfo,
    pack,
)

ME = Address("coordinator", 3, "ipc:///run/c")
SUPERVISOR, API = Address("supervisor", 1, "ipc:///run/s"), Address("api", 2, "ipc:///run/a")
WORKER = Address("worker-0", 4, "ipc:///run/w")
INFO = WorkerInfo(WORKER, "any", "host", "f", PoolInfo(1, 2, "n", 0, 0, 2, 16, 64, ""), 16, 4, 256)


def request(n: int) -> Generate:
    ids = pack(range(20))
    return Generate(RequestId(2, n), 0, ids, b"", b"root", b"", Sampling(8), Targets(1.0, 0.1), 0.0)


def story() -> list[CoordinatorEvent]:
    return [
        FromCoordinatorInbox(SUPERVISOR, Up(API, "api", 9)),
        FromCoordinatorInbox(SUPERVISOR, Up(WORKER, "worker", 10)),
        FromCoordinatorInbox(SUPERVISOR, Reported("host")),
        FromCoordinatorInbox(WORKER, Hello(INFO)),
        FromCoordinatorInbox(API, request(1)),
        Tick(),
        FromCoordinatorInbox(SUPERVISOR, PeerDown("worker-0", 4, "SIGKILL")),
        FromCoordinatorInbox(API, request(2)),
    ]


def record(folder: Path, events: list[CoordinatorEvent], part_bytes: int = 1 << 20) -> Path:
    journal = Journal(folder, ME, Config(), part_bytes)
    core = CoordinatorCore(ME, Config())
    for n, event in enumerate(events):
        journal.append(n / 4, event, core.handle(event, n / 4))
    journal.close()
    return folder / "coordinator.3.0000.journal"


def test_a_coordinator_s_journal_replays(tmp_path: Path) -> None:
    finding = replay(record(tmp_path, story()))
    assert finding.sound, finding.text
    assert "8 events" in finding.text


def test_a_worker_s_journal_replays(tmp_path: Path) -> None:
    from cbdisagg.core.events import FromWorkerInbox

    journal = Journal(tmp_path, INFO, Config())
    core = WorkerCore(INFO, Config())
    for event in (
        FromWorkerInbox(SUPERVISOR, Lead(ME)),
        FromWorkerInbox(ME, Members(3, (API,), (INFO,), (), ())),
        FromWorkerInbox(ME, Submit(request(1), Route(WORKER, WORKER), 3)),
    ):
        journal.append(1.0, event, core.handle(event, 1.0))
    journal.close()
    finding = replay(tmp_path / "worker-0.4.0000.journal")
    assert finding.sound, finding.text
    assert "3 events" in finding.text


def test_parts_are_read_one_after_the_other(tmp_path: Path) -> None:
    first = record(tmp_path, story(), part_bytes=1)
    assert len(list(tmp_path.iterdir())) == 1 + len(story())  # the first holds its header alone
    assert [event for _, _, _, event, _ in read_journal(first)[1]] == story()
    assert replay(first).sound
    with pytest.raises(JournalError, match="replay starts at part 0000"):
        read_journal(tmp_path / "coordinator.3.0001.journal")


def test_a_part_that_a_crash_left_empty_holds_nothing(tmp_path: Path) -> None:
    first = record(tmp_path, story())
    (tmp_path / "coordinator.3.0001.journal").touch()
    assert [event for _, _, _, event, _ in read_journal(first)[1]] == story()


@pytest.mark.parametrize("damaged", [b"\x01", b"\xc4\x01\xff", b"\x95\x00\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\xa1\xff"])
def test_a_record_that_is_none_is_named(tmp_path: Path, damaged: bytes) -> None:
    first = record(tmp_path, story())
    with first.open("ab") as file:
        file.write(b"\xc6" + len(damaged).to_bytes(4, "big") + damaged)
    with pytest.raises(JournalError, match=rf"0000\.journal: record {len(story()) + 1} of this part is none of this"):
        list(read_journal(first)[1])


def test_a_record_cut_short_ends_the_stream(tmp_path: Path) -> None:
    first = record(tmp_path, story())
    first.write_bytes(first.read_bytes()[:-3])
    assert [event for _, _, _, event, _ in read_journal(first)[1]] == story()[:-1]


def test_effects_that_differ_are_found(tmp_path: Path) -> None:
    journal = Journal(tmp_path, ME, Config())
    journal.append(1.0, story()[0], [])  # the core tells Members at least: something else wrote this record
    journal.close()
    finding = replay(tmp_path / "coordinator.3.0000.journal")
    assert not finding.sound
    assert "coordinator, event 0 at 1.000000 s" in finding.text


@pytest.mark.parametrize("content", [b"", b"hello", b"\xc6\x00\x00\x00\x01\x01", b"\xc6\x00\x00\xff\xffab"])
def test_what_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(JournalError, match="is not a journal"):
        read_journal(path)
    with pytest.raises(JournalError, match="is not a journal"):
        read_journal(tmp_path / "missing")


def test_another_protocol_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    data = msgspec.msgpack.encode(Header(999, 0, ME, None, Config(), 0))
    path.write_bytes(b"\xc6" + len(data).to_bytes(4, "big") + data)
    with pytest.raises(JournalError, match="protocol version 999"):
        read_journal(path)
