"""The C kernels by another compiler, and on another processor: the same numbers, up to rounding.

`mini_step.c` runs a small step by all kernels. What the first compiler makes of it for any x86 is the reference, since
the other tests hold those kernels against torch. On aarch64 it runs under qemu. On Debian: `apt-get install clang
gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user`; what is missing is skipped.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cbdisagg_kernels.native import (
    AVX2,
    AVX512,
    FLAGS,
    PORTABLE,
    SOURCES,
    BuildError,
    InstructionSet,
    cpu_features,
    find_compiler,
)

STEP = Path(__file__).parent / "mini_step.c"
INCLUDED = {"draw.c", "layers.c", "score.c"}
"""By STEP: their structs are in no header."""
KINDS = ("float32", "bfloat16", "int8 of float32", "int8 of bfloat16")
TOLERANCES = (5e-6, 0.02, 0.01, 0.05)
"""Of logits, over the largest. In bfloat16 and int8 a last bit on the other side of a half is a whole step."""


@dataclass(frozen=True)
class Told:
    """What STEP prints for one kind of number."""

    logits: np.ndarray
    tokens: list[int]
    scores: np.ndarray


def told_by(folder: Path, compiler: Sequence[str], chosen: InstructionSet, runner: Sequence[str] = ()) -> list[Told]:
    """Compile STEP and the kernels without a warning, and run them."""
    program = folder / "step"
    sources = [str(path) for path in sorted(SOURCES.glob("*.c")) if path.name not in INCLUDED]
    flags = [*FLAGS, *chosen.flags, "-O1", "-Werror", f"-I{SOURCES}"]
    subprocess.run([*compiler, *flags, str(STEP), *sources, "-o", str(program), "-lm"], check=True, timeout=120)
    done = subprocess.run([*runner, str(program)], capture_output=True, text=True, check=True, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * len(KINDS)
    return [
        Told(np.array(logits.split(), float), [*map(int, tokens.split())], np.array(scores.split(), float))
        for logits, tokens, scores in zip(lines[::3], lines[1::3], lines[2::3], strict=True)
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    try:
        return told_by(tmp_path_factory.mktemp("reference"), find_compiler(), PORTABLE)
    except BuildError as error:
        pytest.skip(str(error))


def compare(found: list[Told], reference: list[Told]) -> None:
    for mine, its, kind, tolerance in zip(found, reference, KINDS, TOLERANCES, strict=True):
        assert np.isfinite(its.logits).all() and its.logits.std() > 0.1, kind
        np.testing.assert_allclose(mine.logits, its.logits, atol=tolerance * np.abs(its.logits).max(), err_msg=kind)
    assert found[0].tokens == reference[0].tokens
    np.testing.assert_allclose(found[0].scores, reference[0].scores, rtol=1e-4)
    assert len({*found[0].tokens, *found[1].tokens}) > 2


@pytest.mark.parametrize("chosen", [PORTABLE, AVX2, AVX512], ids=lambda each: each.name)
def test_by_clang(tmp_path: Path, reference: list[Told], chosen: InstructionSet) -> None:
    if not shutil.which("clang"):
        pytest.skip("clang is not installed")
    if not chosen.needs <= cpu_features():
        pytest.skip(f"this CPU has no {chosen.name}")
    compare(told_by(tmp_path, ["clang"], chosen), reference)


def test_on_aarch64(tmp_path: Path, reference: list[Told]) -> None:
    for tool in ("aarch64-linux-gnu-gcc", "qemu-aarch64"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed")
    compare(told_by(tmp_path, ["aarch64-linux-gnu-gcc", "-static"], PORTABLE, ["qemu-aarch64"]), reference)
