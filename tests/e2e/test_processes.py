"""Real processes with the real small model: what is printed works as pasted, and whatever ends the service, nothing of
it stays: no process, no socket, no run folder, no shared memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e

END = "Stop with Ctrl-C."
SMALL = ("--set", "kv.memory_mb=64", "--set", "debug.invariants=true")


@dataclass
class Running:
    process: subprocess.Popen[str]
    text: str
    folder: Path

    @property
    def url(self) -> str:
        return self.text.split(" at ")[1].split("/v1")[0]

    def lines(self, start: str) -> list[str]:
        return [line.strip() for line in self.text.splitlines() if line.strip().startswith(start)]

    def pid(self, name: str) -> int:
        (line,) = (line for line in self.lines(name + " ") if " pid " in line)
        return int(line.split(" pid ")[1].split()[0])


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """pytest's own folders are too deep for the path of a socket."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "cbdisagg", "serve", *options]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder)}


def refused(folder: Path, *options: str) -> str:
    """The one line with which a start that cannot work ends."""
    done = subprocess.run(command(*options), env=environment(folder), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert list(folder.glob("*cbdisagg-*")) == []
    return done.stderr.splitlines()[-1]


@contextmanager
def served(folder: Path, *options: str) -> Iterator[Running]:
    with subprocess.Popen(
        command("--port", "0", *SMALL, *options), env=environment(folder), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                if line.strip() == END:
                    break
            assert lines, "it ended before it was ready"
            yield Running(process, "".join(lines), folder)
        finally:
            process.kill()


def ends_without_a_trace(it: Running, signals: list[signal.Signals], status: int) -> None:
    """Send the signals; then no process is left, and no file of any kind."""
    memory = sorted(os.listdir("/dev/shm"))
    children = psutil.Process(it.process.pid).children(recursive=True)
    assert len(children) == 5
    for number in signals:
        it.process.send_signal(number)
    assert it.process.wait(30) == status
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    assert list(it.folder.iterdir()) == []
    assert sorted(os.listdir("/dev/shm")) == memory
    host, port = it.url.removeprefix("http://").split(":")
    with socket.socket() as caller:
        assert caller.connect_ex((host, int(port))) != 0


def test_a_profile_of_another_model_is_said(short_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    profiles = Path(__file__).parents[2] / "configs" / "profiles"
    for name, foreign in (("h200-llama3.1-8b", True), ("cpu-smollm2-135m-1-thread", False)):
        with served(short_folder, "--set", f"profile.path={profiles / name}.json") as it:
            ends_without_a_trace(it, [signal.SIGTERM], 0)
        assert ("measured with Llama-3.1-8B" in capfd.readouterr().err) == foreign


def test_a_port_in_use_is_one_line_that_names_it(short_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = refused(short_folder, "--port", str(port))
    assert line.startswith(f"cbdisagg: port {port} on 127.0.0.1 is in use")
    assert "--port" in line


def test_a_model_folder_that_is_none_is_one_line(short_folder: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert refused(short_folder, "--port", "0", "--model", str(missing)) == (
        f'cbdisagg: [model] path = "{missing}": there is no such file or folder'
    )
    assert str(tmp_path) in refused(short_folder, "--port", "0", "--model", str(tmp_path))


def test_a_wrong_setting_is_one_line_that_names_it(short_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("[kv]\npage_sise = 16\n")
    line = refused(short_folder, "--config", str(file))
    assert line == f"cbdisagg: {file}: [kv] page_sise = 16: unknown key; did you mean page_size?"


def test_what_only_a_worker_can_find_out_ends_the_service_with_its_line(short_folder: Path) -> None:
    """The model's context is known to workers alone."""
    line = refused(short_folder, "--port", "0", *SMALL, "--set", "model.max_len=100000")
    assert "[model] max_len = 100000" in line
    assert line.split(": ")[1] in ("prefill-0", "decode-0")


def test_what_is_printed_works_as_pasted_and_sigterm_leaves_nothing(short_folder: Path) -> None:
    with served(short_folder) as it:
        (curl,) = it.lines("curl")
        answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=120, check=True)
        events = [line.removeprefix("data: ") for line in answer.stdout.splitlines() if line]
        assert events[-1] == "[DONE]"
        text = "".join(
            choice["delta"].get("content") or "" for event in events[:-1] for choice in json.loads(event)["choices"]
        )
        assert len(text) > 20
        (pair,) = it.lines("prefill-0 ->")
        assert pair.startswith("prefill-0 -> decode-0: shm, ")
        assert "1 thread" in it.lines("decode-0 ")[0]
        names = ("coordinator", "prefill-0", "decode-0", "api", "nursery")
        assert {it.pid(name) for name in names} == {child.pid for child in psutil.Process(it.process.pid).children()}
        ends_without_a_trace(it, [signal.SIGTERM], 0)


def test_two_signals_end_it_at_once(short_folder: Path) -> None:
    with served(short_folder, "--config", str(colocated(short_folder))) as it:
        assert it.lines("KV pages move") == []
        assert psutil.Process(it.pid("worker-0")).is_running()
        (short_folder / "colocated.toml").unlink()
        memory = psutil.Process(it.process.pid).children()
        for _ in range(2):
            it.process.send_signal(signal.SIGINT)
        assert it.process.wait(30) == 0
        assert psutil.wait_procs(memory, timeout=20)[1] == []
        assert list(short_folder.iterdir()) == []


def colocated(folder: Path) -> Path:
    path = folder / "colocated.toml"
    path.write_text('[[workers]]\nrole = "any"\n')
    return path


def test_a_killed_worker_comes_back_and_sigkill_of_the_supervisor_leaves_nothing(short_folder: Path) -> None:
    with served(short_folder) as it:
        assert complete(it, "The capital of France is")["usage"]["completion_tokens"] == 8
        old = it.pid("decode-0")
        os.kill(old, signal.SIGKILL)
        # The prefill worker may answer alone; --retry: for a moment it may be 503.
        assert complete(it, "The capital of France is")["usage"]["completion_tokens"] == 8
        until(lambda: [child.pid for child in psutil.Process(it.process.pid).children() if child.pid != old], 5)
        assert complete(it, "The capital of France is")["usage"]["completion_tokens"] == 8
        ends_without_a_trace(it, [signal.SIGKILL], -signal.SIGKILL)


def until(look: Callable[[], list[int]], count: int) -> None:
    """Wait until there are so many."""
    deadline = time.monotonic() + 60
    while len(found := look()) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def complete(it: Running, prompt: str) -> dict[str, dict[str, int]]:
    body = json.dumps({"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 8, "ignore_eos": True})
    options = ["--retry", "40", "--retry-delay", "1", "--fail", "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(["curl", "-s", *options, f"{it.url}/v1/completions"], capture_output=True, timeout=120)
    answer: dict[str, dict[str, int]] = json.loads(done.stdout)
    return answer
