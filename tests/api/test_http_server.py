"""The small endpoints and the edge: who may enter, what is logged, what /metrics and openapi.json say."""

from __future__ import annotations

import asyncio
import re

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from cbdisagg.api import openapi
from cbdisagg.api.errors import ErrorBody
from cbdisagg.api.fake import FakeClient
from cbdisagg.api.schemas_responses import ModelEntry, ModelList, Tokenized
from cbdisagg.api.server import HANDLERS
from cbdisagg.api.sse import EventStream
from cbdisagg.config import Config, Limits, Targets
from cbdisagg.messages import ERROR_BOUNDS, Address, Counters, Finish, Load, Stats

PATH = "/v1/completions"


def ending(client, stream):
    client.give(stream, [9, 10, 11], Finish("length", queue_s=0.5, prefill_s=0.25, decode_s=0.125))


def load(incarnation: int, running: int = 0, name: str = "d0", **counters) -> tuple[Address, str, Load]:
    state = Load(
        busy=True,
        running=running,
        waiting=2,
        reserved=0,
        queued_tokens=0,
        pages_total=100,
        pages_free=40,
        pages_cached=20,
        counters=Counters(**counters),
    )
    return Address(name, incarnation, "x"), "decode", state


async def scrape(http) -> dict[str, float]:
    """Every sample by its name and labels, after the checks that a scraper makes."""
    async with http.session.get(http.url + "/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await response.text()
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type != "unknown"
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name.removeprefix('cbdisagg:')}{{{labels}}}"
            assert sample.name.startswith("cbdisagg:")
            assert key not in samples
            assert family.type != "counter" or sample.name.endswith("_total")
            samples[key] = sample.value
    return samples


async def test_liveness_readiness_and_version(serve):
    http = await serve(FakeClient())
    assert await http.get("/health") == (200, {"status": "ok"})
    assert await http.get("/ready") == (200, {"status": "ready"})
    http.client.ready, http.client.not_ready_reason = False, "loading weights"
    async with http.session.get(http.url + "/ready") as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert "loading weights" in await response.text()
    assert (await http.get("/health"))[0] == 200
    _, body = await http.get("/version")
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", body["version"])


async def test_models(serve):
    http = await serve(FakeClient(), max_len=99)
    _, body = await http.get("/v1/models")
    listed = msgspec.convert(body, ModelList)
    assert listed.data == [ModelEntry(id="tiny", created=1_700_000_000, max_model_len=99)]
    _, one = await http.get("/v1/models/tiny")
    assert one == body["data"][0]
    status, error = await http.get("/v1/models/some/other")
    assert (status, error["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_and_detokenize(serve, tokenizer):
    http = await serve(FakeClient())
    text = "rain 你好 by the sea"
    _, body = await http.post("/tokenize", prompt=text, return_token_strs=True)
    tokens = msgspec.convert(body, Tokenized)
    assert tokens.tokens == tokenizer.encode(text)
    assert tokens.count == len(tokens.tokens) == len(tokens.token_strs)
    _, back = await http.post("/detokenize", tokens=tokens.tokens)
    assert back["prompt"] == text
    _, chat = await http.post("/tokenize", messages=[{"role": "user", "content": "rain"}])
    rendered = "<|im_start|>user\nrain<|im_end|>\n<|im_start|>assistant\n"
    assert chat["tokens"] == tokenizer.encode(rendered)
    _, long = await http.post("/tokenize", prompt=text * 500)  # longer than the context, and than what is done in place
    assert long["count"] == len(tokenizer.encode(text * 500))
    for path, fields in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": ["x"]}),
        ("/detokenize", {}),
    ):
        status, error = await http.post(path, **fields)
        assert (status, error["error"]["type"]) == (400, "invalid_request_error")


async def test_the_key_guards_everything_but_health_and_ready(serve):
    http = await serve(FakeClient(ending), api_key="s3cret")
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nowhere"):
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}, {"Authorization": "é"}):
            status, body = await http.get(path, **headers)
            assert (status, body["error"]["type"]) == (401, "authentication_error")
    assert (await http.get("/health"))[0] == 200
    assert (await http.get("/ready"))[0] == 200
    assert (await http.get("/v1/models", Authorization="Bearer s3cret"))[0] == 200
    status, _ = await http.raw(PATH, b"{x")
    assert status == 401
    status, _ = await http.raw(PATH, b'{"prompt": "x"}', Authorization="Bearer s3cret")
    assert status == 200


async def test_request_ids_are_echoed_and_drawn(serve):
    http = await serve(FakeClient(ending))
    for body, status in (({"prompt": "x"}, 200), ({"prompt": "x", "stream": True}, 200), ({}, 400)):
        headers = {"x-request-id": "mine-1"}
        async with http.session.post(http.url + PATH, json=body, headers=headers) as response:
            assert (response.status, response.headers["x-request-id"]) == (status, "mine-1")
    drawn = set()
    for given in ("", "has space", "x" * 200, "é"):
        async with http.session.get(http.url + "/nowhere", headers={"x-request-id": given}) as response:
            drawn.add(response.headers["x-request-id"])
    assert len(drawn) == 4
    assert all(re.fullmatch(r"req-[0-9a-f]{32}", id) for id in drawn)


async def test_one_line_in_the_log_for_each_request(serve, caplog, tokenizer):
    caplog.set_level("INFO", logger="cbdisagg.api.access")
    http = await serve(FakeClient(ending))
    await http.stream(PATH, prompt="rain")
    await http.get("/nowhere%0Afake")
    await http.post(PATH, prompt="rain", n=3)
    lines = [record.getMessage() for record in caplog.records if record.name == "cbdisagg.api.access"]
    prompt = len(tokenizer.encode("rain"))
    counts = f"status=200 prompt_tokens={prompt} output_tokens=3 ttft_ms="
    assert re.fullmatch(
        rf"request_id=req-\w+ method=POST path={PATH} {counts}[\d.]+ duration_ms=[\d.]+ sequences=1.0", lines[0]
    )
    assert "path=/nowhere\\nfake status=404 prompt_tokens=0" in lines[1] and lines[1].endswith("sequences=-")
    assert lines[2].endswith("sequences=1.1-3")


async def test_large_headers_are_refused_by_status(serve, caplog):
    http = await serve(FakeClient(), config=Config(limits=Limits(header_kb=8)))
    async with http.session.get(http.url + "/health", headers={"x-big": "a" * 7000}) as response:
        assert response.status == 200
    async with http.session.get(http.url + "/health", headers={"x-big": "a" * 9000}) as response:
        assert response.status == 400
    async with http.session.get(http.url + "/" + "a" * 9000) as response:
        assert response.status in (400, 414)
    own = [record for record in caplog.records if record.name == "cbdisagg.api.http"]
    assert len(own) == 2
    assert all(record.levelname == "WARNING" and record.exc_info is None for record in own)
    assert all(len(record.getMessage()) < 200 for record in own)


async def test_a_client_that_left_while_it_was_written_to_is_one_line(serve, monkeypatch, caplog):
    """Whoever goes at that moment is no error of ours: 40 tracebacks in a soak of 20,000 requests were."""

    async def gone(*_: object) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    caplog.set_level("INFO")
    http = await serve(FakeClient(ending))
    monkeypatch.setattr(EventStream, "send", gone)
    async with http.session.post(http.url + PATH, json={"prompt": "rain", "stream": True}) as response:
        await response.read()
    assert [record.exc_info for record in caplog.records if record.exc_info] == []
    (line,) = (record.getMessage() for record in caplog.records if record.name == "cbdisagg.api.access")
    assert "status=499" in line


async def test_metrics_of_sequences(serve, tokenizer):
    targets = Config(targets=Targets(ttft_ms=60_000, tpot_ms=60_000))
    http = await serve(FakeClient(ending), config=targets)
    before = await scrape(http)
    assert before["request_success_total{finished_reason=length}"] == 0
    assert before["slo_attainment{target=both}"] == 1
    await http.post(PATH, prompt="rain", n=2)
    await http.stream(PATH, prompt="rain")
    await http.post(PATH, prompt="rain", tpot_ms=1e-9, ttft_ms=1e-9)  # cannot be met
    await http.post(PATH, n=0)
    after = await scrape(http)
    assert all(
        after[name] >= value for name, value in before.items() if re.search(r"_(total|bucket|sum|count)\{", name)
    )
    assert after["request_success_total{finished_reason=length}"] == 4
    assert after["time_to_first_token_seconds_count{}"] == 4
    assert after["e2e_request_latency_seconds_count{}"] == 4
    assert after["request_queue_time_seconds_sum{}"] == 4 * 0.5
    assert after["request_prefill_time_seconds_sum{}"] == 4 * 0.25
    assert after["request_decode_time_seconds_sum{}"] == 4 * 0.125
    assert after["request_generation_tokens_sum{}"] == 4 * 3
    assert after["request_prompt_tokens_sum{}"] == 4 * len(tokenizer.encode("rain"))
    assert after["slo_attainment{target=both}"] == 0.75
    assert after["goodput_requests_per_second{}"] == 3 / 60
    assert after[f"http_requests_total{{path={PATH},status=200}}"] == 3
    assert after[f"http_requests_total{{path={PATH},status=400}}"] == 1
    assert after["inter_token_latency_seconds_bucket{le=+Inf}"] == after["inter_token_latency_seconds_count{}"]


async def test_worker_counters_never_fall_across_restarts(serve):
    http = await serve(FakeClient(ending))
    decisions = (("local", "short", 4), ("remote", "faster", 2))
    http.client.stats = Stats(
        (load(1, running=3, generated_tokens=10, prompt_tokens=7, transfer_bytes={"shm": 100}, transfers={"shm": 2}),),
        decisions,
        {"d0": 0},
        True,
        "",
    )
    first = await scrape(http)
    assert first["num_requests_running{role=decode,worker=d0}"] == 3
    assert first["num_requests_waiting{role=decode,worker=d0}"] == 2
    assert first["kv_cache_usage_perc{worker=d0}"] == 0.4
    assert first["generation_tokens_total{}"] == 10
    assert first["kv_transfer_bytes_total{transport=shm}"] == 100
    assert first["kv_transfer_seconds_count{transport=shm}"] == 2
    assert first["disagg_decision_total{reason=short,route=local}"] == 4
    # a new incarnation counts from zero, and so does a new coordinator
    http.client.stats = Stats((load(2, generated_tokens=1),), (("local", "short", 1),), {"d0": 1}, True, "")
    await http.post(PATH, prompt="x")  # seen at the end of any request
    http.client.stats = Stats((load(3, generated_tokens=5),), (("local", "short", 2),), {"d0": 2}, True, "")
    http.client.resumed["worker"] = 3
    second = await scrape(http)
    assert second["num_requests_running{role=decode,worker=d0}"] == 0
    assert second["generation_tokens_total{}"] == 10 + 1 + 5
    assert second["prompt_tokens_total{}"] == 7
    assert second["kv_transfer_bytes_total{transport=shm}"] == 100
    assert second["disagg_decision_total{reason=short,route=local}"] == 4 + 2
    assert second["disagg_decision_total{reason=faster,route=remote}"] == 2
    assert second["worker_restarts_total{worker=d0}"] == 2
    assert second["request_resumed_total{cause=worker}"] == 3
    assert second["kv_page_leaks_total{}"] == 0
    third = await scrape(http)
    assert {name: value for name, value in third.items() if "http_requests" not in name} == {
        name: value for name, value in second.items() if "http_requests" not in name
    }


async def test_what_predictions_were_worth_is_told_of_all_workers(serve):
    """How far steps were off, and how often a prompt was not computed where it was routed to."""
    http = await serve(FakeClient(ending))
    none = (0,) * len(ERROR_BOUNDS)
    http.client.stats = Stats(
        (
            load(1, step_errors=(3, 2, *none[1:]), step_error_sum=0.05, local_prefills={"cached": 2}),
            load(2, name="d1", step_errors=(*none, 4), step_error_sum=8.0, local_prefills={"cached": 1}),
        ),
        (),
        {},
        True,
        "",
    )
    seen = await scrape(http)
    name = "step_model_error_ratio"
    assert [seen[f"{name}_bucket{{le={bound}}}"] for bound in (0.01, 0.02, 1.0, "+Inf")] == [3, 5, 5, 9]
    assert (seen[f"{name}_count{{}}"], seen[f"{name}_sum{{}}"]) == (9, 8.05)
    assert seen["local_prefills_total{reason=cached}"] == 3


async def test_openapi_is_what_is_served(serve):
    http = await serve(FakeClient())
    _, document = await http.get("/openapi.json")
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    served = {
        (route.method, re.sub(r"\{id:.*", "{id}", route.resource.canonical))
        for route in http.app.router.routes()
        if route.method != "HEAD"
    }
    assert described == served
    assert set(HANDLERS) == set(openapi.ENDPOINTS)
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "max_tokens", "logprobs", "stream_options"} <= set(fields)
    references = set(re.findall(r"#/components/schemas/(\w+)", msgspec.json.encode(document).decode()))
    assert references <= set(document["components"]["schemas"])
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if operation.get("requestBody", {}).get("required"):  # every refusal has the described shape
                status, body = await getattr(http, method)(path)
                assert str(status) in operation["responses"]
                msgspec.convert(body, ErrorBody, strict=True)


async def test_shutdown_breaks_what_runs_and_cancels_it(serve):
    http = await serve(FakeClient(lambda client, stream: client.give(stream, [9])))
    async with http.session.post(http.url + PATH, json={"prompt": "x", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        await http.runner.cleanup()
        await http.until(lambda: http.client.cancels)
        assert http.client.cancels == [(0, "disconnect")]


async def test_a_long_prompt_is_tokenised_beside_the_loop(serve, tokenizer, monkeypatch):
    """While a long text waits for its thread, other requests are served."""
    http = await serve(FakeClient(ending), max_len=20_000)
    service = next(iter(http.app.values()))
    gate = asyncio.Event()
    loop, encode = asyncio.get_running_loop(), type(tokenizer).encode

    def slow(self, text, *, special=False):
        if len(text) > 4096:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return encode(self, text, special=special)

    monkeypatch.setattr(type(service.tokenizer), "encode", slow)
    long = asyncio.create_task(http.post(PATH, prompt="rain " * 1000))
    for _ in range(3):
        assert (await http.post(PATH, prompt="x"))[0] == 200
    assert not long.done()
    gate.set()
    assert (await long)[0] == 200
