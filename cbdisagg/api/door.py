"""The door for requests that generate: open, or closed because the service is about to end. Counts who is inside.

Knows nobody's name. Once closed it stays closed; whoever is inside may stay to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cbdisagg.api.errors import ApiError

RETRY_S = 10.0
"""When a client that was turned away should come again: a service that ends is often started again."""


class Door:
    """One per application. `inside`: requests that have entered and not left."""

    def __init__(self) -> None:
        self.inside = 0
        self.closed = False
        self._when_empty: Callable[[], None] | None = None

    def refusal(self) -> ApiError:
        return ApiError(503, "not ready: the service is draining", code="draining", retry_after_s=RETRY_S)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Raises ApiError 503 if the door is closed."""
        if self.closed:
            raise self.refusal()
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self._look()

    def close(self, when_empty: Callable[[], None] | None = None) -> None:
        """Let nobody in any more. `when_empty` is called once, when the last one has left: at once if nobody is in."""
        self.closed = True
        if when_empty is not None:
            self._when_empty = when_empty
            self._look()

    def _look(self) -> None:
        if not self.inside and self._when_empty is not None:
            call, self._when_empty = self._when_empty, None
            call()
