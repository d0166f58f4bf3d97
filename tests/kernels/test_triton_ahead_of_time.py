"""Every Triton kernel compiles for the GPUs that are supported, without one, and takes no more of them than it may."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

CAPABILITIES = (80, 90, 100)
SHARED_BYTES = 160 << 10
"""Of one program: what a multiprocessor of capability 8.0 can give, 163 KiB; the others have 227."""
SPILLED_BYTES = 128
"""Of one thread, on the stack: a few registers around a loop. Attention for 8.0 has 80."""
KERNELS = {
    *("turn_and_write", "attend_share", "combine_shares", "attend_tile", "copy_words"),
    *("normalise", "gate", "best_ids", "draw_rows"),
}


def compiled(capability: int, which: str, cache: Path) -> list[dict[str, Any]]:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    program = Path(__file__).with_name("ahead_of_time.py")
    command = [sys.executable, str(program), str(capability), which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(kernels: list[dict[str, Any]]) -> None:
    assert {each["kernel"] for each in kernels} == KERNELS
    for each in kernels:
        assert each["shared"] <= SHARED_BYTES, each
        assert each["STACK"] <= SPILLED_BYTES and not each["LOCAL"], each


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_likeliest_compile_within_limits(capability: int, tmp_path: Path) -> None:
    kernels = compiled(capability, "likely", tmp_path)
    check(kernels)
    # Each once, however a step's numbers lie; but contexts are whole or divided, norms without or with the sum.
    expected = dict.fromkeys(KERNELS, 1) | {"attend_share": 2, "normalise": 2}
    assert Counter(each["kernel"] for each in kernels) == expected


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_that_launchers_pick_compile_within_limits(capability: int, tmp_path: Path) -> None:
    check(compiled(capability, "all", tmp_path))
