"""What clients ask in the goodput grid: lengths like those of published data sets, made from their stated figures.

Knows means, limits and targets; no file. Lengths are lognormal with sigma 1, about what the published traces have
(Azure's: 0.9 to 1.4). Means of the data sets: DistServe (Zhong et al., OSDI 2024, figure 7: ShareGPT, HumanEval,
LongBench); of the traces: AzurePublicDataset (CC-BY 4.0; Patel et al., Splitwise, ISCA 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

from cbdisagg.core.cost import Work
from cbdisagg.core.profile import Profile
from cbdisagg.sim.arrivals import Lengths, make_workload
from cbdisagg.sim.demand import Demand, demand
from cbdisagg.sim.goodput import Goal


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    prompts: Lengths
    outputs: Lengths

    def demand(self, most: int, seconds: float, seed: int) -> Demand:
        """At most `most` requests in a run; `seconds` as `Demand` has it."""
        return demand(make_workload(most, 1.0, self.prompts, self.outputs, seed), seconds)


WORKLOADS = (
    Workload("ShareGPT-like", Lengths(755, "lognormal", 4096), Lengths(200, "lognormal", 1024)),
    Workload("HumanEval-like", Lengths(171, "lognormal", 1024), Lengths(98, "lognormal", 512)),
    Workload("LongBench-like", Lengths(1738, "lognormal", 8192), Lengths(91, "lognormal", 512)),
    Workload("Azure-code-like", Lengths(2048, "lognormal", 7437), Lengths(28, "lognormal", 1024)),
)


@dataclass(frozen=True, slots=True)
class Targets:
    """How tight, in units of the device: `ttft` of the time that the longest prompt in ten takes alone, `tpot` of a
    step that decodes 32 sequences.
    """

    name: str
    ttft: float
    tpot: float

    def goal(self, workload: Workload, profile: Profile, part: float) -> Goal:
        return Goal(
            _two_digits(self.ttft * prompt_s(workload, profile)), _two_digits(self.tpot * step_s(profile)), part
        )


TARGETS = (
    Targets("tight TPOT", ttft=10.0, tpot=1.7),
    Targets("both", ttft=6.0, tpot=2.5),
    Targets("tight TTFT", ttft=3.0, tpot=5.0),
)
FINER = (*TARGETS, Targets("tight both", ttft=3.0, tpot=1.7), Targets("loose both", ttft=10.0, tpot=5.0))
TAIL = 3.6
"""The longest in ten of lognormal lengths with sigma 1 is exp(1.28), and the mean exp(1/2), times the median."""


def prompt_s(workload: Workload, profile: Profile) -> float:
    """Seconds that the longest prompt in ten takes on a worker that does nothing else."""
    tokens = min(round(workload.prompts.mean * TAIL / 1.65), workload.prompts.most)
    return profile.cost.step_s([Work(0, tokens, False)])


def step_s(profile: Profile) -> float:
    """Seconds of a step that decodes 32 sequences of 1,024 tokens."""
    return profile.cost.step_s([Work(1023, 1, True)] * 32)


def _two_digits(seconds: float) -> float:
    return float(f"{seconds:.2g}")
