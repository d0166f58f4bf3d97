"""Finding a compiler, building, caching and loading the C kernels, and what happens when one of these fails."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event, Thread, current_thread

import pytest
from cbdisagg_kernels import native as room
from cbdisagg_kernels import ship as ship_command
from cbdisagg_kernels.native import (
    AVX2,
    AVX512,
    PORTABLE,
    BuildError,
    build,
    choose,
    find_or_build,
    library_name,
    load,
)
from cbdisagg_kernels.ship import ship

ALL = AVX512.needs | AVX2.needs
NEEDS_COMPILER = pytest.mark.skipif(not any(map(shutil.which, room.COMPILERS)), reason="no C compiler")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with just the threads in it, which is quick to compile, in the place of the sources."""
    folder = tmp_path / "cpu"
    folder.mkdir()
    for name in ("common.h", "team.c"):
        shutil.copy(room.SOURCES / name, folder / name)
    monkeypatch.setattr(room, "SOURCES", folder)
    return folder


def without_a_compiler(monkeypatch: pytest.MonkeyPatch, empty: Path) -> None:
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("CC", raising=False)


def in_a_process(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | environment, timeout=120
    )
    return done.stdout + done.stderr


# ---------------------------------------------------------------------------------------------------- instruction set


def test_the_best_instruction_set_that_the_cpu_has() -> None:
    assert choose("", ALL) is AVX512
    assert choose("1", AVX512.needs - {"avx512_bf16"} | AVX2.needs) is AVX2
    assert choose("", frozenset()) is PORTABLE


def test_a_lower_one_by_name_and_never_a_higher_one() -> None:
    assert choose("avx2", ALL) is AVX2
    assert choose("portable", ALL) is PORTABLE
    with pytest.raises(BuildError, match="CBDISAGG_NATIVE=avx512: this CPU has avx2, portable; 0 switches"):
        choose("avx512", AVX2.needs)
    with pytest.raises(BuildError, match="CBDISAGG_NATIVE=sse9"):
        choose("sse9", ALL)


# --------------------------------------------------------------------------------------------------------------- name


def test_another_source_or_flag_is_another_library(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {library_name(AVX2), library_name(PORTABLE)}
    monkeypatch.setattr(room, "FLAGS", (*room.FLAGS, "-g"))
    names.add(library_name(AVX2))
    (sources / "team.c").write_text("/* another */")
    names.add(library_name(AVX2))
    (sources / "more.h").write_text("")
    names.add(library_name(AVX2))
    assert len(names) == 5
    assert library_name(AVX2) == library_name(AVX2)


def test_libraries_are_kept_where_models_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cbdisagg.load import cache_folder

    monkeypatch.setenv("CBDISAGG_CACHE", str(tmp_path))
    assert room.cache_folder() == cache_folder() / "native" == tmp_path / "native"
    monkeypatch.delenv("CBDISAGG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert room.cache_folder() == cache_folder() / "native" == tmp_path / "xdg" / "cbdisagg" / "native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert room.cache_folder() == cache_folder() / "native"


# -------------------------------------------------------------------------------------------------------------- build


@NEEDS_COMPILER
def test_built_once_and_found_again_without_a_compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = find_or_build(PORTABLE, tmp_path / "made" / "here")
    assert made.name == "native-portable"
    assert {each.name for each in made.path.parent.iterdir()} == {made.path.name, "lock"}
    written = made.path.stat().st_mtime_ns
    without_a_compiler(monkeypatch, tmp_path)
    assert find_or_build(PORTABLE, made.path.parent).path == made.path
    assert made.path.stat().st_mtime_ns == written


@NEEDS_COMPILER
def test_a_shipped_library_is_used_while_its_sources_are_the_same(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = sources / "portable-of-other-sources.so"
    stale.write_bytes(b"")
    (shipped,) = ship(["portable"], sources)
    assert not stale.exists()
    without_a_compiler(monkeypatch, tmp_path)
    assert find_or_build(PORTABLE, tmp_path / "made").path == shipped
    assert not (tmp_path / "made").exists()
    (sources / "team.c").write_text((sources / "team.c").read_text() + "\n")
    with pytest.raises(BuildError, match="no C compiler"):
        find_or_build(PORTABLE, tmp_path / "made")


@NEEDS_COMPILER
def test_the_command_that_ships(sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(ship_command, "SOURCES", sources)
    monkeypatch.setattr(sys, "argv", ["ship", "portable"])
    ship_command.main()
    assert capsys.readouterr().out.startswith(str(sources / library_name(PORTABLE)))
    monkeypatch.setattr(sys, "argv", ["ship", "portable", "sse9"])
    with pytest.raises(SystemExit, match="2"):
        ship_command.main()
    assert "sse9: this machine compiles for " in capsys.readouterr().err
    (sources / "wrong.c").write_text("int f(void) { return nothing; }")
    monkeypatch.setattr(sys, "argv", ["ship", "portable"])
    with pytest.raises(SystemExit, match=r"wrong\.c:1.*error"):
        ship_command.main()


@NEEDS_COMPILER
@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"no library"])
def test_a_damaged_library_is_made_anew(
    sources: Path, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A shipped one too, but in the cache: the package may lie where nobody can write."""
    (shipped,) = ship(["portable"], sources)
    cached = tmp_path / shipped.name
    for path in (shipped, cached):
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert find_or_build(PORTABLE, tmp_path).path == cached
    assert [str(path) in record.message for path, record in zip((shipped, cached), caplog.records, strict=True)]
    assert shipped.read_bytes() == content
    assert load(PORTABLE, cached).functions.cbd_use_threads


@NEEDS_COMPILER
def test_workers_that_start_at_once_compile_once(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while the first one compiles, waits for the lock, and finds the library."""
    compiled, arrived, alone, compile_all = list[str](), Event(), room._alone_in, room.compile_all

    def alone_in(folder: Path) -> AbstractContextManager[None]:
        if current_thread() is second:
            arrived.set()
        return alone(folder)

    def compile_slowly(compiler: list[str], chosen: room.InstructionSet, library: Path) -> None:
        compiled.append(current_thread().name)
        if current_thread() is not second:
            second.start()
            assert arrived.wait(60)
        compile_all(compiler, chosen, library)

    monkeypatch.setattr(room, "_alone_in", alone_in)
    monkeypatch.setattr(room, "compile_all", compile_slowly)
    found = list[Path]()
    second = Thread(target=lambda: found.append(find_or_build(PORTABLE, tmp_path).path))
    first = find_or_build(PORTABLE, tmp_path).path
    second.join(60)
    assert found == [first]
    assert compiled == [current_thread().name]


@NEEDS_COMPILER
def test_a_source_that_does_not_compile(sources: Path, tmp_path: Path) -> None:
    (sources / "wrong.c").write_text("int f(void) { return nothing; }")
    with pytest.raises(BuildError, match=r"failed: .*wrong\.c:1.*error.*nothing"):
        find_or_build(PORTABLE, tmp_path / "made")
    assert [each.name for each in (tmp_path / "made").iterdir()] == ["lock"]


def test_no_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_compiler(monkeypatch, tmp_path)
    with pytest.raises(BuildError, match="no C compiler: none of cc, gcc, clang is installed"):
        build(PORTABLE, tmp_path)
    monkeypatch.setenv("CC", "tcc -O9")
    with pytest.raises(BuildError, match="none of tcc is installed"):
        build(PORTABLE, tmp_path)


@NEEDS_COMPILER
def test_a_folder_that_cannot_be_written(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="file/made: Not a directory"):
        find_or_build(PORTABLE, tmp_path / "file" / "made")


def test_a_library_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"\x7fELF")
    with pytest.raises(BuildError, match=r"broken\.so"):
        load(PORTABLE, tmp_path / "broken.so")


@NEEDS_COMPILER
def test_a_library_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text("int nothing;")
    path = tmp_path / "other.so"
    subprocess.run([*room.find_compiler(), "-shared", "-fPIC", str(tmp_path / "other.c"), "-o", str(path)], check=True)
    with pytest.raises(BuildError, match="cbd_use_threads"):
        load(PORTABLE, path)


# ------------------------------------------------------------------------------------------------- the whole way, once


def test_a_failure_is_one_line_and_none(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_a_compiler(monkeypatch, tmp_path)
    monkeypatch.setenv("CBDISAGG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CBDISAGG_NATIVE", "portable")
    room.native.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert room.native() is None
            assert room.native() is None
        assert [record.message for record in caplog.records] == [
            "no native kernels, torch's operators serve instead: no C compiler: none of cc, gcc, clang is installed"
        ]
    finally:
        room.native.cache_clear()


def test_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CBDISAGG_NATIVE", "0")
    room.native.cache_clear()
    try:
        assert room.native() is None
        assert not caplog.records
    finally:
        room.native.cache_clear()


@NEEDS_COMPILER
def test_threads_are_those_of_torch() -> None:
    """One OpenMP runtime is mapped, and a team of two runs on the thread that torch has started."""
    code = """
import os, torch
from cbdisagg_kernels.native import native
from cbdisagg_kernels.native_linear import Packer

def threads(): return len(os.listdir("/proc/self/task"))
torch.set_num_threads(2)
x = torch.ones(1 << 20)
(x + x).sum()
before = threads()
y = Packer(native())(torch.ones(256, 64))(torch.ones(64, 64))
assert (y == 64).all()
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rpartition("/")[2]}
print(len(runtimes), before - threads(), native().name)
"""
    assert in_a_process(code, CBDISAGG_NATIVE="portable").split() == ["1", "0", "native-portable"]
