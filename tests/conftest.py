"""What has to be set before anything of ours, or of Triton's, is imported; and a cache folder of the tests' own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# No test asserts wall time: on a busy machine one example in thousands takes longer than Hypothesis' deadline.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

# Triton's kernels are interpreted where there is no GPU. Which it is, Triton decides once, when a kernel is defined.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What tests and their processes keep of the models they make does not join the user's packed weights and specs.

    The prepared model and compiled libraries, which are the same for all, are the user's.
    """
    from cbdisagg.load import cache_folder

    own, shared = tmp_path_factory.mktemp("cache"), cache_folder()
    for name in ("models", "native"):
        (shared / name).mkdir(parents=True, exist_ok=True)
        (own / name).symlink_to(shared / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CBDISAGG_CACHE", str(own))
        yield own
    shutil.rmtree(own)
