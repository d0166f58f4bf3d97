"""The engine on the instruction sets that lesser CPUs have: its tests again, in a process in which one is forced.

The kernels' own tests go through all sets by their fixture. Here it is what is built of them: one call against its
operators, batch invariance, and equality with transformers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cbdisagg_kernels.native import AVX2, PORTABLE, InstructionSet, cpu_features, native

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels here")


def run(chosen: InstructionSet, *names: str) -> None:
    """Tests of these files, with `chosen` forced."""
    if not chosen.needs <= cpu_features():
        pytest.skip(f"this CPU has no {chosen.name}")
    files = [str(HERE / f"test_{name}.py") for name in names]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", *files]
    environment = os.environ | {"CBDISAGG_NATIVE": chosen.name}
    options = ["--strict-markers", "--import-mode=importlib", "-q", f"--rootdir={HERE.parents[1]}"]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(\d{2,}) passed", done.stdout), done.stdout


def test_the_name_forces_it() -> None:
    """What the tests below rely on."""
    code = "from cbdisagg_kernels.native import native; print(native().name)"
    environment = os.environ | {"CBDISAGG_NATIVE": "portable"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "native-portable\n"


def test_one_call_and_batch_invariance_on_avx2() -> None:
    run(AVX2, "native_path", "batch_invariance")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chosen", [AVX2, PORTABLE], ids=lambda each: each.name)
def test_all_of_it(chosen: InstructionSet) -> None:
    run(chosen, "native_path", "batch_invariance", "equality", "runner", "sampler", "logprobs", "packed_file")
