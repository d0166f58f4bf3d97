"""The C library of each instruction set that this CPU has."""

from __future__ import annotations

import pytest
from cbdisagg_kernels.native import INSTRUCTION_SETS, BuildError, Native, cache_folder, cpu_features, find_or_build


@pytest.fixture(scope="session", params=[each.name for each in INSTRUCTION_SETS])
def library(request: pytest.FixtureRequest) -> Native:
    """Every instruction set in turn; without a compiler, or on a lesser CPU, the test is skipped."""
    chosen = next(each for each in INSTRUCTION_SETS if each.name == request.param)
    if not chosen.needs <= cpu_features():
        pytest.skip(f"this CPU has no {chosen.name}")
    try:
        return find_or_build(chosen, cache_folder())
    except BuildError as error:
        pytest.skip(str(error))
