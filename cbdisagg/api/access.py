"""What is known of one HTTP request when it ends: one line in the log.

Knows names and numbers; collects no text that a client wrote but its request id and path, both made harmless.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field

from aiohttp import web

from cbdisagg.api.errors import shown

log = logging.getLogger(__name__)

_HARMLESS = re.compile(r"[!-~]{1,128}")
CLIENT_CLOSED = 499
"""The status, in logs and metrics only, of a request whose client left before the end."""


@dataclass(slots=True)
class Access:
    """One request on its way. Times are seconds on the monotonic clock; `first_token_s` is 0 until there is one.

    `sequences`: those that it generates, as the coordinator's log names them.
    """

    request_id: str
    method: str
    path: str
    started_s: float = field(default_factory=time.monotonic)
    status: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float = 0.0
    sequences: str = "-"

    @classmethod
    def of(cls, request: web.Request) -> Access:
        """The client's x-request-id is kept if it is one plain word, else a new one is drawn."""
        given = request.headers.get("x-request-id", "")
        return cls(given if _HARMLESS.fullmatch(given) else f"req-{uuid.uuid4().hex}", request.method, request.path)

    def write(self) -> None:
        first = f"{(self.first_token_s - self.started_s) * 1e3:.1f}" if self.first_token_s else "-"
        log.info(
            "request_id=%s method=%s path=%s status=%d prompt_tokens=%d output_tokens=%d ttft_ms=%s duration_ms=%.1f"
            " sequences=%s",
            self.request_id,
            self.method,
            shown(self.path),
            self.status,
            self.prompt_tokens,
            self.output_tokens,
            first,
            (time.monotonic() - self.started_s) * 1e3,
            self.sequences,
        )


ACCESS: ContextVar[Access] = ContextVar("cbdisagg.access")
"""The request that the current task serves."""
