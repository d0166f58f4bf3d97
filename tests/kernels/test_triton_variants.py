"""No step of a warmed-up runner asks for a kernel that is not there: that takes a second or two, while answers wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

Asked = dict[str, dict[str, list[str]]]


@pytest.fixture(scope="module")
def asked() -> Asked:
    command = [sys.executable, str(Path(__file__).with_name("variants.py"))]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: Asked = json.loads(done.stdout)
    return found


def test_what_serving_asks_for_is_compiled_before_it(asked: Asked) -> None:
    assert asked["warm"]["serving"] == []
    # Contexts divided by 4, 8, 16 and 32 with this batch; norms without and with the sum; every other kernel once.
    counts = Counter(asked["warm"]["before"])
    assert (counts.pop("attend_share"), counts.pop("combine_shares"), counts.pop("normalise")) == (4, 4, 2)
    assert counts == Counter(["turn_and_write", "gate", "draw_rows", "attend_tile", "copy_words"])


def test_without_that_it_would_be_noticed(asked: Asked) -> None:
    assert set(asked["cold"]["serving"]) == {"attend_tile", "copy_words"}
