"""How large the experiment is: the article's sizes on its GPU, on a newer one, and an eighth of them on a CPU.

Knows what a request looks like, how many KV tokens there are, and what a step costs where nothing is measured: figures
derived from data sheets (`derived`), or of the reference machine of `bench step`. A wall clock measures its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbdisagg.core.profile import Profile

OPT_PARAMETERS = 12.85e9
OPT_LAYERS, OPT_WIDTH = 40, 5120
OPT_KV_BYTES = 2 * OPT_LAYERS * OPT_WIDTH * 2
"""Of one token in float16: K and V, 819,200 bytes."""
SMOLLM2_KV_BYTES = 2 * 30 * 3 * 64 * 2


@dataclass(frozen=True, slots=True)
class Scale:
    """Lengths in tokens. `pool`: KV tokens in all; `chunk`: token budget of a step with chunked prefill.

    `max_batch`: sequences that run at once, more than the pool has room for. `requests`, `quick`: of the burst;
    `arrivals`: of the latency experiment.
    """

    name: str
    prompt: int
    mean: float
    caps: tuple[int, ...]
    page_size: int
    pool: int
    chunk: int
    max_batch: int
    requests: int
    quick: int
    arrivals: int
    vocab: int
    profile: Profile

    @property
    def pages(self) -> int:
        return self.pool // self.page_size


def derived(machine: str, bytes_per_s: float, flops: float, host_s: float) -> Profile:
    """OPT-13B in float16 on a GPU that reaches 85 % of its memory's rate and 60 % of its arithmetic's.

    A step reads the weights once, so it is flat up to the batch at which arithmetic takes longer; attention reads the
    KV of each decoding sequence, and does 4 x layers x width operations for each pair of tokens of a prompt.
    """
    memory, arithmetic = 0.85 * bytes_per_s, 0.6 * flops
    flat_s, token_s = 2 * OPT_PARAMETERS / memory, 2 * OPT_PARAMETERS / arithmetic
    knee = max(2, round(flat_s / token_s))
    return Profile(
        h=host_s,
        h_mix=0.0,
        L=((1, flat_s), (knee, flat_s), (4 * knee, 4 * flat_s)),
        a=2 * OPT_LAYERS * OPT_WIDTH / arithmetic,
        d=OPT_KV_BYTES / memory,
        t0=1e-4,
        t_d=2e-6,
        B=50e9,
        layers=OPT_LAYERS,
        kv_bytes=OPT_KV_BYTES,
        context=2048,
        model="OPT-13B",
        dtype="float16",
        machine=machine,
        note="derived from the data sheet, not measured",
    )


REFERENCE_CPU = Profile(
    h=0.0005,
    h_mix=0.0,
    L=((1, 0.0095), (13, 0.0105), (32, 0.0215), (512, 0.185)),
    a=1.0e-8,
    d=1.2e-6,
    t0=2e-4,
    t_d=2e-6,
    B=5e9,
    layers=30,
    kv_bytes=SMOLLM2_KV_BYTES,
    context=8192,
    model="SmolLM2-135M",
    dtype="bfloat16",
    machine="2 cores, AVX-512 with bfloat16 (reference)",
    beside_step=1.0,
    note="stated, not measured here; --clock wall measures",
)
"""Bound by memory up to about 13 tokens in a step. Two workers share the cores: beside another, a step takes twice."""

_ARTICLE = {
    "prompt": 512,
    "mean": 128.0,
    "caps": (32, 128, 512, 1536),
    "page_size": 16,
    "pool": 15_696,
    "chunk": 512,
    "max_batch": 64,
    "vocab": 50_272,
    "quick": 40,
    "arrivals": 100,
}
SCALES: dict[str, Scale] = {
    "a100": Scale(name="a100", requests=1000, profile=derived("A100-40GB", 1.555e12, 312e12, 1e-3), **_ARTICLE),  # type: ignore[arg-type]
    "gpu": Scale(name="gpu", requests=128, profile=derived("H200", 4.8e12, 989e12, 5e-4), **_ARTICLE),  # type: ignore[arg-type]
    "cpu": Scale(
        name="cpu",
        prompt=64,
        mean=16.0,
        caps=(4, 16, 64, 192),
        page_size=8,
        pool=1024,
        chunk=64,
        max_batch=16,
        requests=200,
        quick=40,
        arrivals=40,
        vocab=49_152,
        profile=REFERENCE_CPU,
    ),
}
