"""How others batch and allocate, as policies of this scheduler: what continuous batching on pages is compared with.

Two questions are answered here: may a waiting request join now, and how many pages does a request hold. The pages, the
plans and the runner are the same for every answer, so that a difference between two systems is a difference of policy.

    paged           pages as tokens come
    reserve-max     pages for max_len tokens, from the start (Orca's way when it knows nothing)
    reserve-pow2    the prompt, and a power of two of output tokens, doubled whenever it is outgrown
    reserve-oracle  pages for the tokens that the request will have: it ignores its end token, so max_tokens says it

A static batch takes what waits until its first step. Then it is closed: who ends stays in it as *padding*, which is
computed as before although nobody wants it, until the last one ends; prompts are padded to the longest. Life of a
batch: open -> closed (first plan) -> over (no member is left, and it has run as long as it must) -> open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from msgspec.structs import replace

from cbdisagg.core.blocks import Pages
from cbdisagg.core.request import Request, State
from cbdisagg.messages import Page

Batching: TypeAlias = Literal["continuous", "static", "static-global"]
Allocator: TypeAlias = Literal["paged", "reserve-max", "reserve-pow2", "reserve-oracle"]
PagesToReserve: TypeAlias = Callable[[Request, int], int]
"""(request, its tokens) -> the pages that it holds when so many of its tokens have KV; at least what they fill."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """`max_len`: tokens of the longest sequence. `static_length`: iterations of a static-global batch; 0: max_len."""

    batching: Batching = "continuous"
    allocator: Allocator = "paged"
    max_len: int = 0
    static_length: int = 0

    @property
    def pages_to_reserve(self) -> PagesToReserve:
        match self.allocator:
            case "paged":
                return Request.pages_for
            case "reserve-max":
                return lambda request, tokens: request.pages_for(max(tokens, self.max_len))
            case "reserve-oracle":
                return lambda request, tokens: request.pages_for(max(tokens, request.limit))
            case "reserve-pow2":
                return lambda request, tokens: request.pages_for(_doubled(tokens, request.prompt_len, self.max_len))

    @property
    def reserves(self) -> bool:
        """Does a request take pages at its start that its tokens do not need yet?"""
        return self.allocator != "paged"

    @property
    def grows(self) -> bool:
        """May a running request need more pages than it has been given at its start?"""
        return self.allocator in ("paged", "reserve-pow2")

    def static_batch(self, pages: Pages, page_size: int) -> StaticBatch | None:
        if self.batching == "continuous":
            return None
        length = 0 if self.batching == "static" else self.static_length or self.max_len
        return StaticBatch(pages, page_size, self.max_len, length)


def _doubled(tokens: int, prompt: int, max_len: int) -> int:
    """The prompt and the next power of two of the output tokens, at least one, at most max_len in all."""
    output = max(1, tokens - prompt)
    return max(tokens, min(max_len, prompt + (1 << (output - 1).bit_length())))


class StaticBatch:
    """Who is in the running batch without being wanted. `length`: iterations that it runs at least (static-global).

    `stayers` have ended; they keep slot and pages and go on drawing tokens, of which nobody is told. `fillers` stand
    for the padding of the shorter prompts: zeros, computed with the prompts into pages that a member has reserved and
    does not use yet.
    """

    def __init__(self, pages: Pages, page_size: int, max_len: int, length: int) -> None:
        self.pages, self.page_size, self.max_len, self.length = pages, page_size, max_len, length
        self.stayers: list[Request] = []
        self.fillers: list[Request] = []
        self.closed = False
        self._iterations = 0
        self._least = 0

    @property
    def padding(self) -> list[Request]:
        return self.stayers + self.fillers

    @property
    def over(self) -> bool:
        """Has it run as long as it must, whoever is left?"""
        return self._iterations >= self._least

    def keep(self, request: Request) -> bool:
        """A member has ended. True: its place stays taken."""
        if self.closed and request.slot is not None:
            request.giving = None
            self.stayers.append(request)
            return True
        return False

    def lockstep(self, ready: list[Request], members: Iterable[Request]) -> list[Request]:
        """Who takes part in the next step: all prompts are computed before anybody decodes. Closes the batch."""
        if not self.closed:
            self._close(list(members))
        prompts = [request for request in ready if not request.decoding]
        if prompts or self.fillers:
            return prompts
        return ready

    def shares(self, prompts: bool, left: int) -> list[tuple[Request, int]]:
        """Padding for a step that computes `prompts`, of `left` tokens at most, or for one that decodes."""
        if prompts or self.fillers:
            shares: list[tuple[Request, int]] = []
            for filler in self.fillers:
                count = min(filler.remaining - 1, left)  # its last token is never computed, so that nothing is drawn
                if count:
                    shares.append((filler, count))
                    left -= count
            return shares
        self._iterations += 1
        for stayer in self.stayers:
            if stayer.planned >= min(self.max_len, len(stayer.pages) * self.page_size):
                stayer.planned -= 1  # no room for one more: its last token is computed again
        return [(stayer, 1) for stayer in self.stayers]

    def filled(self) -> list[Request]:
        """Fillers that are computed: their slots and pages may go."""
        done = [filler for filler in self.fillers if filler.remaining == 1]
        self.fillers = [filler for filler in self.fillers if filler.remaining > 1]
        return done

    def end(self) -> list[Request]:
        """The padding, whose slots and pages may go; the next batch is open."""
        padding, self.stayers, self.fillers = self.padding, [], []
        self.closed = False
        return padding

    def _close(self, members: list[Request]) -> None:
        self.closed = True
        longest = max(len(request.tokens) for request in members)
        self._iterations = 1  # the prompts give the first tokens
        self._least = min(self.length, self.max_len - longest)
        for request in members:
            used = request.pages_for(len(request.tokens))
            room = (len(request.pages) - used) * self.page_size
            padding = min(longest - len(request.tokens), room)
            if padding > 0:
                pages = request.pages[len(request.pages) - request.pages_for(padding) :]
                self.pages.pin(pages)
                self.fillers.append(_filler(request, padding, pages))


def _filler(member: Request, tokens: int, pages: list[Page]) -> Request:
    """`tokens` zeros, and one more that is never computed. It has ended before it begins: its results are dropped."""
    spec = replace(member.spec, prompt=bytes(4 * (tokens + 1)), output=b"", hashes=b"")
    key = -member.key  # no other request has it: theirs count from 1
    return Request(
        key, spec, member.route, member.arrival, member.page_size, tokens + 1, state=State.ENDED, pages=pages
    )
