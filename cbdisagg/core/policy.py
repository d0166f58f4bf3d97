"""The decisions, as functions of numbers: chunk sizes, routes, admission. No state of its own but the step model.

All times in seconds, all lengths in tokens. The model of a step is linear: `step_s + token_s * prompt tokens in it`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cbdisagg.messages import Address, Role

Mode: TypeAlias = Literal["auto", "aggregate", "disaggregate"]

HANDOVER_S = 0.002  # messages and scheduling of one hand-over; the bytes are counted apart


def admissible(needed: int, available: int, running: int) -> bool:
    """May a request take `needed` pages now? One page of growth stays free for each running one."""
    return needed <= available - running if running else needed <= available


@dataclass(frozen=True, slots=True)
class View:
    """One worker as the coordinator sees it: its last Load, plus what was routed to it since."""

    address: Address
    role: Role
    running: int
    waiting: int
    queued_tokens: int
    max_batch: int
    step_s: float
    token_s: float
    cached: int  # tokens of this request's prompt that are probably cached there


@dataclass(frozen=True, slots=True)
class Link:
    """A tested way from a prefill to a decode worker. `token_bytes`: KV bytes of one token."""

    prefill: Address
    decode: Address
    bytes_per_s: float
    token_bytes: int

    def seconds(self, tokens: int) -> float:
        return HANDOVER_S + (tokens * self.token_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


@dataclass(frozen=True, slots=True)
class Decision:
    """A route, why it was taken, and the TTFT predicted for it."""

    prefill: Address
    decode: Address
    reason: str
    ttft_s: float

    @property
    def kind(self) -> Literal["local", "remote"]:
        return "local" if self.prefill == self.decode else "remote"


def local_ttft(view: View, prompt: int, tpot_s: float) -> float:
    """Queue and prompt at the rate at which this worker computes prompts beside its running sequences."""
    tokens = view.queued_tokens + max(1, prompt - view.cached)
    if not view.running:
        return tokens * view.token_s
    chunk = max(16.0, (tpot_s - view.step_s) / max(view.token_s, 1e-9))  # a fit may find that more tokens cost nothing
    return tokens * (view.step_s / chunk + view.token_s)


def remote_ttft(prefill: View, decode: View, link: Link, prompt: int) -> float:
    """Queue and prompt at the prefill worker, then what the decode worker lacks over the link."""
    tokens = prefill.queued_tokens + max(1, prompt - prefill.cached)
    return tokens * prefill.token_s + link.seconds(max(1, prompt - decode.cached))


def route(
    views: Sequence[View],
    links: Sequence[Link],
    mode: Mode,
    prompt: int,
    max_tokens: int,
    ttft_s: float,
    tpot_s: float,
) -> Decision:
    """The workers for one request. `views` is not empty; ties go to the smaller load, then to the name."""
    decoders = [v for v in views if v.role != "prefill"] or list(views)
    by_name = {view.address: view for view in views}
    if mode == "aggregate":
        return _local(views, prompt, tpot_s, "aggregate")
    remotes = [
        (remote_ttft(by_name[link.prefill], by_name[link.decode], link, prompt), link)
        for link in links
        if link.prefill in by_name and link.decode in by_name and by_name[link.prefill].role != "decode"
    ]
    prefillers = [v for v in views if v.role == "prefill"]
    if max_tokens == 1 and prefillers:
        return _local(prefillers, prompt, tpot_s, "one-token")
    local = _local(decoders, prompt, tpot_s, "local")
    if not remotes:
        reason = "colocated" if all(v.role == "any" for v in views) else "no-prefill-worker"
        return Decision(local.prefill, local.decode, reason, local.ttft_s)
    ttft, link = min(
        remotes,
        key=lambda found: (
            _full(by_name[found[1].decode]),
            _grid(found[0]),
            _load(by_name[found[1].decode]),
            found[1].decode.name,
            found[1].prefill.name,
        ),
    )
    remote = Decision(link.prefill, link.decode, "predicted", ttft)
    if mode == "disaggregate":
        return Decision(link.prefill, link.decode, "disaggregate", ttft)
    return _better(local, remote, by_name[local.decode], prompt, ttft_s, tpot_s)


def move_target(views: Sequence[View], links: Sequence[Link], source: Address) -> Address | None:
    """Who takes over a request of `source`: of those that decode, one with a place, that KV can be pushed to."""
    others = [view for view in views if view.address != source]
    decoders = [view for view in others if view.role != "prefill"] or others
    reached = {link.decode for link in links if link.prefill == source}
    best = min(decoders, key=lambda v: (_full(v), v.address not in reached, _load(v), v.address.name), default=None)
    return best.address if best is not None else None


def _better(local: Decision, remote: Decision, decoder: View, prompt: int, ttft_s: float, tpot_s: float) -> Decision:
    """Local when it is faster and takes less than one step's room, or when the prefill workers would be late."""
    missing = max(1, prompt - decoder.cached)
    room = tpot_s - (decoder.step_s if decoder.running else 0.0)
    if local.ttft_s <= remote.ttft_s and missing * decoder.token_s <= room:
        reason = "cached" if decoder.cached else "short"
        return Decision(local.prefill, local.decode, reason, local.ttft_s)
    if remote.ttft_s > ttft_s and local.ttft_s < remote.ttft_s / 2:
        return Decision(local.prefill, local.decode, "prefill-queue", local.ttft_s)
    return remote


def _local(views: Sequence[View], prompt: int, tpot_s: float, reason: str) -> Decision:
    best = min(views, key=lambda v: (_full(v), _grid(local_ttft(v, prompt, tpot_s)), _load(v), v.address.name))
    return Decision(best.address, best.address, reason, local_ttft(best, prompt, tpot_s))


def _full(view: View) -> bool:
    return view.running + view.waiting >= view.max_batch


def _load(view: View) -> int:
    return view.running + view.waiting


def _grid(seconds: float) -> int:
    """Predictions closer than 5 ms are equal: the load then decides."""
    return round(seconds / 0.005)


def retry_after(views: Sequence[View]) -> float:
    """Seconds until the queues have drained, by their prompt tokens; at least one."""
    drain = [view.queued_tokens * view.token_s + view.waiting * view.step_s for view in views]
    return max(1.0, min(drain, default=1.0))
