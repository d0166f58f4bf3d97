"""Pure and small: placement on cores, pool sizes, run folders, start files, the ready text, back-off."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import platform
import re
import struct
import sys
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from cbdisagg.actors.backoff import BackOff, cause
from cbdisagg.actors.children import Incarnations
from cbdisagg.actors.cores import SCHED_SETATTR, Cores, cpu_quota, usable_cores, yield_soon
from cbdisagg.actors.life import Life
from cbdisagg.actors.placement import Spot, place_workers
from cbdisagg.actors.reload import check_reload
from cbdisagg.actors.report import (
    Facts,
    Running,
    context_line,
    cores_line,
    numbers_line,
    ready_text,
    stopping_line,
)
from cbdisagg.actors.runfolder import RunFolder, sweep
from cbdisagg.actors.start import Start, read_start, write_config
from cbdisagg.actors.worker import Loaded, run_worker
from cbdisagg.config import Config, ConfigError, Debug, Http, Kv, Limits, Model, Policy, Scheduler, Targets, Workers
from cbdisagg.core.sizing import size_pool
from cbdisagg.messages import Address, Pair

SUPERVISOR = Address("supervisor", 1, "ipc:///s")

PAIR = (Workers(role="prefill"), Workers(role="decode"))


@pytest.mark.parametrize(
    ("groups", "cores", "spots"),
    [
        (PAIR, [0, 1], [Spot("prefill-0", "prefill", 1, (0,)), Spot("decode-0", "decode", 1, (1,))]),
        (PAIR, [4, 5, 6], [Spot("prefill-0", "prefill", 1, (4,)), Spot("decode-0", "decode", 1, (5,))]),
        (PAIR, [0], [Spot("prefill-0", "prefill", 1, ()), Spot("decode-0", "decode", 1, ())]),
        ((Workers(),), [0, 1, 2], [Spot("worker-0", "any", 3, ())]),
        (
            (Workers(role="prefill", count=2, threads=1), Workers(role="decode")),
            [0, 1, 2, 3],
            [
                Spot("prefill-0", "prefill", 1, (0,)),
                Spot("prefill-1", "prefill", 1, (1,)),
                Spot("decode-0", "decode", 2, (2, 3)),
            ],
        ),
        (
            (Workers(role="prefill", cpus="2-3"), Workers(role="decode", cpus="none")),
            [0, 1, 2, 3],
            [Spot("prefill-0", "prefill", 2, (2, 3)), Spot("decode-0", "decode", 2, ())],
        ),
        (
            (Workers(count=2, cpus="0-3", threads=1), Workers()),
            [0, 1, 2, 3, 4],
            [Spot("worker-0", "any", 1, (0, 1)), Spot("worker-1", "any", 1, (2, 3)), Spot("worker-2", "any", 1, (4,))],
        ),
    ],
)
def test_workers_share_the_cores(groups: tuple[Workers, ...], cores: list[int], spots: list[Spot]) -> None:
    assert place_workers(groups, Cores(tuple(cores), len(cores))) == spots


@pytest.mark.skipif(sys.platform != "linux", reason="slices are Linux's")
def test_a_thread_that_yields_soon_keeps_its_share_and_has_the_longest_slices() -> None:
    """And those that it starts; nobody else in its process."""

    def look() -> tuple[int, int, int]:
        attributes = ctypes.create_string_buffer(64)
        number = {"x86_64": 315, "aarch64": 275}[platform.machine()]  # sched_getattr
        assert ctypes.CDLL(None).syscall(number, 0, attributes, len(attributes), 0) == 0
        _, policy, _, nice, _, slice_ns = struct.unpack_from("=IIQiIQ", attributes)
        return policy, nice, slice_ns

    def compute() -> None:
        yield_soon()
        seen.append(look())
        child = threading.Thread(target=lambda: seen.append(look()))
        child.start()
        child.join()

    if platform.machine() not in SCHED_SETATTR:
        pytest.skip("its numbers of system calls are not known")
    before, seen = look(), list[tuple[int, int, int]]()
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert {each[:2] for each in seen} == {before[:2]} and look() == before
    if tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2]) >= (6, 12):
        assert {each[2] for each in seen} == {100_000_000} != {before[2]}


def test_more_threads_than_cores_are_not_pinned() -> None:
    spots = place_workers((Workers(count=3, threads=2),), Cores((0, 1, 2, 3), 4))
    assert [(spot.threads, spot.cpus) for spot in spots] == [(2, ())] * 3


@pytest.mark.parametrize(
    ("groups", "spots"),
    [
        ((Workers(),), [(3, ())]),
        (PAIR, [(1, ()), (1, ())]),
        ((Workers(count=5),), [(1, ())] * 5),
        ((Workers(cpus="0-1"), Workers()), [(2, (0, 1)), (1, ())]),
        ((Workers(cpus="0-3"), Workers()), [(4, (0, 1, 2, 3)), (1, ())]),
        ((Workers(threads=2), Workers()), [(2, ()), (1, ())]),
    ],
)
def test_a_quota_limits_threads_and_leaves_cores_to_the_kernel(
    groups: tuple[Workers, ...], spots: list[tuple[int, tuple[int, ...]]]
) -> None:
    cores = Cores(tuple(range(64)), 3)
    assert [(spot.threads, spot.cpus) for spot in place_workers(groups, cores)] == spots


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/\n", {}, math.inf),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        (
            "0::/a/b\n",
            {"cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n", "a/b/cpu.max": "300000 50000\n"},
            2.0,
        ),
        ("0::/../other\n", {"cpu.max": "400000 100000\n"}, 4.0),
        ("0::/\n", {"cpu.max": "nonsense"}, math.inf),
        ("3:cpuset:/\n1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        (
            "4:cpu,cpuacct:/docker/1\n0::/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
    ],
)
def test_quotas_of_both_cgroup_versions(tmp_path: Path, membership: str, files: dict[str, str], quota: float) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, content in files.items():
        (tmp_path / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mount" / name).write_text(content)
    assert cpu_quota(tmp_path / "membership", tmp_path / "mount") == quota
    assert cpu_quota(tmp_path / "nothing", tmp_path / "mount") == math.inf


@pytest.mark.parametrize(
    ("mask", "quota", "cores"),
    [
        ({5, 2}, math.inf, Cores((2, 5), 2)),
        ({0, 1, 2, 3}, 2.5, Cores((0, 1, 2, 3), 2)),
        ({0, 1}, 8.0, Cores((0, 1), 2)),
        ({7, 8}, 0.5, Cores((7, 8), 1)),
    ],
)
def test_mask_and_quota_meet(monkeypatch: pytest.MonkeyPatch, mask: set[int], quota: float, cores: Cores) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mask)
    monkeypatch.setattr("cbdisagg.actors.cores.cpu_quota", lambda: quota)
    assert usable_cores() == cores
    assert cores.are_ours == (len(mask) == cores.at_once)


def test_lines_on_numbers_and_cores() -> None:
    assert numbers_line(Model(), [""]) == "Numbers: bfloat16"
    assert (
        numbers_line(Model(), {"torch-onednn", "native-avx2"}) == "Numbers: bfloat16, by native-avx2 and torch-onednn"
    )
    model = Model(dtype="float32", weights="int8")
    assert numbers_line(model, ["native-avx512-int8"]) == "Numbers: float32, weights in int8, by native-avx512-int8"
    assert cores_line(Cores((0, 1), 2)) == "Cores: 2"
    assert cores_line(Cores(tuple(range(64)), 2)) == "Cores: 2 of 64, as the CPU quota of this container allows"


@pytest.mark.parametrize(
    ("kv", "max_len", "sizes"),
    [
        (Kv(pages=100), 0, (100, 1600)),
        (Kv(pages=1000), 0, (1000, 2048)),
        (Kv(pages=1000), 300, (1000, 300)),
        (Kv(memory_mb=1), 0, (256, 2048)),
        (Kv(), 0, (131072, 2048)),
    ],
)
def test_pool_sizes(kv: Kv, max_len: int, sizes: tuple[int, int]) -> None:
    assert size_pool(kv, max_len, context=2048, page_bytes=4096) == sizes


@pytest.mark.parametrize(
    ("kv", "max_len", "message"),
    [
        (Kv(pages=4), 65, r"the pool holds 64 tokens \(4 pages\); lower max_len, or set kv.pages to 5 or .* to 1$"),
        (Kv(), 4096, "context is 2048 tokens"),
        (Kv(pages=1), 0, "at least 2"),
    ],
)
def test_contradictions_are_refused(kv: Kv, max_len: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size_pool(kv, max_len, context=2048, page_bytes=4096)


def test_a_memory_too_small_for_two_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory_mb = 1 holds less than two pages of 0\.8 MiB"):
        size_pool(Kv(memory_mb=1), 0, context=2048, page_bytes=800_000)


def test_run_folders_of_the_dead_are_swept_and_others_are_not(tmp_path: Path) -> None:
    alive, dead = RunFolder(tmp_path), RunFolder(tmp_path)
    assert alive.path.stat().st_mode & 0o777 == 0o700
    (dead.path / "socket").touch()
    dead.release()
    (tmp_path / "cbdisagg-notes").mkdir()  # a folder of the user's that only looks like one of ours
    assert sweep(tmp_path) == [dead.path]
    assert sorted(tmp_path.iterdir()) == sorted([alive.path, tmp_path / "cbdisagg-notes"])
    alive.remove()
    alive.remove()
    assert list(tmp_path.iterdir()) == [tmp_path / "cbdisagg-notes"]


def test_what_a_killed_remover_leaves_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets without a lock lay there for ever: nobody could tell whose they had been."""
    dead = RunFolder(tmp_path)
    for name in ("a", "m", "z"):
        (dead.path / name).touch()
    unlink, left = Path.unlink, 2

    def dies(self: Path, missing_ok: bool = False) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        unlink(self, missing_ok)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", dies)
        dead.remove()
    dead.release()
    assert sweep(tmp_path) == [dead.path]
    assert list(tmp_path.iterdir()) == []


def test_start_files_come_back_as_written(tmp_path: Path) -> None:
    start = Start("worker", "decode-0", 5, SUPERVISOR, 10, str(tmp_path), "/model", "decode", 2, (0, 1))
    write_config(Config(), tmp_path)
    path = start.write()
    assert read_start(path, "worker") == (start, Config())
    with pytest.raises(ConfigError, match="starts the worker decode-0, not a api"):
        read_start(path, "api")
    path.write_text("{}")
    with pytest.raises(ConfigError, match="missing required field"):
        read_start(path, "worker")


def test_incarnations_grow_even_if_the_clock_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Incarnations()
    first = numbers.next()
    monkeypatch.setattr("time.time_ns", lambda: 7)
    assert [numbers.next(), numbers.next()] == [first + 1, first + 2]


def test_back_off_doubles_to_a_limit_and_forgets_after_health() -> None:
    backoff = BackOff()
    assert [backoff.after(1.0) for _ in range(9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert [backoff.after(61.0), backoff.after(1.0)] == [0.1, 0.2]


def test_causes_are_words() -> None:
    assert [cause(0), cause(3), cause(-9), cause(-99)] == ["exit status 0", "exit status 3", "SIGKILL", "signal 99"]


CONTEXT = "Context: 8,192 tokens"
P, D = Address("prefill-0", 2, ""), Address("decode-0", 3, "")


def facts(*pairs: Pair, chat: bool = True, key: str = "") -> Facts:
    processes = [Running("prefill-0", 11, 1, (0,)), Running("decode-0", 12, 2, (1, 2)), Running("api", 13)]
    lines = (CONTEXT, "Numbers: bfloat16", "Cores: 3")
    return Facts("http://127.0.0.1:8000", "tiny", "/models/tiny", chat, key, *lines, processes, pairs, "auto", 7.96)


def test_the_ready_text() -> None:
    assert ready_text(facts(Pair(P, D, "shm", 8.94e9))) == (
        """\
cbdisagg serves tiny at http://127.0.0.1:8000/v1  (ready after 8.0 s)

Try it:
  curl -N http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' """
        """-d '{"model": "tiny", "stream": true, "temperature": 0.2, """
        """"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

Model folder (give it to clients that want a tokenizer): /models/tiny
Context: 8,192 tokens
Numbers: bfloat16
Cores: 3
Processes:
  prefill-0    pid 11      1 thread on core 0
  decode-0     pid 12      2 threads on cores 1, 2
  api          pid 13
KV pages move:
  prefill-0 -> decode-0: shm, 8.9 GB/s measured
Stop with Ctrl-C."""
    )


@pytest.mark.parametrize(
    ("kv", "wanted", "max_len", "context", "line"),
    [
        (Kv(), 0, 8192, 8192, "Context: 8,192 tokens"),
        (Kv(), 0, 100, 0, "Context: 100 tokens"),
        (Kv(pages=10), 0, 160, 8192, "Context: 160 tokens (the model could 8,192; kv.pages = 10 holds no more)"),
        (Kv(memory_mb=9), 0, 160, 8192, "Context: 160 tokens (the model could 8,192; kv.memory_mb = 9 holds no more)"),
        (Kv(), 64, 64, 8192, "Context: 64 tokens (the model could 8,192; model.max_len = 64)"),
    ],
)
def test_the_context_line_says_what_keeps_it_short(kv: Kv, wanted: int, max_len: int, context: int, line: str) -> None:
    assert context_line(kv, wanted, max_len, context) == line


def test_a_fall_back_is_a_warning() -> None:
    text = ready_text(facts(Pair(P, D, "zmq", 1e9, "shm: no such process"), Pair(D, P, "", 0.0, "nothing works")))
    assert "Warning: KV pages move from prefill-0 to decode-0 by zmq, as the fastest way does not work: shm: no" in text
    assert "Warning: KV pages cannot move from decode-0 to prefill-0: nothing works." in text


def test_a_model_without_chat_template_gets_a_completion_to_try() -> None:
    text = ready_text(facts(chat=False, key="$API_KEY"))
    assert "/v1/completions -H 'Content-Type: application/json' -H \"Authorization: Bearer $API_KEY\" -d" in text
    assert "KV pages" not in text


def test_the_end_is_one_line() -> None:
    assert stopping_line("") == "Stopping ..."
    assert stopping_line("2 requests are running") == "Stopping: 2 requests are running; again to stop at once"


def test_what_steers_decisions_may_change_while_a_service_runs() -> None:
    new = Config(Config().model, Targets(7.0, 7.0))
    new = replace(new, scheduler=Scheduler(7, 77), policy=Policy("aggregate"), limits=Limits(n=7), debug=Debug(True))
    check_reload(Config(), new)


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (Config(http=Http(port=9000)), "[http] port has changed from 8000 to 9000: stop"),
        (Config(kv=Kv(pages=7)), "[kv] pages has changed"),
        (Config(workers=(Workers(),)), "[[workers]] has changed"),
        (Config(limits=Limits(n=7, body_mb=1.0)), "[limits] body_mb has changed from 16.0 to 1.0"),
    ],
)
def test_what_was_built_at_the_start_may_not(new: Config, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_reload(Config(), new)


async def test_who_is_asked_to_leave_may_take_its_time_but_not_twice() -> None:
    life, asked = Life(), list[str]()
    life.leave = lambda: asked.append("leave")
    life.ask()
    assert (asked, life.ended.done()) == (["leave"], False)
    life.ask()
    assert (asked, life.ended.done()) == (["leave"], True)
    plain = Life()
    plain.ask()
    assert plain.ended.done(), "who has nothing to give away ends at once"


async def test_a_crash_in_a_thread_of_the_transport_is_the_crash_of_the_worker(tmp_path: Path) -> None:
    def load(*_: object) -> Loaded:
        thread = threading.Thread(target=lambda: int("a bug"), name="kv-receive")
        thread.start()
        thread.join()
        raise ConfigError("loading is beside the point here")

    start = Start("worker", "decode-0", 5, Address("supervisor", 1, f"ipc://{tmp_path}/s"), 0, str(tmp_path), "")
    async with asyncio.timeout(20):
        with pytest.raises(ValueError, match="a bug"):
            await run_worker(Life(), start, Config(), load)
