"""Steps that a device runner computes before it serves, so that none of those to come waits for a compiler.

A kernel is compiled when it is first asked for, in a second or two, and a library is loaded with its first product.
Graphs hold decode steps alone; what serving asks for beside them is asked for here: prompts, mixtures with decodes of
every kind, and the largest step there can be, which has to find its memory now rather than under load. The pool's first
page is written, and holds nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cbdisagg_kernels.gpu.decode_attention import kinds_of_batches

from cbdisagg.engine.device_runner import DeviceRunner
from cbdisagg.messages import Admit, Push, Sampling, Slice, StepPlan, pack

DRAWS = Sampling(max_tokens=1, temperature=0.0)


def warm_up(
    runner: DeviceRunner,
    most_batch: int,
    most_rows: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> None:
    """`most_batch` sequences and `most_rows` tokens are in a step at most. No slot is taken, before or after it."""
    steps = list(_steps(runner, most_batch, max(2, most_rows)))
    for number, (decodes, chunks) in enumerate(steps):
        progress(number / len(steps))
        lengths = [*[1] * decodes, *chunks]
        admits = tuple(_admit(runner, slot, length) for slot, length in enumerate(lengths))
        # Who draws in every row is replayed from a graph, so only the last one does.
        slices = tuple(Slice(slot, 0, length, int(slot == len(lengths) - 1)) for slot, length in enumerate(lengths))
        runner.run(StepPlan(number, (), admits, (), slices), _no_push)
        runner.run(StepPlan(number, tuple(range(len(lengths))), (), (), ()), _no_push)
    progress(1.0)


def _steps(runner: DeviceRunner, most_batch: int, most_rows: int) -> Iterator[tuple[int, list[int]]]:
    """(decodes, lengths of chunks): the largest step first, which takes the memory that the others use."""
    longest = runner.slots.max_len
    whole, rest = divmod(most_rows, longest)
    yield 0, ([longest] * whole + [rest] * (rest > 1))[:most_batch]
    for decodes in kinds_of_batches(most_batch, runner.decoder.spec.kv_heads):
        chunk = min(longest, most_rows - decodes)
        yield decodes, [chunk] if chunk > 1 and decodes < most_batch else []


def _admit(runner: DeviceRunner, slot: int, length: int) -> Admit:
    """All pages are the pool's first."""
    pages = -(-length // runner.slots.page_size)
    return Admit(slot, pack([0] * length), b"", (0,) * pages, DRAWS)


def _no_push(layer: int, push: Push) -> None:
    raise AssertionError("nothing is pushed to warm up")
