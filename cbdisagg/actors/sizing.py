"""How many pages a worker's pool has and how long a request may be: the model's geometry meets the config."""

from __future__ import annotations

from cbdisagg.config import ConfigError, Kv

DEFAULT_POOL_BYTES = 512 << 20


def size_pool(kv: Kv, max_len: int, context: int, page_bytes: int) -> tuple[int, int]:
    """(pages of the pool, tokens of the longest request).

    `max_len` is the configured one (0: as long as possible), `context` the model's, `page_bytes` what a page takes in
    all layers together. Raises ConfigError if they contradict each other: one request must fit the pool, or it would
    wait for ever.
    """
    if max_len > context:
        raise ConfigError(f"[model] max_len = {max_len}: this model's context is {context} tokens; lower max_len")
    pages = kv.pages or ((kv.memory_mb << 20) or DEFAULT_POOL_BYTES) // page_bytes
    if pages < 2:
        raise ConfigError(
            f"[kv] memory_mb = {kv.memory_mb} holds less than two pages of {page_bytes / 2**20:.1f} MiB; raise it"
            if kv.memory_mb
            else f"[kv] pages = {kv.pages}: at least 2 are needed"
        )
    holds = pages * kv.page_size
    if max_len > holds:
        needed = -(-max_len // kv.page_size)
        megabytes = -(-needed * page_bytes >> 20)
        raise ConfigError(
            f"[model] max_len = {max_len}: the pool holds {holds} tokens ({pages} pages); "
            f"lower max_len, or set kv.pages to {needed} or kv.memory_mb to {megabytes}"
        )
    return pages, max_len or min(context, holds)
