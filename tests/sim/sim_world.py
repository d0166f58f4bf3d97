"""What the simulator's tests share: costs with round numbers, and a small service."""

from __future__ import annotations

from typing import Any

from cbdisagg.config import Config, Kv, Policy, Scheduler, Targets, Workers
from cbdisagg.core.profile import Host, Profile
from cbdisagg.messages import Role

COSTS: dict[str, Any] = {
    "h": 0.004,
    "h_mix": 0.001,
    "L": ((1, 0.001), (100, 0.010), (512, 0.0512)),
    "a": 0.0,
    "d": 1e-6,
    "t0": 1e-4,
    "t_d": 0.0,
    "B": 1e9,
    "layers": 4,
    "kv_bytes": 1000,
    "context": 4096,
    "model": "round",
    "dtype": "float32",
    "machine": "none",
}


def costs(**changes: Any) -> Profile:
    return Profile(**{**COSTS, "host": Host(), **changes})


def config(*roles: Role, pages: int = 400, queue_limit: int = 1000, **sections: Any) -> Config:
    return Config(
        workers=tuple(Workers(role=role) for role in roles),
        kv=Kv(pages=pages),
        targets=Targets(ttft_ms=1000, tpot_ms=50),
        policy=Policy(queue_limit=queue_limit),
        **{"scheduler": Scheduler(max_batch=16), **sections},
    )
