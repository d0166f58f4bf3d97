"""A supervisor with real child processes, real sockets and pools, and fake models; this test is the api actor."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq.auth

from cbdisagg.actors import launch
from cbdisagg.actors.launch import ServiceFailed
from cbdisagg.config import Cluster
from cbdisagg.config import Transfer as TransferConfig
from cbdisagg.messages import Suspect

sys.path.insert(0, str(Path(__file__).parent))
from supervised import CONFIG, expected, service


@pytest.mark.parametrize("kind", ["shm", "zmq"])
async def test_a_request_is_prefilled_in_one_process_and_decoded_in_another(tmp_path: Path, kind: str) -> None:
    config = msgspec.structs.replace(CONFIG, transfer=TransferConfig(kind=kind))  # type: ignore[arg-type]
    async with service(tmp_path, config=config) as it:
        await it.ready()
        (pair,) = it.api.members[-1].pairs
        assert (pair.prefill.name, pair.decode.name, pair.kind) == ("prefill-0", "decode-0", kind)
        prompt = list(range(200))
        assert await it.api.generate(prompt, 20) == expected(prompt, 20)
        assert ("prefill-0", "pretending") in it.view.stages
        await it.api.until(lambda: bool(it.api.client.stats and it.api.client.stats.decisions))
        assert it.api.client.stats is not None
        assert {decision[0] for decision in it.api.client.stats.decisions} == {"remote"}
        it.supervisor.stop()
        await it.run


async def test_between_hosts_all_of_it_goes_encrypted_over_tcp(tmp_path: Path) -> None:
    keys, folder = tmp_path / "keys", tmp_path / "run"
    keys.mkdir()
    folder.mkdir()
    zmq.auth.create_certificates(keys, "cbdisagg")
    cluster = Cluster(bind="127.0.0.1", curve_keys=str(keys))
    config = msgspec.structs.replace(CONFIG, cluster=cluster, transfer=TransferConfig(kind="zmq"))
    async with service(folder, config=config) as it:
        await it.ready()
        assert it.api.leads[-1].endpoint.startswith("tcp://127.0.0.1:")
        assert it.api.members[-1].pairs[0].kind == "zmq"
        assert await it.api.generate(list(range(100)), 5) == expected(list(range(100)), 5)


async def test_a_killed_worker_is_dead_by_evidence_and_comes_back_as_another(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        await it.ready()
        old = it.incarnation("decode-0")
        os.kill(it.pid("decode-0"), signal.SIGKILL)
        await it.api.until(lambda: ("decode-0", old) in it.api.members[-1].dead)
        await it.api.until(it.api.paired)
        assert it.incarnation("decode-0") > old
        assert await it.api.generate([1, 2, 3], 5) == expected([1, 2, 3], 5)


async def test_a_suspect_is_killed_by_the_supervisor(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        await it.ready()
        old = it.incarnation("prefill-0")
        os.kill(it.pid("prefill-0"), signal.SIGSTOP)  # it lives, and does nothing any more
        it.api.mailbox.tell(it.api.leads[-1], Suspect("prefill-0", old, "it is stopped"))
        await it.api.until(lambda: ("prefill-0", old) in it.api.members[-1].dead)
        await it.api.until(it.api.paired)
        assert it.incarnation("prefill-0") > old


async def test_a_new_coordinator_is_told_all_again(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        await it.ready()
        worker, first = it.incarnation("decode-0"), it.api.leads[-1]
        os.kill(it.pid("prefill-0"), signal.SIGKILL)
        dead = it.incarnation("prefill-0")
        await it.api.until(lambda: ("prefill-0", dead) in it.api.members[-1].dead)
        await it.api.until(it.api.paired)
        os.kill(it.pid("coordinator"), signal.SIGKILL)
        await it.api.until(lambda: it.api.leads[-1] != first and it.api.paired())
        newest = it.api.members[-1]
        assert newest.term == it.api.leads[-1].incarnation > first.incarnation
        assert worker in {info.address.incarnation for info in newest.workers}
        assert ("prefill-0", dead) in newest.dead
        assert await it.api.generate([4, 5], 5) == expected([4, 5], 5)


async def test_a_worker_that_hangs_when_a_new_coordinator_comes_is_found_out(tmp_path: Path) -> None:
    """It has not greeted that one, who therefore knows nothing of it."""
    policy = msgspec.structs.replace(CONFIG.policy, silent_s=1.0)
    async with service(tmp_path, config=msgspec.structs.replace(CONFIG, policy=policy)) as it:
        await it.ready()
        old, first = it.incarnation("decode-0"), it.api.leads[-1]
        os.kill(it.pid("decode-0"), signal.SIGSTOP)
        os.kill(it.pid("coordinator"), signal.SIGKILL)
        await it.api.until(lambda: it.api.leads[-1] != first and ("decode-0", old) in it.api.members[-1].dead)
        await it.api.until(it.api.paired)
        assert it.incarnation("decode-0") > old
        assert await it.api.generate([1, 2, 3], 5) == expected([1, 2, 3], 5)


async def test_a_worker_that_cannot_start_ends_the_service_with_its_line(tmp_path: Path) -> None:
    async with service(tmp_path, "fails") as it:
        with pytest.raises(ServiceFailed, match=r"^decode-0: there is no such model$"):
            await it.ready()


async def test_a_worker_that_crashes_again_and_again_ends_the_service(tmp_path: Path) -> None:
    async with service(tmp_path, "crashes") as it:
        with pytest.raises(ServiceFailed, match=r"decode-0 ended 3 times while starting \(exit status 1\)"):
            await it.ready()


async def test_who_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PATIENCE_S", 0.1)
    async with service(tmp_path, "stubborn") as it:
        await it.ready()
        it.supervisor.stop()
        await it.run
        codes = {child.name: child.process.returncode for child in it.supervisor.children if child.process}
        assert codes == {"coordinator": 0, "prefill-0": -9, "decode-0": -9}


async def test_a_second_signal_kills_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PATIENCE_S", 60.0)
    async with service(tmp_path, "stubborn") as it:
        await it.ready()
        it.supervisor.stop()
        it.supervisor.stop()
        await asyncio.wait_for(it.run, 20)


def test_nobody_and_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("fake_process.py")), "serve", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        children = [psutil.Process(int(pid)) for pid in supervisor.stdout.readline().split()]
        assert len(children) == 3
        groups = {os.getpgid(child.pid) for child in children}
        assert len(groups) == 3 and os.getpgid(supervisor.pid) not in groups, "a terminal's Ctrl-C reaches us alone"
        supervisor.kill()
        _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    assert not folder.exists(), list(folder.iterdir())
