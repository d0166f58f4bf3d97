"""The bare step, in a process of its own: the other half of `cbdisagg bench overhead`.

Knows one runner, as a worker has it (its threads, its cores, its way of waiting); nothing of servers. Life cycle: an
`Order` as the argument -> loaded, prints a line -> for each line on stdin one run of decode steps, printed as seconds
-> ends with stdin. Runs are those of bench/step.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
from msgspec import Struct


class Order(Struct, frozen=True):
    """`context`: tokens of each of `batch` sequences in the middle of a run of `steps` steps; `name`: a dtype there."""

    model: str
    name: str
    threads: int
    cpus: tuple[int, ...]
    batch: int
    context: int
    steps: int


def main(order: Order) -> None:
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)
    from cbdisagg_bench.step import WARM_UP, Bench  # torch, which makes its threads: they are to inherit the cores

    tokens = order.batch * (order.context + order.steps + WARM_UP)
    bench = Bench(Path(order.model), "native", order.name, order.threads, tokens, seed=0)
    for _ in bench.decode(order.context, order.batch, order.steps):
        pass  # the first steps of a process are slow
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = list(bench.decode(order.context, order.batch, order.steps))[WARM_UP:]
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Order))
