"""Nothing grows with the number of requests: see soak.py, which can be run by hand for more of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from soak import CANCELLED, REFUSED, ROUNDS, WARM_UP, Report, Sample, soak
from tiny_service import make_model, settings, short_folder, started

pytestmark = pytest.mark.e2e

REQUESTS = 20_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["shm", "zmq"])
async def test_twenty_thousand_requests_leave_a_service_as_it_was(tmp_path: Path, kind: str) -> None:
    config = tmp_path / "2p2d.toml"
    config.write_text(settings(2, 2, pages=512, kind=kind, invariants=False))
    with short_folder() as folder, started(make_model(tmp_path), config, folder) as it:
        report = await soak(it, REQUESTS)
        assert it.end(15) == 0
    assert report.growths == []
    assert report.outcomes["cancelled"] > 0.5 * CANCELLED * REQUESTS
    assert report.outcomes["refused"] > 0.5 * REFUSED * REQUESTS


def flat() -> list[Sample]:
    return [Sample(100.0 + 20 * (n < WARM_UP), 30, 8) for n in range(ROUNDS)]


def test_growth_is_noticed() -> None:
    """What grows while it warms up does not count; what goes on growing does."""
    grows = [Sample(100.0 + n, 30 + 2 * n, 8) for n in range(ROUNDS)]
    report = Report({"api": flat(), "worker": grows}, None, 1.0)  # type: ignore[arg-type]  # outcomes do not matter
    assert report.growths == ["worker: 1.00 MiB of memory a round", "worker: 26 descriptors more"]
