"""Whether a peer's message makes sense: decoding guarantees only its form. Each function says what is wrong, or "".

Knows one message and the two workers' pools. A senseless message is a bug of a peer, or comes from somebody who has got
hold of a socket: it is noted and changes nothing, and nobody is left waiting for an answer to it.
"""

from __future__ import annotations

from cbdisagg.messages import HASH_BYTES, Generate, KvReady, Prefill, WorkerInfo, unpack


def wrong_request(request: Generate) -> str:
    if len(request.prompt) % 4 or len(request.output) % 4 or not request.prompt:
        return "token ids that are none"
    if len(request.hashes) % HASH_BYTES:
        return "page hashes that are none"
    return ""


def wrong_prefill(message: Prefill, sender: WorkerInfo, me: WorkerInfo) -> str:
    request = message.request
    if message.attempt.decode != sender.address.incarnation or message.attempt.request != request.id:
        return "an attempt that is not its sender's"
    problem = wrong_request(request)
    if problem:
        return problem
    tokens = (len(request.prompt) + len(request.output)) // 4
    if tokens > me.max_len:
        return f"{tokens} tokens, of which {me.max_len} are possible"
    return "" if message.moves and not message.pages else _wrong_pages(message, tokens, sender, me)


def _wrong_pages(message: Prefill, tokens: int, sender: WorkerInfo, me: WorkerInfo) -> str:
    if len(message.pages) % 4:
        return "page numbers that are none"
    pages = unpack(message.pages)
    needed = -(-tokens // me.page_size)
    if not 0 <= message.first_page < needed or message.first_page + len(pages) != needed:
        return f"{len(pages)} pages from page {message.first_page} on for {tokens} tokens"
    if not 0 <= min(pages) <= max(pages) < sender.pool.pages:
        return f"pages that its pool of {sender.pool.pages} does not have"
    if len(set(pages)) < len(pages):
        return "a page twice"
    return ""


def wrong_kv(message: KvReady, pages: int) -> str:
    """`pages`: how many the attempt was to fill."""
    sampled, moved = message.sampled, message.moved
    if any(id < 0 for id in sampled.ids) or (moved is None and len(sampled.ids) != 1):
        return f"token ids {sampled.ids}"
    if moved is not None and not (moved.computed >= 0 and moved.hops > 0):
        return f"{moved}"
    if message.checksums and len(message.checksums) != 4 * pages:
        return f"checksums of {len(message.checksums) // 4} pages instead of {pages}"
    return ""
