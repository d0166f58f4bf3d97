"""Pools as memory files: mapped by peers, never mistaken for another, gone without a trace."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from cbdisagg.config import ConfigError
from cbdisagg.messages import Address
from cbdisagg.transfer import pool as module
from cbdisagg.transfer.pool import SLOT_BYTES, SLOTS, MappedPool, PoolUnreachable, create_pool, open_pool

ME = Address("worker", 5, "ipc:///nowhere")


@pytest.fixture
def pool() -> Iterator[MappedPool]:
    made = create_pool(ME, layers=3, pages=4, page_bytes=512)
    yield made
    made.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_peer_sees_what_the_owner_writes_and_the_reverse(pool: MappedPool) -> None:
    peer = open_pool(pool.info)
    assert pool.pages.shape == peer.pages.shape == (3, 4, 512)
    assert not pool.pages.any()
    pool.pages[2, 3] = 7
    peer.pages[0, 0] = 9
    assert (peer.pages[2, 3] == 7).all()
    assert (pool.pages[0, 0] == 9).all()
    assert pool.info.offset % 4096 == 0
    peer.close()
    assert (pool.pages[0, 0] == 9).all()


def test_another_process_writes_into_the_pool(pool: MappedPool) -> None:
    code = (
        "import sys, msgspec; from cbdisagg.messages import PoolInfo; from cbdisagg.transfer.pool import open_pool\n"
        "open_pool(msgspec.json.decode(sys.argv[1], type=PoolInfo)).pages[1, 2, ::2] = 3"
    )
    subprocess.run([sys.executable, "-c", code, msgspec.json.encode(pool.info).decode()], check=True)
    assert (pool.pages[1, 2] == [3, 0] * 256).all()
    assert pool.pages.sum() == 3 * 256


def test_descriptors_and_names_stay_flat(pool: MappedPool) -> None:
    before, names = open_descriptors(), sorted(os.listdir("/dev/shm"))
    for _ in range(100):
        other = create_pool(ME, 2, 2, 512)
        open_pool(other.info).close()
        open_pool(pool.info).close()
        assert sorted(os.listdir("/dev/shm")) == names
        other.close()
    assert open_descriptors() == before


def test_closing_twice_is_closing_once(pool: MappedPool) -> None:
    other = open_pool(pool.info)
    other.close()
    before = open_descriptors()
    other.close()
    assert open_descriptors() == before


def test_memory_outlives_close_while_someone_reads_it(pool: MappedPool) -> None:
    """The engine's tensors, or a copy in another thread, may hold a view when a pool is closed."""
    peer = open_pool(pool.info)
    pool.pages[:] = 4
    view, before = peer.pages[1], open_descriptors()
    peer.close()
    assert (view == 4).all()
    del view
    assert open_descriptors() < before


def test_the_file_cannot_be_resized_under_a_mapping(pool: MappedPool) -> None:
    for size in (4096, 1 << 30):
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{pool.info.fd}", size)


def unreachable(pool: MappedPool, **change: object) -> str:
    gc.collect()  # what other tests have left behind
    before = open_descriptors()
    with pytest.raises(PoolUnreachable) as failure:
        open_pool(msgspec.structs.replace(pool.info, **change))
    assert open_descriptors() == before
    return str(failure.value)


def test_a_wrong_nonce_is_noticed(pool: MappedPool) -> None:
    assert "nonce" in unreachable(pool, nonce="0" * 32)


def test_a_wrong_size_is_noticed(pool: MappedPool) -> None:
    assert "bytes" in unreachable(pool, pages=5)


def test_a_dead_process_is_noticed(pool: MappedPool) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert "No such file" in unreachable(pool, pid=gone.pid)


def test_a_recycled_descriptor_is_noticed(pool: MappedPool, tmp_path: Path) -> None:
    """Another pool, a plain file, a pipe, a socket, a device: whatever has the number now."""
    other = create_pool(ME, 3, 4, 512)
    assert "nonce" in unreachable(pool, fd=other.info.fd)
    other.close()
    reader, writer = os.pipe()
    assert "not a memory file" in unreachable(pool, fd=reader)
    os.close(reader)
    os.close(writer)
    with (tmp_path / "file").open("w") as file, open("/dev/null") as device:
        assert "bytes" in unreachable(pool, fd=file.fileno())
        assert "not a memory file" in unreachable(pool, fd=device.fileno())
    assert "No such file" in unreachable(pool, fd=9999)


def test_a_machine_that_is_too_small_is_named_with_the_key_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 300 << 20)
    before = open_descriptors()
    with pytest.raises(ConfigError, match=r"worker needs 480 MiB .* 300 MiB .* lower kv\.memory_mb or kv\.pages"):
        create_pool(ME, 30, 1024, 16_384)
    assert open_descriptors() == before


def test_a_control_group_limits_what_is_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own, or one above it; files that the kernel would drop first do not count."""
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    above, own = tmp_path / "above", tmp_path / "above" / "own"
    own.mkdir(parents=True)
    monkeypatch.setattr(module, "_control_groups", lambda: [own, above])
    assert module.available_memory() == 1000
    (own / "memory.current").write_text("300\n")
    (own / "memory.max").write_text("max\n")
    assert module.available_memory() == 1000
    (own / "memory.max").write_text("700\n")
    assert module.available_memory() == 400
    (own / "memory.stat").write_text("anon 100\ninactive_file 50\nactive_file 60\n")
    assert module.available_memory() == 450
    (above / "memory.current").write_text("900\n")
    (above / "memory.max").write_text("800\n")
    assert module.available_memory() == 0


def test_the_control_groups_of_this_process_are_found() -> None:
    found = module._control_groups()
    assert found[-1] == Path("/sys/fs/cgroup")
    assert all(group.is_relative_to("/sys/fs/cgroup") for group in found)


LIMITED = """
import resource, sys
from cbdisagg.config import ConfigError
from cbdisagg.messages import Address
from cbdisagg.transfer.pool import create_pool, open_pool, PoolUnreachable
def limit(megabytes):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), resource.RLIM_INFINITY))
"""


def in_a_small_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", LIMITED + code], capture_output=True, text=True, check=True)
    return done.stdout


def test_a_limit_of_address_space_is_a_clear_refusal() -> None:
    """And no later fault: what has been mapped is there."""
    code = """
limit(120)
try:
    create_pool(Address("worker", 5, ""), 4, 64, 1 << 20)
except ConfigError as error:
    print(error)
"""
    said = in_a_small_process(code)
    assert "the KV cache of worker cannot have 256 MiB (64 pages) of memory: Cannot allocate memory" in said
    assert "kv.memory_mb" in said


def test_a_peer_that_cannot_be_mapped_for_want_of_memory_is_unreachable() -> None:
    code = """
pool = create_pool(Address("worker", 5, ""), 4, 64, 1 << 20)
limit(120)
try:
    open_pool(pool.info)
except PoolUnreachable as error:
    print(error)
"""
    assert "cannot be mapped: Cannot allocate memory" in in_a_small_process(code)


def test_what_describes_no_pool_is_not_opened(pool: MappedPool) -> None:
    """Numbers that are no layout, or another one that happens to fill the same file."""
    for change in ({"layers": 0}, {"pages": -4, "layers": -3}, {"page_bytes": 0}, {"scratch": 0}, {"scratch": 1 << 62}):
        assert "describes none" in unreachable(pool, **change)
    assert "describes none" in unreachable(pool, offset=pool.info.offset - 3 * 512, pages=5)
    assert "bytes" in unreachable(pool, pages=3)
    assert "bytes" in unreachable(pool, pages=1 << 61)


def test_a_number_of_a_process_that_has_been_used_again_is_noticed(pool: MappedPool) -> None:
    """By a worker with a pool of the very same size, under the same descriptor."""
    code = """
import os, msgspec
pool = create_pool(Address("other", 6, ""), 3, 4, 512)
os.dup2(pool.info.fd, int(sys.argv[1]))
print(os.getpid(), flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", LIMITED + code, str(pool.info.fd)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        pid = int(other.stdout.readline())
        assert "nonce differs" in unreachable(pool, pid=pid)
        assert "No such file" in unreachable(pool, pid=pid, fd=999)
        other.kill()


def test_test_slots_are_private_to_an_incarnation_until_they_are_cleared(pool: MappedPool) -> None:
    peers = [open_pool(pool.info) for _ in range(2)]
    slots = [peer.claim_slot(100 + n) for n, peer in enumerate(peers)]
    for n, slot in enumerate(slots):
        assert slot is not None
        slot[:] = n + 1
    for n in range(2):
        found = pool.find_slot(100 + n)
        assert found is not None and len(found) == SLOT_BYTES and (found == n + 1).all()
    pool.clear_slot(100)
    assert pool.find_slot(100) is None
    assert pool.find_slot(101) is not None
    for peer in peers:
        peer.close()


def test_slots_run_out_and_come_back(pool: MappedPool) -> None:
    assert all(pool.claim_slot(n + 1) is not None for n in range(SLOTS))
    assert pool.claim_slot(SLOTS + 1) is None
    assert pool.claim_slot(3) is not None  # its own, again
    pool.clear_slot(7)
    assert pool.claim_slot(SLOTS + 1) is not None


def test_a_cleared_slot_costs_no_memory(pool: MappedPool) -> None:
    def resident_kb() -> int:
        return int(re.search(r"RssShmem:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    before = resident_kb()
    slot = pool.claim_slot(9)
    assert slot is not None
    slot[:] = np.uint8(1)
    assert resident_kb() >= before + SLOT_BYTES // 1024
    pool.clear_slot(9)
    assert resident_kb() < before + SLOT_BYTES // 1024
