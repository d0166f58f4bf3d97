"""An answer as its client has put it together, and whether it is the answer that the request would have had.

Knows the JSON of both endpoints, streamed and whole; knows no connection. What may differ between two runs is not
compared: ids, times, how many prompt tokens came from a cache, and into how many events a text is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from cbdisagg_bench.faults_load import Ask


@dataclass(slots=True)
class Scores:
    """Log probabilities with the names they belong to, in the order in which they came."""

    names: list[str] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)

    def add(self, name: str, number: float | None) -> None:
        """A prompt's first token has a name and no number."""
        self.names.append(name if number is not None else f"{name} (none)")
        self.numbers.append(number or 0.0)


@dataclass(slots=True)
class Said:
    """One choice. `stopped_by`: the stop string or token; `prompt`: the scores of the prompt's tokens."""

    text: str = ""
    scores: Scores = field(default_factory=Scores)
    prompt: Scores = field(default_factory=Scores)
    finish: str = ""
    stopped_by: str | int | None = None

    def take(self, choice: dict[str, Any]) -> None:
        """A choice of a body, or of one event of a stream."""
        message = choice.get("delta") or choice.get("message") or {}
        self.text += choice.get("text") or message.get("content") or ""
        self.finish = choice.get("finish_reason") or self.finish
        if choice.get("stop_reason") is not None:
            self.stopped_by = choice["stop_reason"]
        if choice.get("logprobs"):
            self._take_scores(choice["logprobs"])
        for entry in choice.get("prompt_logprobs") or ():
            for token, score in (entry or {"": {"logprob": None}}).items():
                self.prompt.add(token, score["logprob"])

    def _take_scores(self, logprobs: dict[str, Any]) -> None:
        for entry in logprobs.get("content") or ():
            self.scores.add(entry["token"], entry["logprob"])
            for best in entry["top_logprobs"]:
                self.scores.add(best["token"], best["logprob"])
        if "tokens" in logprobs:
            columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
            for token, number, top, offset in zip(*columns, strict=True):
                self.scores.add(f"{token}@{offset}", number)
                for name, best in (top or {}).items():
                    self.scores.add(name, best)


@dataclass(slots=True)
class Answer:
    """What one client has seen. Times are of the monotonic clock, in seconds; `times` has one for each event,
    `said_at` those of each choice: a second choice waits for its prompt while the first one speaks.

    `whole`: it ended as it should. `left`: the client went away first. `refused`: how often it was told to come later.
    """

    ask: Ask
    salt: str
    began: float
    ended: float = 0.0
    said: dict[int, Said] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    times: list[float] = field(default_factory=list)
    said_at: dict[int, list[float]] = field(default_factory=dict)
    error: str = ""
    whole: bool = False
    left: bool = False
    refused: int = 0

    def hear(self, event: dict[str, Any], now: float) -> None:
        """An event of a stream."""
        self.times.append(now)
        for choice in event["choices"]:
            self.said_at.setdefault(choice["index"], []).append(now)
        self.take(event)

    def take(self, body: dict[str, Any]) -> None:
        """A body, or one event of a stream."""
        for choice in body["choices"]:
            self.said.setdefault(choice["index"], Said()).take(choice)
        if body.get("usage"):
            counts = ("prompt_tokens", "completion_tokens", "total_tokens")
            self.usage = {name: body["usage"][name] for name in counts}


SHOWN = 40
"""How much of a difference is shown: characters or tokens."""

Kind: TypeAlias = Literal["same", "lost", "altered", "repeated"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`what` says how it differs; `drift` is the largest difference of a log probability."""

    kind: Kind
    what: str = ""
    drift: float = 0.0


def compare(answer: Answer, reference: Answer, tolerance: float) -> Verdict:
    """`answer` against a whole one of the same request. If its client left, what it had seen must be the beginning.

    `tolerance` is for log probabilities, in nats; everything else must be equal.
    """
    if answer.error:
        return Verdict("lost", answer.error)
    if not answer.whole and not answer.left:
        return Verdict("lost", "it ended without an end")
    if answer.whole and sorted(answer.said) != sorted(reference.said):
        return Verdict("altered", f"choices {sorted(answer.said)} instead of {sorted(reference.said)}")
    drift = 0.0
    for index, said in sorted(answer.said.items()):
        found = _compare_choice(said, reference.said[index], answer.whole, tolerance)
        if found.kind != "same":
            return Verdict(found.kind, f"choice {index}: {found.what}", found.drift)
        drift = max(drift, found.drift)
    if answer.whole and answer.usage != reference.usage:
        return Verdict("altered", f"usage {answer.usage} instead of {reference.usage}", drift)
    return Verdict("same", drift=drift)


def _compare_choice(said: Said, expected: Said, whole: bool, tolerance: float) -> Verdict:
    if whole and not said.finish:
        return Verdict("lost", "it has no finish reason")
    if said.text != (expected.text if whole else expected.text[: len(said.text)]):
        return _differs(said.text, expected.text, "text")
    drift = 0.0
    for what, mine, theirs in (
        ("tokens", said.scores, expected.scores),
        ("prompt tokens", said.prompt, expected.prompt),
    ):
        # A client that left may have gone before the scores of the prompt came; they come all at once.
        length = len(theirs.names) if whole else len(mine.names)
        if mine.names != theirs.names[:length]:
            return _differs(mine.names, theirs.names, what)
        drift = max([drift, *(abs(a - b) for a, b in zip(mine.numbers, theirs.numbers, strict=False))])
    if drift > tolerance:
        return Verdict("altered", f"log probabilities differ by {drift:.2g}", drift)
    if said.finish and (said.finish, said.stopped_by) != (expected.finish, expected.stopped_by):
        ends = [f"{it.finish} by {it.stopped_by!r}" for it in (said, expected)]
        return Verdict("altered", f"finish reason {ends[0]} instead of {ends[1]}", drift)
    return Verdict("same", drift=drift)


def _differs(mine: Sequence[str], theirs: Sequence[str], what: str) -> Verdict:
    """Repeated: the same up to somewhere, then a piece of it again, then the rest as it should be."""
    same = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    rest = mine[same:]
    again = bool(rest) and len(mine) > len(theirs) and list(theirs[len(theirs) - len(rest) :]) == list(rest)
    shown, wanted = (it[same : same + SHOWN] for it in (mine, theirs))
    text = f"{what} differ at {same} of {len(theirs)}: {shown!r} instead of {wanted!r}"
    return Verdict("repeated" if again else "altered", text)
