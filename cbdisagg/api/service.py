"""What the routes share: the model, its tokenizer, the way to the workers, limits and metrics.

Knows how the pieces of the api process belong together; one instance per application, made in server.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from msgspec import Struct

from cbdisagg.api.body import T, read_body
from cbdisagg.api.client import Client
from cbdisagg.api.door import Door
from cbdisagg.api.errors import ApiError, shown
from cbdisagg.api.limits import Bounds
from cbdisagg.api.metrics import Metrics
from cbdisagg.api.prompts import Prompts
from cbdisagg.api.tokenizer import Tokenizer
from cbdisagg.config import Config
from cbdisagg.messages import Drain


class ModelCard(Struct, frozen=True):
    """The served model: its name, longest prompt + output in tokens, number of token ids, Unix time of its start."""

    name: str
    max_len: int
    vocab: int
    created: int


@dataclass(slots=True)
class Service:
    """`workers`: the names of those that may be drained; `drain` passes the wish on. `has_key`: clients show a key."""

    config: Config
    model: ModelCard
    tokenizer: Tokenizer
    client: Client
    metrics: Metrics
    prompts: Prompts
    workers: tuple[str, ...]
    drain: Callable[[Drain], None]
    has_key: bool
    door: Door
    bounds: Bounds

    def renew(self, config: Config) -> None:
        """The settings have been read again: they hold for requests that come from now on."""
        self.config = config
        self.bounds = Bounds(config.limits, self.model.max_len, self.model.vocab, self.tokenizer.end_ids)
        self.client.resume_s, self.client.silent_s = config.limits.resume_s, config.policy.silent_s

    async def read(self, request: web.Request, kind: type[T]) -> T:
        """The request's body, checked as far as its types go. Raises ApiError."""
        limits = self.config.limits
        return await read_body(request, kind, max_bytes=self.body_bytes, max_depth=limits.json_depth)

    def take_stats(self) -> None:
        """Give the metrics the newest Stats: at each request's end too, or short-lived workers go uncounted."""
        if self.client.stats is not None:
            self.metrics.observe(self.client.stats)

    @property
    def body_bytes(self) -> int:
        return int(self.config.limits.body_mb * 1024 * 1024)

    def check_model(self, name: str | None) -> None:
        """An absent name means the model that is served. Raises ApiError 404."""
        if name is not None and name != self.model.name:
            raise ApiError(
                404,
                f"the model {shown(name)!r} does not exist; this server has {self.model.name!r}",
                param="model",
                code="model_not_found",
            )


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
