"""Drawing one token for each row of logits on the device, so that it need not come to the host between steps. Triton.

The reference is `Drawer.draw` of cbdisagg.engine.sampler, and the order is its order: temperature, min_p, top_k, top_p,
then the inverse of the cumulative distribution, in id order, at the uniform number of (seed, choice, position). Filters
are thresholds on a logit's depth, how far it is below the best over the temperature; ids that tie with the last one
kept are kept too. No sort: a depth is at least 0, so its bits as an integer rise with it, and a threshold is found by
halving the range of integers 31 times. Only ids within NEAR of the best are searched, if they suffice; they are few.

Bias, penalties and bans are not known here: rows that have them are drawn on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
DRAWS = ["temperatures", "top_ps", "most_depths", "top_ks", "seeds_low", "seeds_high", "choices", "positions"]
"""Of `draw_rows`: the fields of `Draws`, which lie where a step has them."""
NEAR = tl.constexpr(8.0)
"""In units of depth, which is nats at temperature 1."""
INFINITY_BITS = tl.constexpr(0x7F800000)
NO_ID = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row draws: int32 and float32, [rows] each.

    `temperature` 0 takes the best, the lowest id among equals. `top_k` 0, `top_p` 1, `most_depth` inf switch a filter
    off; `most_depth` is -log(min_p). The seed's 64 bits are two words.
    """

    temperature: Tensor
    top_p: Tensor
    most_depth: Tensor
    top_k: Tensor
    seed_low: Tensor
    seed_high: Tensor
    choice: Tensor
    position: Tensor


@triton.jit
def best_of(row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(largest, its lowest id) of a row of logits."""
    best, best_id = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for start in range(0, WIDTH, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(row + ids, mask=ids < WIDTH, other=float("-inf")).to(tl.float32)
        highest = tl.max(values, 0)
        first = tl.min(tl.where(values == highest, ids, NO_ID), 0)
        best_id = tl.where(highest > best, first, best_id)
        best = tl.maximum(best, highest)
    return best, best_id


@triton.jit
def depths_of(row, ids, best, temperature, WIDTH: tl.constexpr):
    """How far logits are below the best, over the temperature; infinite behind the row's end."""
    values = tl.load(row + ids, mask=ids < WIDTH, other=float("-inf")).to(tl.float32)
    return tl.div_rn(best - values, temperature)


@triton.jit
def gather_depths(row, kept, best, temperature, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the depths up to `limit` to `kept`, one after the other; how many they are."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, WIDTH, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        depths = depths_of(row, ids, best, temperature, WIDTH)
        near = (depths <= limit) & (ids < WIDTH)
        ones = near.to(tl.int32)
        tl.store(kept + count + tl.cumsum(ones, 0) - 1, depths, mask=near)
        count += tl.sum(ones, 0)
    tl.debug_barrier()  # other threads of this program read what these have written
    return count


@triton.jit
def measure(kept, count, bits, BLOCK: tl.constexpr):
    """(how many, their weights' sum) of the gathered depths whose bits are at most `bits`."""
    number, mass = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        depths = tl.load(kept + places, mask=places < count, other=float("inf"))
        within = (depths.to(tl.int32, bitcast=True) <= bits) & (places < count)
        number += tl.sum(within.to(tl.int32), 0)
        mass += tl.sum(tl.where(within, tl.exp(-depths), 0.0).to(tl.float64), 0)
    return number, mass


@triton.jit
def least_bits(kept, count, most, wanted_number, wanted_mass, BLOCK: tl.constexpr):
    """The least bits of a depth within which there are that many ids and that much weight; at most `most`."""
    low, high = tl.full([], 0, tl.int32), most
    for _ in range(31):
        middle = low + (high - low) // 2
        number, mass = measure(kept, count, middle, BLOCK)
        enough = (number >= wanted_number) & (mass >= wanted_mass)
        high = tl.where(enough, middle, high)
        low = tl.where(enough | (low >= high), low, tl.minimum(middle + 1, high))
    return high


@triton.jit
def uniform(seed_low, seed_high, choice, position):
    """The number of cbdisagg.engine.philox.uniform: 53 bits of Philox4x32-10."""
    seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low.to(tl.uint32, bitcast=True).to(
        tl.uint64
    )
    zero = tl.full([1], 0, tl.uint32)
    counter = zero + position.to(tl.uint32, bitcast=True)
    low, high, _, _ = tl.philox(seed, counter, zero, zero + choice.to(tl.uint32, bitcast=True), zero)
    whole = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    return tl.sum((whole >> 11).to(tl.float64) * 1.1102230246251565e-16, 0)  # 2 ** -53


@triton.jit(do_not_specialize_on_alignment=DRAWS)
def draw_rows(
    logits,
    scratch,
    tokens,
    temperatures,
    top_ps,
    most_depths,
    top_ks,
    seeds_low,
    seeds_high,
    choices,
    positions,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row)."""
    n = tl.program_id(0)
    row, kept = logits + n.to(tl.int64) * stride, scratch + n.to(tl.int64) * WIDTH
    best, token = best_of(row, WIDTH, BLOCK)
    temperature = tl.load(temperatures + n)
    if temperature > 0.0:
        top_p, limit, top_k = tl.load(top_ps + n), tl.abs(tl.load(most_depths + n)), tl.load(top_ks + n)  # no -0
        top_k = tl.where(top_k < WIDTH, top_k, 0)
        most = tl.full([], INFINITY_BITS, tl.int32) - 1  # finite: an id that cannot be is never kept
        most = tl.minimum(most, limit.to(tl.int32, bitcast=True))
        if (top_k > 0) | (top_p < 1.0):
            count = gather_depths(row, kept, best, temperature, tl.minimum(limit, NEAR), WIDTH, BLOCK)
            if count < top_k:
                count = gather_depths(row, kept, best, temperature, limit, WIDTH, BLOCK)
            if top_k > 0:
                most = least_bits(kept, count, most, tl.minimum(top_k, count), 0.0, BLOCK)
            if top_p < 1.0:
                _, near_mass = measure(kept, count, most, BLOCK)
                whole = near_mass
                if top_k == 0:
                    whole = tl.full([], 0.0, tl.float64)
                    for start in range(0, WIDTH, BLOCK):
                        ids = start + tl.arange(0, BLOCK)
                        depths = depths_of(row, ids, best, temperature, WIDTH)
                        whole += tl.sum(tl.where(depths <= limit, tl.exp(-depths), 0.0).to(tl.float64), 0)
                wanted = top_p.to(tl.float64) * whole
                if near_mass < wanted:
                    tl.debug_barrier()  # all have read what is overwritten now
                    count = gather_depths(row, kept, best, temperature, limit, WIDTH, BLOCK)
                most = least_bits(kept, count, most, 0, wanted, BLOCK)
        token = invert(row, best, temperature, most, n, seeds_low, seeds_high, choices, positions, WIDTH, BLOCK)
    tl.store(tokens + n, token)


@triton.jit
def invert(
    row, best, temperature, most, n, seeds_low, seeds_high, choices, positions, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """The first id at which the running sum of the kept ids' weights exceeds the uniform number times the whole."""
    whole, last = tl.full([], 0.0, tl.float64), tl.full([], 0, tl.int32)
    for start in range(0, WIDTH, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        depths = depths_of(row, ids, best, temperature, WIDTH)
        keeps = depths.to(tl.int32, bitcast=True) <= most
        weights = tl.where(keeps, tl.exp(-depths), 0.0)
        whole += tl.sum(weights.to(tl.float64), 0)
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, ids, 0), 0))
    number = uniform(tl.load(seeds_low + n), tl.load(seeds_high + n), tl.load(choices + n), tl.load(positions + n))
    aim, before, found = number * whole, tl.full([], 0.0, tl.float64), last  # rounding may leave the aim unreached
    for start in range(0, WIDTH, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        depths = depths_of(row, ids, best, temperature, WIDTH)
        keeps = depths.to(tl.int32, bitcast=True) <= most
        weights = tl.where(keeps, tl.exp(-depths), 0.0).to(tl.float64)
        running = before + tl.cumsum(weights, 0)
        found = tl.minimum(found, tl.min(tl.where((running > aim) & (weights > 0.0), ids, NO_ID), 0))
        before += tl.sum(weights, 0)
    return found


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """`logits` float32 [rows, vocab], columns contiguous -> the drawn ids, int32 [rows]. Takes rows * vocab floats."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    scratch = torch.empty(rows * vocab, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocab))
    draw_rows[(rows,)](
        logits,
        scratch,
        tokens,
        draws.temperature,
        draws.top_p,
        draws.most_depth,
        draws.top_k,
        draws.seed_low,
        draws.seed_high,
        draws.choice,
        draws.position,
        logits.stride(0),
        WIDTH=vocab,
        BLOCK=block,
        num_warps=8,
    )
    return tokens


@triton.jit
def best_ids(logits, ids, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row)."""
    n = tl.program_id(0).to(tl.int64)
    _, token = best_of(logits + n * stride, WIDTH, BLOCK)
    tl.store(ids + n, token)


def argmax(x: Tensor) -> Tensor:
    """`x` [rows, width] -> [rows] int64: the place of each row's largest, the lowest among equals."""
    ids = torch.empty(len(x), dtype=torch.int64, device=x.device)
    block = min(BLOCK, triton.next_power_of_2(x.shape[1]))
    best_ids[(len(x),)](x, ids, x.stride(0), WIDTH=x.shape[1], BLOCK=block, num_warps=8)
    return ids
