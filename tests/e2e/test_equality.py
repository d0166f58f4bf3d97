"""The spine with real processes and the real small model: in float32 every kind of service gives the tokens of
`transformers.generate`, in order, one by one; also to a hundred clients at once, to one that does not read for a while,
and beside clients that leave. What a client that has left was using is free again.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

PAGE_BYTES = 737_280
"""Of 16 tokens in all 30 layers of SmolLM2: keys and values of 3 heads of 64 in float32."""
COUNT = 20
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 127, 128, 129, 257)
"""Around pages of 16 and the 128 tokens of a step."""
TEXT = " ".join(
    f"Chapter {number}. On the {number * 3}th day the {who} of {where} wrote down what the {what} had cost, "
    f"{number * 17} coins in all, and asked why nobody in {where} had ever counted the {what} before."
    for number, (who, where, what) in enumerate(
        [
            ("miller", "Arden", "bridge"),
            ("teacher", "Bellmouth", "library"),
            ("pilot", "Corran", "lighthouse"),
            ("widow", "Dunmore", "orchard"),
            ("clerk", "Eastvale", "railway"),
            ("captain", "Fenwick", "harbour"),
            ("baker", "Greystone", "winter"),
            ("doctor", "Holm", "hospital"),
            ("painter", "Islay", "cathedral"),
            ("weaver", "Jura", "market"),
            ("smith", "Kilmore", "bell tower"),
            ("gardener", "Lorne", "canal"),
            ("sailor", "Mallaig", "ferry"),
            ("printer", "Nairn", "newspaper"),
            ("judge", "Oban", "prison"),
            ("farmer", "Perth", "harvest"),
        ],
        start=1,
    )
)

SETTINGS = """
[model]
dtype = "float32"
max_len = {max_len}
[kv]
pages = {pages}
[scheduler]
max_batch = 24
token_budget = 128
[policy]
mode = "{mode}"
[transfer]
kind = "{kind}"
[debug]
invariants = true
"""
WORKERS = """
[[workers]]
role = "{role}"
count = {count}
threads = 1
"""


def settings(*workers: tuple[str, int], kind: str = "shm", pages: int = 360, max_len: int = 1100) -> str:
    mode = "aggregate" if workers == (("any", 1),) else "disaggregate"
    groups = (WORKERS.format(role=role, count=count) for role, count in workers)
    return SETTINGS.format(kind=kind, mode=mode, pages=pages, max_len=max_len) + "".join(groups)


SMALL_POOL = 24
SERVICES = {
    "1p1d-shm": settings(("prefill", 1), ("decode", 1)),
    "1p1d-zmq": settings(("prefill", 1), ("decode", 1), kind="zmq", pages=180),
    "2p2d": settings(("prefill", 2), ("decode", 2), pages=140),
    "one": settings(("any", 1), pages=180),
    "small-pools": settings(("prefill", 1), ("decode", 1), pages=SMALL_POOL, max_len=16 * SMALL_POOL),
}


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[str]:
    """Of the service that the test's parameter names; pytest groups the tests so that each starts once."""
    config = tmp_path_factory.mktemp("config") / f"{request.param}.toml"
    config.write_text(SERVICES[request.param])
    with serving(config) as url:
        yield url


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("url", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def text_ids(small_model: Any) -> list[int]:
    ids: list[int] = small_model.tokenizer.encode(TEXT)
    return ids


@pytest.fixture(scope="module")
def prompts(text_ids: list[int]) -> list[list[int]]:
    """Pieces of the text, of all lengths, from different places."""
    return [text_ids[7 * n : 7 * n + length] for n, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def id_of(small_model: Any) -> dict[str, int]:
    names: dict[str, int] = small_model.id_of
    return names


def ids_in(choice: dict[str, Any], id_of: dict[str, int]) -> list[int]:
    """A greedy token is listed by its name as the first, or only, alternative; a prompt's first token has no list."""
    return [id_of[next(iter(top))] if top else -1 for top in choice["logprobs"]["top_logprobs"]]


async def ask(service: Any, prompt: Sequence[int], count: int, id_of: dict[str, int]) -> list[int]:
    return [id async for choice in service.stream(prompt, count) for id in ids_in(choice, id_of)]


# ------------------------------------------------------------------------------------------------------ equality


@on(*SERVICES)
async def test_all_give_the_tokens_of_transformers(
    service: Any, small_model: Any, prompts: list[list[int]], id_of: dict[str, int], request: pytest.FixtureRequest
) -> None:
    before = await service.metrics()
    answers = await asyncio.gather(*(ask(service, prompt, COUNT, id_of) for prompt in prompts))
    cut = 0
    for prompt, ids in zip(prompts, answers, strict=True):
        expected = small_model.greedy(prompt, COUNT)
        assert ids[: expected.sure] == expected.ids[: expected.sure], f"prompt of {len(prompt)}"
        assert len(ids) == COUNT
        cut += ids != expected.ids
    assert cut <= 0.02 * len(prompts)

    after = await service.until_idle()
    name = request.node.callspec.params["url"]
    kind = "zmq" if name == "1p1d-zmq" else "shm"
    moved = after.total("kv_transfer_bytes_total", transport=kind) - before.total("kv_transfer_bytes_total")
    remote, earlier = (metrics.total("disagg_decision_total", route="remote") for metrics in (after, before))
    assert remote - earlier == (0 if name == "one" else len(prompts))
    assert moved == 0 if name == "one" else moved > PAGE_BYTES * sum(len(prompt) // 16 for prompt in prompts) / 2
    assert (after.total("num_preemptions_total") > 0) == (name == "small-pools")


@on("1p1d-shm")
async def test_a_cached_prefix_gives_the_same_tokens(
    service: Any, small_model: Any, text_ids: list[int], id_of: dict[str, int]
) -> None:
    """The second prompt goes on where the first one ended, beyond what the decode worker would compute itself."""
    first, second = text_ids[20:148], text_ids[20:320]
    for prompt in (first, second):
        before = await service.until_idle()
        assert await ask(service, prompt, COUNT, id_of) == small_model.greedy(prompt, COUNT).ids
    after = await service.until_idle()
    hits = after.total("prefix_cache_hits_total") - before.total("prefix_cache_hits_total")
    assert hits >= 2 * len(first)  # at both workers
    assert after.total("kv_transfer_bytes_total") > before.total("kv_transfer_bytes_total")


# ------------------------------------------------------------------------------------------------------- streams


@on("1p1d-shm", "one")
async def test_a_stream_is_a_chunk_for_each_token_in_order(
    service: Any, small_model: Any, prompts: list[list[int]], id_of: dict[str, int]
) -> None:
    prompt = prompts[5]
    chunks = [choice async for choice in service.stream(prompt, COUNT)]
    assert [ids_in(choice, id_of) for choice in chunks] == [[id] for id in small_model.greedy(prompt, COUNT).ids]
    assert [choice["finish_reason"] for choice in chunks] == [None] * (COUNT - 1) + ["length"]
    assert "".join(choice["text"] for choice in chunks) == "".join(
        token for choice in chunks for token in choice["logprobs"]["tokens"]
    )


@on("1p1d-shm")
async def test_a_hundred_at_once(
    service: Any, small_model: Any, prompts: list[list[int]], id_of: dict[str, int]
) -> None:
    """More than the batch holds: each gets its own answer, of its own length."""
    asked = [(prompts[n % 6], 1 + n % 13) for n in range(100)]
    answers = await asyncio.gather(*(ask(service, prompt, count, id_of) for prompt, count in asked))
    for (prompt, count), ids in zip(asked, answers, strict=True):
        assert ids == small_model.greedy(prompt, COUNT).ids[:count]


@on("1p1d-shm")
async def test_who_does_not_read_loses_nothing_and_stops_nobody(
    service: Any, small_model: Any, text_ids: list[int], prompts: list[list[int]], id_of: dict[str, int]
) -> None:
    """One client asks for more than a kernel buffers, and reads none of it until all is computed; others are served
    meanwhile. What it gets then is whole, with fewer events than tokens: they have waited for it.
    """
    prompt, choices = text_ids[20:320], 5
    expected = small_model.greedy(prompt, COUNT).ids
    reader, writer = await connect(service.url)
    scores = {"echo": True, "logprobs": 20, "prompt_logprobs": 20}  # kilobytes for each token of the prompt
    body = json.dumps(service.body(prompt, COUNT, n=choices, **scores)).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await service.until(lambda metrics: metrics.total("num_requests_running", role="decode") > 0)
    assert await ask(service, prompts[3], COUNT, id_of) == small_model.greedy(prompts[3], COUNT).ids
    await service.until_idle()

    events = [line[6:] for line in (await reader.read(-1)).splitlines() if line.startswith(b"data: ")]
    writer.close()
    assert events.pop() == b"[DONE]"
    got: list[list[list[int]]] = [[] for _ in range(choices)]
    for event in events:
        for choice in json.loads(event)["choices"]:
            got[choice["index"]].append(ids_in(choice, id_of))
    for pieces in got:
        assert len(pieces[0]) == len(prompt)
        assert [id for piece in pieces[1:] for id in piece] == expected
    assert len(events) < choices * (1 + COUNT), "everything went out at once: this client was not slow"


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that takes a few kilobytes and no more until it is read."""
    host, port = url.removeprefix("http://").split(":")
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    small.setblocking(False)
    await asyncio.get_running_loop().sock_connect(small, (host, int(port)))
    return await asyncio.open_connection(sock=small, limit=1024)


# ------------------------------------------------------------------------------------------------ clients that leave


@on("1p1d-shm", "one")
async def test_who_leaves_while_it_is_decoded_leaves_nothing(service: Any, prompts: list[list[int]]) -> None:
    before = await service.metrics()
    async with aclosing(service.stream(prompts[5], 1000)) as stream:
        for _ in range(3):
            await anext(stream)
    after = await service.until_idle()
    assert 2 <= after.total("generation_tokens_total") - before.total("generation_tokens_total") < 900


@on("1p1d-shm", "one")
async def test_who_leaves_while_its_prompt_is_computed_leaves_nothing(
    service: Any, text_ids: list[int], id_of: dict[str, int], request: pytest.FixtureRequest
) -> None:
    """Between two workers: pages are reserved at one, and pushed by the other."""
    before = await service.metrics()
    prompt = (text_ids[11:] + text_ids)[:1000]
    asking = asyncio.create_task(ask(service, prompt, COUNT, id_of))
    role = "any" if request.node.callspec.params["url"] == "one" else "prefill"
    await service.until(lambda metrics: metrics.total("num_requests_running", role=role) == 1)
    asking.cancel()
    after = await service.until_idle()
    assert after.total("prompt_tokens_total") - before.total("prompt_tokens_total") < len(prompt)
    assert after.total("generation_tokens_total") == before.total("generation_tokens_total")


@on("small-pools")
async def test_who_leaves_the_queue_leaves_nothing(
    service: Any, small_model: Any, text_ids: list[int], id_of: dict[str, int]
) -> None:
    """One sequence fills most of the pool, so the next one waits; it leaves before its turn."""
    big = text_ids[5:305]
    first = asyncio.create_task(ask(service, big, 4 * COUNT, id_of))
    await service.until(lambda metrics: metrics.total("num_requests_running", role="decode") == 1)
    second = asyncio.create_task(ask(service, text_ids[50:200], COUNT, id_of))
    await service.until(lambda metrics: metrics.total("num_requests_waiting", role="decode") == 1)
    second.cancel()
    await service.until(lambda metrics: metrics.total("num_requests_waiting") == 0)
    assert not first.done(), "the first one should be longer: it has ended already"
    expected = small_model.greedy(big, 4 * COUNT)
    assert (await first)[: expected.sure] == expected.ids[: expected.sure]
