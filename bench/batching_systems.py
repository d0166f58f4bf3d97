"""The systems that are compared: one scheduler, one pool, one model, and a config for each.

Knows which settings make which system, and no more of them than a user who serves with the same config would.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbdisagg_bench.batching_scales import Scale

from cbdisagg.config import Config, Kv, Model, Policy, Scheduler, Targets, Workers
from cbdisagg.core.baselines import Allocator, Batching
from cbdisagg.messages import Role

NO_TARGETS = Targets(ttft_ms=3_600_000, tpot_ms=600_000)
"""Whole prompts ride in steps with decodes. How long a step takes decides nothing: every clock sees the same steps."""


@dataclass(frozen=True, slots=True)
class System:
    """`chunked`: prompts are cut to fit the scale's token budget. `workers`: 2 share the pool between them."""

    id: str
    name: str
    batching: Batching = "continuous"
    allocator: Allocator = "paged"
    chunked: bool = False
    workers: int = 1
    disaggregated: bool = False

    @property
    def label(self) -> str:
        return f"{self.id} {self.name}"

    def config(self, scale: Scale, cap: int, longest: int, max_batch: int = 0) -> Config:
        """`longest`: the workload's longest answer, which the article's static baseline was told; nobody else is.

        `max_batch` 0: the scale's.
        """
        max_batch = max_batch or scale.max_batch
        roles: tuple[Role, ...] = ("prefill", "decode") if self.disaggregated else ("any",)
        return Config(
            model=Model(name="smollm2", max_len=scale.prompt + cap),
            targets=NO_TARGETS,
            workers=tuple(Workers(role=role, count=self.workers // len(roles)) for role in roles),
            kv=Kv(
                page_size=scale.page_size,
                pages=scale.pages // self.workers,
                prefix_cache=False,
                allocator=self.allocator,
            ),
            scheduler=Scheduler(
                max_batch=max_batch,
                token_budget=max(max_batch, scale.chunk if self.chunked else scale.pool),
                batching=self.batching,
                static_length=longest if self.batching == "static-global" else 0,
            ),
            policy=Policy(mode="disaggregate" if self.disaggregated else "aggregate", queue_limit=1 << 20),
        )


SYSTEMS = {
    system.id: system
    for system in (
        System("S0", "static, to the global maximum", "static-global", "reserve-max"),
        System("S1", "static", "static", "reserve-max"),
        System("S2", "continuous, reserves max_len", allocator="reserve-max"),
        System("S2b", "continuous, reserves powers of two", allocator="reserve-pow2"),
        System("S2c", "continuous, reserves true length (oracle)", allocator="reserve-oracle"),
        System("S3", "continuous, paged"),
        System("S3c", "continuous, paged, chunked prefill", chunked=True),
        System("S4", "paged, 1 prefill + 1 decode worker", workers=2, disaggregated=True),
        System("S4r", "paged, 2 colocated replicas", workers=2),
    )
}
ALONE = tuple(system.id for system in SYSTEMS.values() if system.workers == 1)
"""Systems of one worker: driven step by step, by either clock."""
