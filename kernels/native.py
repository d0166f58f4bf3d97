"""The C kernels of `cpu/`: compiled once for this CPU, cached, loaded.

Knows compilers, instruction sets and where libraries are kept; not what the kernels compute. Those who call them
declare their arguments. Life of a library: its name is a hash of what it is made of -> found shipped beside the sources
(ship.py), or in the cache, else compiled there, by one process while others wait, and renamed when it is whole ->
loaded, once per process -> handed torch's threads. One that cannot be loaded is made anew. A compiler is only looked
for when there is something to compile, and which one it was is not in the name: a library outlives its compiler.

There is one library for each instruction set, and the best one that the CPU has is taken, so the code inside needs no
dispatch. Without a compiler, or where it fails, there is no library: one line in the log says why, and the caller takes
torch's operators instead.

CBDISAGG_NATIVE: 0 switches the kernels off; the name of an instruction set takes that one, if the CPU has it.
CBDISAGG_CACHE: where libraries are kept, under native/; without it, where prepared models are.
CC: the compiler, if one is needed.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-fno-math-errno", "-ffp-contract=off"),
)
"""No -ffast-math: it makes sums depend on how a loop is cut, and turns denormals off in the whole process."""
SECONDS = 120.0
"""A compiler that takes longer for one file hangs."""
LONGEST = "attention_bf16"
"""The file that takes a compiler longest: begun first, it is not what all wait for in the end."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """`needs`: what /proc/cpuinfo must list. The flags are not -march=native: the same library fits every such CPU."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


AVX512 = InstructionSet(
    "avx512",
    ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
    frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"}),
)
AVX2 = InstructionSet("avx2", ("-march=x86-64-v3",), frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"}))
PORTABLE = InstructionSet("portable", (), frozenset())
INSTRUCTION_SETS = (AVX512, AVX2, PORTABLE)
"""The best first."""


@dataclass(frozen=True, slots=True)
class Native:
    """A loaded library. `name` goes into a worker's fingerprint: results differ between instruction sets."""

    name: str
    path: Path
    functions: ctypes.CDLL


class BuildError(Exception):
    """The library cannot be made; one line says why."""


@cache
def native() -> Native | None:
    """The library for this process, from the first call on; None if it is switched off or cannot be had."""
    wanted = os.environ.get("CBDISAGG_NATIVE", "")
    if wanted == "0":
        return None
    try:
        return find_or_build(choose(wanted, cpu_features()), cache_folder())
    except BuildError as error:
        log.warning("no native kernels, torch's operators serve instead: %s", error)
        return None


def choose(wanted: str, features: frozenset[str]) -> InstructionSet:
    """The instruction set called `wanted`, or the best if it is empty or "1". Raises BuildError if there is none."""
    usable = [each for each in INSTRUCTION_SETS if each.needs <= features]
    if wanted in ("", "1"):
        return usable[0]
    for each in usable:
        if each.name == wanted:
            return each
    names = ", ".join(each.name for each in usable)
    raise BuildError(f"CBDISAGG_NATIVE={wanted}: this CPU has {names}; 0 switches the kernels off")


def cpu_features() -> frozenset[str]:
    """What Linux lists for the first x86 core; empty elsewhere, so that the portable library is taken."""
    if not is_x86():
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


# --------------------------------------------------------------------------------------------------------- places


def cache_folder() -> Path:
    """$CBDISAGG_CACHE, else $XDG_CACHE_HOME/cbdisagg, else ~/.cache/cbdisagg, and native/ in it."""
    own, shared = os.environ.get("CBDISAGG_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(own).expanduser() if own else Path(shared or Path.home() / ".cache").expanduser() / "cbdisagg"
    return root / "native"


def library_name(chosen: InstructionSet) -> str:
    """Tells what it is made of: the sources and the flags."""
    digest = blake2b(digest_size=10)
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join((*FLAGS, *chosen.flags)).encode())
    return f"{chosen.name}-{platform.system()}-{platform.machine()}-{digest.hexdigest()}.so"


def find_or_build(chosen: InstructionSet, folder: Path) -> Native:
    """The library shipped beside the sources, else the one in `folder`, else one that is compiled there.

    Raises BuildError if none of them can be had.
    """
    name = library_name(chosen)
    for path in (SOURCES / name, folder / name):
        if path.is_file():
            try:
                return load(chosen, path)
            except BuildError as error:
                log.warning("the kernels are compiled anew: %s", error)
    with _alone_in(folder):
        with suppress(BuildError):
            return load(chosen, folder / name)  # which another process has made meanwhile
        return load(chosen, build(chosen, folder))


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One process builds, the others wait for its library. The kernel releases the lock if this process dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror}") from None
    try:
        with suppress(OSError):  # a file system without locks: several may build, and each renames a whole file
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------------------- build


def build(chosen: InstructionSet, folder: Path) -> Path:
    """Compile the library into `folder`, in the place of what is there under its name. Raises BuildError."""
    compiler, began = find_compiler(), time.monotonic()
    path = folder / library_name(chosen)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as place:
            made = Path(place) / path.name
            compile_all(compiler, chosen, made)
            with made.open("rb") as file:
                os.fsync(file.fileno())  # or a crash of the machine might leave the name of a file without its content
            made.replace(path)
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror}") from None
    log.info("compiled the kernels in %.1f s: %s", time.monotonic() - began, path)
    return path


def find_compiler() -> list[str]:
    """$CC, which may bring options, else the first of COMPILERS that is installed. Raises BuildError."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C compiler: none of {', '.join(named[:1] or COMPILERS)} is installed")


def compile_all(compiler: list[str], chosen: InstructionSet, library: Path) -> None:
    """Each source to an object, at once, and all objects to `library`, in whose folder they are left."""
    sources = sorted(SOURCES.glob("*.c"), key=lambda source: source.stem != LONGEST)
    objects = [library.with_name(f"{source.stem}.o") for source in sources]

    def compile_one(source: Path, target: Path) -> None:
        _call([*compiler, *FLAGS, *chosen.flags, "-c", str(source), "-o", str(target)])

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(compile_one, sources, objects):  # which raises what a call has raised
            pass
    _call([*compiler, "-shared", *map(str, objects), "-o", str(library), "-lm"])


def _call(command: Sequence[str]) -> str:
    """Its standard output. Raises BuildError with the first line that names an error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it says nothing"]
        line = next((line for line in lines if "error" in line), lines[-1])
        raise BuildError(f"{command[0]} failed: {line}")
    return done.stdout


# ----------------------------------------------------------------------------------------------------------- load


def load(chosen: InstructionSet, path: Path) -> Native:
    """Load the library and give it torch's threads. Raises BuildError if it does not fit this system."""
    try:
        functions = ctypes.CDLL(str(path))
        functions.cbd_use_threads.argtypes = [ctypes.c_void_p] * 3
    except (OSError, AttributeError) as error:  # AttributeError: a library, but not of these sources
        raise BuildError(str(error)) from None
    functions.cbd_use_threads.restype = None
    functions.cbd_use_threads(*_openmp())
    return Native(f"native-{chosen.name}", path, functions)


def _openmp() -> tuple[int | None, int | None, int | None]:
    """Addresses of what team.c needs, in the OpenMP runtime that torch is linked with, whatever its file is called.

    A symbol is looked up in what torch's own library depends on, so a second runtime in the process is never taken.
    """
    linked = ctypes.CDLL(torch._C.__file__)
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    try:
        parallel, number, count = (ctypes.cast(linked[name], ctypes.c_void_p).value for name in names)
    except AttributeError:  # a torch that was built without OpenMP
        return None, None, None
    return parallel, number, count
