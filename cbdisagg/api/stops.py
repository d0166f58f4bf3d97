"""Stop strings in text that arrives in parts.

The text ends where the first stop string is complete, whatever parts it came in; of several that end at the same
character the longest counts. Knows characters only. One pass, by the automaton of Knuth, Morris and Pratt ("Fast
pattern matching in strings", SIAM J. Comput. 6, 1977) for each string: its state is the length of the longest
beginning of the string that the text ends with, which is also what has to be held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """`met` is the stop string that ended the text, or None. Stop strings are not empty."""

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        # Longest first: of two that end at the same character this one is seen first.
        self._patterns = [_Pattern(text) for text in sorted(set(stop), key=lambda text: (-len(text), text))]
        self._include = include
        self._held = ""
        self.met: str | None = None

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is now safe to show. With `may_stop` false a string that completes here is passed over."""
        if self.met is not None or not text:
            return ""
        for position, character in enumerate(text):
            complete = None
            for pattern in self._patterns:
                if pattern.step(character) and complete is None:
                    complete = pattern.text
            if complete is not None and may_stop:
                self.met = complete
                return self._cut(self._held + text[: position + 1])
        self._held += text
        keep = max(pattern.matched for pattern in self._patterns)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        shown, self._held = self._held, ""
        return shown

    def _cut(self, text: str) -> str:
        assert self.met is not None
        self._held = ""
        return text if self._include else text[: len(text) - len(self.met)]


class _Pattern:
    """One string: `matched` is the length of its longest proper beginning that the text so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = [0] * (len(text) + 1)  # [k]: the longest proper beginning that the first k characters end with
        for k in range(1, len(text)):
            self._shorter[k + 1] = self._extend(self._shorter[k], text[k])

    def step(self, character: str) -> bool:
        """Take one character; True if the string is complete with it."""
        self.matched = self._extend(self.matched, character)
        if self.matched < len(self.text):
            return False
        self.matched = self._shorter[self.matched]
        return True

    def _extend(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._shorter[matched]
        return matched + 1 if self.text[matched] == character else 0
