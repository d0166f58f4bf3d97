"""Whatever ends a service, what it leaves is nothing, or what the next start sweeps; two of them do not meet; and too
little memory is one clear line.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny_service import begin, left_behind, make_model, settings, short_folder, started, until_ready

pytestmark = pytest.mark.e2e

FEW, MANY = 2, 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "1p1d.toml"
    path.write_text(settings())
    return path


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.mark.parametrize("times", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_clean_stops_leave_nothing(model: Path, config: Path, folder: Path, times: int) -> None:
    before = left_behind(folder)
    texts = set()
    for _ in range(times):
        with started(model, config, folder) as it:
            texts.add(it.complete())
            assert it.end(signal.SIGTERM) == 0
        assert left_behind(folder) == before
    assert len(texts) == 1


@pytest.mark.parametrize("times", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_what_is_left_when_all_are_killed_at_once_does_not_add_up(
    model: Path, config: Path, folder: Path, times: int
) -> None:
    """Nobody is left to tidy up, so a folder stays until the next start; memory and processes never."""
    before = left_behind(folder)
    for _ in range(times):
        with started(model, config, folder) as it:
            it.complete()
            assert len(list(folder.iterdir())) == 1, "the living one's: that of the dead has been swept"
            it.kill_family()
        after = left_behind(folder)
        assert len(after.pop("files")) == 1
        assert after == {key: value for key, value in before.items() if key != "files"}
    with started(model, config, folder) as it:
        assert it.end(signal.SIGTERM) == 0
    assert left_behind(folder) == before


STARTS_ONE = """
import asyncio, sys
from pathlib import Path
from cbdisagg_bench.service import running

async def main():
    async with running("one", sys.argv[2:], Path(sys.argv[1]) / "errors", Path(sys.argv[1])) as service:
        print(service.pid, flush=True)
        await asyncio.sleep(300)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells a service that who started it was killed")
def test_a_killed_benchmark_takes_its_service_with_it(model: Path, config: Path, folder: Path) -> None:
    options = ["--config", str(config), "--model", str(model)]
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE, str(folder), *options], stdout=subprocess.PIPE, text=True
    ) as benchmark:
        assert benchmark.stdout is not None
        service = psutil.Process(int(benchmark.stdout.readline()))
        family = [service, *service.children(recursive=True)]
        benchmark.kill()
    assert len(family) > 4
    assert not psutil.wait_procs(family, timeout=60)[1]


@pytest.mark.parametrize("times", [1, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_killed_supervisor_takes_all_with_it(model: Path, config: Path, folder: Path, times: int) -> None:
    before = left_behind(folder)
    for _ in range(times):
        with started(model, config, folder) as it:
            it.complete()
            assert it.end(signal.SIGKILL) == -signal.SIGKILL
        assert left_behind(folder) == before


def test_a_worker_that_is_killed_again_and_again_leaves_nothing_in_a_living_service(
    model: Path, config: Path, folder: Path
) -> None:
    """Its successors take its place: as many descriptors in every other process, and as many files, as before."""
    with started(model, config, folder) as it:
        text = it.complete()
        others = [process for process in it.family if "worker" not in process.cmdline()]
        before = None
        for round_ in range(3):
            worker = next(p for p in psutil.Process(it.process.pid).children() if "worker" in p.cmdline())
            worker.kill()
            psutil.wait_procs([worker], timeout=20)
            assert it.complete_in_the_end() == text
            counts = ([process.num_fds() for process in others], len(it.sockets()))
            if round_ == 0:  # whatever is opened once for successors is open now
                before = counts
        assert before is not None
        grown = [now - then for now, then in zip(counts[0], before[0], strict=True)]
        assert max(grown) <= 4, f"descriptors grew by {grown} over two deaths"
        assert counts[1] == before[1]
        assert it.end(signal.SIGTERM) == 0


def test_two_services_at_once_do_not_disturb_each_other(model: Path, config: Path, folder: Path) -> None:
    """Same user, same folder for temporary files, started in the same second; then one is killed."""
    before = left_behind(folder)
    with begin(model, config, folder) as first, begin(model, config, folder) as second:
        try:
            one, other = until_ready(first, folder), until_ready(second, folder)
            assert one.url != other.url
            text = one.complete()
            assert other.complete() == text
            one.kill_family()
            assert other.complete() == text
            with started(model, config, folder) as third:  # its start sweeps what `one` has left, and only that
                assert third.complete() == text
                assert other.complete("another prompt") == third.complete("another prompt")
                assert third.end(signal.SIGTERM) == 0
            assert other.complete() == text
            assert other.end(signal.SIGTERM) == 0
        finally:
            first.kill()
            second.kill()
    assert left_behind(folder) == before


def test_more_memory_than_there_is_is_one_line(model: Path, config: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "cbdisagg", "serve", "--config", str(config), "--model", str(model)]
    pages = ["--port", "0", "--set", "kv.pages=900000000"]
    done = subprocess.run(
        [*command, *pages], env={"PATH": "/usr/bin", "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr, done.stderr
    assert "KV cache of" in last and "lower kv.memory_mb or kv.pages" in last
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs a mount namespace of its own")
def test_a_full_dev_shm_matters_to_nobody(model: Path, config: Path, folder: Path) -> None:
    """The pools are anonymous memory files: /dev/shm is not where they lie."""
    trial = subprocess.run(["unshare", "-rm", "true"], capture_output=True)
    if trial.returncode:
        pytest.skip("may not make a mount namespace")
    script = 'mount -t tmpfs -o size=1m none /dev/shm && dd if=/dev/zero of=/dev/shm/full bs=64k 2>/dev/null; exec "$@"'
    prefix = ["unshare", "-rm", "sh", "-c", script, "sh"]
    with begin(model, config, folder, "--set", "kv.pages=4096", prefix=prefix) as process:
        try:
            it = until_ready(process, folder)
            assert it.complete()
            assert it.end(signal.SIGTERM) == 0
        finally:
            process.kill()
    assert left_behind(folder)["files"] == []
