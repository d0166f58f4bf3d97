"""The C kernels of `cpu/`: compiled once for this CPU, cached, loaded.

Knows compilers, instruction sets and where libraries are kept; not what the kernels compute. Those who call them
declare their arguments. Life of a library: its key is a hash of what it is made of -> found shipped beside the sources,
or in the cache, else compiled into a temporary file there and renamed -> loaded, once per process -> handed torch's
threads. Workers that start at once may both compile; each renames a whole file.

There is one library for each instruction set, and the best one that the CPU has is taken, so the code inside needs no
dispatch. Without a compiler, or where it fails, there is no library: one line in the log says why, and the caller takes
torch's operators instead.

CBDISAGG_NATIVE: 0 switches the kernels off; the name of an instruction set takes that one, if the CPU has it.
CBDISAGG_CACHE: where libraries are kept, under native/; without it, where prepared models are.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
        chosen = choose(wanted, cpu_features())
        return load(chosen, find(chosen) or build(chosen, cache_folder()))
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
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


# --------------------------------------------------------------------------------------------------------- places


def cache_folder() -> Path:
    """$CBDISAGG_CACHE, else $XDG_CACHE_HOME/cbdisagg, else ~/.cache/cbdisagg, and native/ in it."""
    own, shared = os.environ.get("CBDISAGG_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(own).expanduser() if own else Path(shared or Path.home() / ".cache").expanduser() / "cbdisagg"
    return root / "native"


def find(chosen: InstructionSet) -> Path | None:
    """The library that was shipped beside the sources, if it was made of just these sources and flags."""
    path = SOURCES / library_name(chosen, compiled_by="")
    return path if path.is_file() else None


def library_name(chosen: InstructionSet, compiled_by: str) -> str:
    """Tells what it is made of. `compiled_by`: the compiler's version; empty for a library that is shipped."""
    digest = blake2b(digest_size=10)
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join((*FLAGS, *chosen.flags, compiled_by)).encode())
    return f"{chosen.name}-{platform.system()}-{platform.machine()}-{digest.hexdigest()}.so"


# ---------------------------------------------------------------------------------------------------------- build


def build(chosen: InstructionSet, folder: Path, ship: bool = False) -> Path:
    """The library in `folder`, compiled unless it is there. Raises BuildError.

    `ship`: under the name that `find` looks for, for a wheel; then `folder` is SOURCES.
    """
    compiler = find_compiler()
    path = folder / library_name(chosen, "" if ship else _version(compiler))
    if path.is_file():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as place:
            compile_all(compiler, chosen, Path(place) / path.name)
            os.replace(Path(place) / path.name, path)
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror}") from None
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
    sources = sorted(SOURCES.glob("*.c"))
    objects = [library.with_name(f"{source.stem}.o") for source in sources]

    def compile_one(source: Path, target: Path) -> None:
        _call([*compiler, *FLAGS, *chosen.flags, "-c", str(source), "-o", str(target)])

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(compile_one, sources, objects):  # which raises what a call has raised
            pass
    _call([*compiler, "-shared", *map(str, objects), "-o", str(library), "-lm"])


def _version(compiler: list[str]) -> str:
    return " ".join(compiler) + _call([*compiler, "--version"])


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
    except OSError as error:
        raise BuildError(str(error)) from None
    functions.cbd_use_threads.argtypes = [ctypes.c_void_p] * 3
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
