"""Runs plans on a device, the host one step ahead: a `Launcher`.

Knows slots, the decoder, and in which order things are queued. `launch` queues a step and returns at once; what it
returns waits for the step and tells its tokens. A drawn token stays on the device: the next step's words name the slot
instead of the id, and the host learns the id when the step is over. Decode steps are replayed from graphs.

Life of a drawn token: it joins its slot as -1 - slot when its step is launched; it has its id once that step has been
waited for; the slot gets it at the launch after that. Where the host has to see logits (log probabilities, bias,
penalties, bans), `launch` waits for the step itself: such requests cost the others the time that was hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from cbdisagg_kernels.gpu.attention import StepPlanner
from cbdisagg_kernels.gpu.sample import draw
from cbdisagg_kernels.tokens import RowTokens
from torch import Tensor

from cbdisagg.engine.base import PushLayer
from cbdisagg.engine.batch import Batch, make_batch, pusher
from cbdisagg.engine.device import Device, Mark, as_numpy
from cbdisagg.engine.device_step import DeviceStep, DrawTable, Layout
from cbdisagg.engine.graphs import Graphs, sizes_up_to
from cbdisagg.engine.logprobs import logprobs
from cbdisagg.engine.model import Decoder
from cbdisagg.engine.prompt_scores import score_prompt
from cbdisagg.engine.samplers import sampler_for
from cbdisagg.engine.slots import Held, Slots
from cbdisagg.messages import Logprobs, Sampled, StepPlan, StepResult

RING = 4
"""Blocks of host memory in turn: two steps are under way at most, so a block's copy is long over when it is used."""


@dataclass(slots=True)
class Draw:
    """One drawn token: of which slice, for whom, and at which place of its ids; `token` once it is known."""

    slice: int
    slot: int
    held: Held
    place: int
    token: int | None = None
    told: tuple[Logprobs, ...] = ()


@dataclass(slots=True)
class Flight:
    """A step under way. `landing`: where its tokens come to on the host, one for each draw."""

    number: int
    slices: int
    started: float
    mark: Mark
    draws: list[Draw]
    landing: Tensor
    scores: dict[int, tuple[Logprobs, ...]]


class DeviceRunner:
    """`launch` from one thread; each wait once, in order, from any one. The decoder's pool belongs to the caller.

    `most_slots`: above every slot that is ever named. `most_batch`: sequences that decode at once, for the graphs.
    """

    def __init__(
        self,
        decoder: Decoder,
        max_len: int,
        device: Device,
        most_slots: int,
        most_batch: int,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        self.decoder, self.device = decoder, device
        page_size = decoder.pool.shape[4]
        self.sampler = sampler_for(decoder.ops)
        self.slots = Slots(max_len, page_size, decoder.spec.vocab)
        self.planner = StepPlanner(page_size)
        self.table = DrawTable(most_slots)
        self.launches = 0
        self.flights: list[Flight] = []
        self.ended = 0.0
        width = -(-(max_len + 1) // page_size)
        with torch.inference_mode(), device.queueing():
            self.last = torch.zeros(most_slots + 1, dtype=torch.int32, device=device.torch_device)  # [-1] is nobody's
            self.graphs = Graphs(device, self._compute, sizes_up_to(most_batch), width, progress)
        self.words = [device.host_words(0) for _ in range(RING)]
        self.landings = [device.host_words(most_slots) for _ in range(RING)]

    @property
    def layers(self) -> int:
        return self.decoder.spec.layers

    def run(self, plan: StepPlan, push: PushLayer) -> StepResult:
        """See `Runner`: a step that is waited for at once."""
        return self.launch(plan, push)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, push: PushLayer) -> Callable[[], StepResult]:
        """See `Launcher`. Raises ValueError or KeyError for a plan that its slots cannot serve: a planner's bug."""
        started = time.perf_counter()
        self._settle()
        self.slots.apply(plan)
        for admit in plan.admit:
            self.table.admit(admit.slot, admit.sampling)
        if not plan.slices:
            return lambda: StepResult(plan.number, (), time.perf_counter() - started)
        with self.device.queueing():
            flight = self._start(plan, push, started)
        self.flights.append(flight)
        return lambda: self._finish(flight)

    # --------------------------------------------------------------------------------------------------- launch

    def _settle(self) -> None:
        """Slots get the ids of steps that have been waited for; a slot may be somebody else's by now."""
        under_way = []
        for flight in self.flights:
            if any(each.token is None for each in flight.draws):
                under_way.append(flight)
                continue
            for each in flight.draws:
                if each.token is not None and self.slots.held.get(each.slot) is each.held:
                    self.slots.settle(each.slot, each.place, each.token)
        self.flights = under_way

    def _start(self, plan: StepPlan, push: PushLayer, started: float) -> Flight:
        slices = plan.slices
        batch = make_batch(slices, self.slots, self.planner)
        draws = [
            Draw(n, slices[n].slot, self.slots[slices[n].slot], self.slots[slices[n].slot].length) for n in batch.draws
        ]
        watched = [row for row, each in enumerate(draws) if _needs_host(each)]
        written = pusher(slices, push)
        landing = self.landings[self.launches % RING]
        scores: dict[int, tuple[Logprobs, ...]] = {}
        if written or watched or batch.scores or not self._replays(batch, draws, landing):
            step = self._eager(batch, draws)
            hidden = self._forward(step, batch, written)
            for n, first, count in batch.scores:
                rows = hidden[first : first + count]
                scores[n] = score_prompt(self.decoder, self.sampler, self.slots, slices[n], rows)
            if draws:
                logits = self.decoder.logits(hidden[: len(draws)])
                self._land(self._drawn(logits, step), landing)
                if watched:
                    self._draw_on_host(logits, draws, watched, landing)
        self.launches += 1
        for each in draws:
            if each.token is None:
                self.slots.expect(each.slot)
        return Flight(plan.number, len(slices), started, self.device.mark(), draws, landing, scores)

    def _replays(self, batch: Batch, draws: list[Draw], landing: Tensor) -> bool:
        """Whether the step is one that a graph computes: one token and one draw for each sequence. If so, it does."""
        rows = len(batch.attention.positions)
        graph = self.graphs.fitting(rows) if batch.outputs is None and len(draws) == rows else None
        if graph is None or batch.attention.singles != rows:
            return False
        self._bring(batch, draws, graph.layout, graph.words)
        graph.replay()
        self._land(graph.tokens[:rows], landing)
        return True

    def _eager(self, batch: Batch, draws: list[Draw]) -> DeviceStep:
        shape = batch.attention
        outputs = 0 if batch.outputs is None else len(batch.outputs)
        layout = Layout(
            len(shape.positions), shape.tables.shape[1], shape.singles, len(shape.tiles), outputs, len(draws)
        )
        count = layout.words(len(shape.tables))
        words = torch.empty(count, dtype=torch.int32, device=self.device.torch_device)
        self._bring(batch, draws, layout, words)
        step = layout.views(words)
        if batch.outputs is None or outputs:
            return step
        return DeviceStep(step.ids, step.plan, words[:0].long(), step.draws, step.slots)  # no row is an output

    def _bring(self, batch: Batch, draws: list[Draw], layout: Layout, target: Tensor) -> None:
        """A step's words to the device, by one copy."""
        turn = self.launches % RING
        if len(self.words[turn]) < len(target):
            self.words[turn] = self.device.host_words(len(target))
        words = self.words[turn]
        outputs = None if batch.outputs is None else batch.outputs.tolist()
        drawn = self.table.of([each.slot for each in draws], [each.place for each in draws])
        count = layout.fill(as_numpy(words), batch.tokens.ids.numpy(), batch.attention, outputs, drawn)
        target[:count].copy_(words[:count], non_blocking=True)

    def _compute(self, step: DeviceStep) -> Tensor:
        """A whole decode step, in which every row draws: what a graph holds."""
        hidden = self._forward(step, None, None)
        return self._drawn(self.decoder.logits(hidden), step)

    def _forward(self, step: DeviceStep, batch: Batch | None, written: Callable[[int], None] | None) -> Tensor:
        drawn = self.last[(-1 - step.ids).clamp(min=0).long()]
        ids = torch.where(step.ids < 0, drawn, step.ids)
        draws, scores = (batch.draws, batch.scores) if batch else ([], [])
        positions = step.plan.positions.clamp(min=0)
        hidden, _ = self.decoder.forward(
            Batch(RowTokens(ids, positions), step.plan, step.outputs, draws, scores), written
        )
        return hidden

    def _drawn(self, logits: Tensor, step: DeviceStep) -> Tensor:
        """Draw, and let each slot remember its token."""
        tokens = draw(logits, step.draws)
        self.last[step.slots] = tokens
        return tokens

    def _land(self, tokens: Tensor, landing: Tensor) -> None:
        landing[: len(tokens)].copy_(tokens, non_blocking=True)

    # ------------------------------------------------------------------------------------------------- host's part

    def _draw_on_host(self, logits: Tensor, draws: list[Draw], watched: list[int], landing: Tensor) -> None:
        """For the rows that need it; then the tokens of all rows are known, and the host has waited."""
        rows = logits[watched].cpu().numpy()
        self.device.mark().wait()
        for each, token in zip(draws, landing[: len(draws)].tolist(), strict=True):
            each.token = token
        for row, n in zip(rows, watched, strict=True):
            held = draws[n].held
            draws[n].token = token = held.drawer.draw(row, draws[n].place)
            if held.sampling.logprobs >= 0:
                draws[n].told = (logprobs(row, token, held.sampling.logprobs),)
        for each in draws:
            assert each.token is not None
            self.slots.append(each.slot, each.token)

    # --------------------------------------------------------------------------------------------------- finish

    def _finish(self, flight: Flight) -> StepResult:
        """Wait for a step; its time counts from its launch, or from the end of the one before."""
        flight.mark.wait()
        sampled = [Sampled((), prompt_logprobs=flight.scores.get(n, ())) for n in range(flight.slices)]
        landed: Sequence[int] = flight.landing[: len(flight.draws)].tolist()
        for each, token in zip(flight.draws, landed, strict=True):
            if each.token is None:
                each.token = token
            sampled[each.slice] = Sampled((each.token,), each.told, sampled[each.slice].prompt_logprobs)
        now = time.perf_counter()
        seconds, self.ended = now - max(flight.started, self.ended), now
        return StepResult(flight.number, tuple(sampled), seconds)


def _needs_host(draw: Draw) -> bool:
    """Whether the host has to see the logits that this is drawn from."""
    drawer = draw.held.drawer
    adjusts = drawer.seen is not None or len(drawer.bias_ids) > 0 or drawer.bans(draw.place)
    return adjusts or drawer.sampling.logprobs >= 0
