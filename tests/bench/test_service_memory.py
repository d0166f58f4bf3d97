"""What counts as pool, as packed weights, and as everything else."""

from __future__ import annotations

from typing import NamedTuple

from cbdisagg_bench.service_memory import Row, row_of

MIB = 1 << 20


class Mapped(NamedTuple):
    path: str
    pss: int


def test_what_is_mapped_is_told_by_its_name() -> None:
    row = row_of(
        "decode-0",
        [
            Mapped("/memfd:cbdisagg-decode-0-17 (deleted)", 512 * MIB),
            Mapped("/memfd:cbdisagg-prefill-0-16 (deleted)", 256 * MIB),
            Mapped("/cache/packed/SmolLM2-1a-bfloat16-native-avx512.packed", 128 * MIB),
            Mapped("[anon]", 100 * MIB),
            Mapped("/lib/libtorch_cpu.so", 50 * MIB),
        ],
    )
    assert row == Row("decode-0", pools=768, weights=128, other=150)
