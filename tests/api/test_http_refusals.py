"""Everything that a client can get wrong is a clear 4xx that names the field, and starts no work."""

from __future__ import annotations

import json

import pytest

from cbdisagg.api.fake import FakeClient
from cbdisagg.config import Config, Limits
from cbdisagg.messages import Finish

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDED = Finish("length")
LIMITS = Config(
    limits=Limits(n=4, prompts=3, logprobs=5, stop=2, stop_chars=8, stop_token_ids=2, logit_bias=2, body_mb=0.25)
)

COMPLETION_REFUSALS = [
    ({"max_tokens": -1}, "max_tokens", ">= 0"),
    ({"max_tokens": 1.5}, "max_tokens", "int"),
    ({"max_tokens": "ten"}, "max_tokens", '"ten"'),
    ({"max_tokens": True}, "max_tokens", "int"),
    ({"max_tokens": 10**30}, "max_tokens", "maximum context length"),
    ({"max_tokens": 2**31 - 1}, "max_tokens", "maximum context length"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "is 9, more than max_tokens"),
    ({"temperature": -1}, "temperature", ">= 0"),
    ({"temperature": 1e308}, "temperature", "<= 100"),
    ({"temperature": "1"}, "temperature", "float"),
    ({"top_p": 1.5}, "top_p", "<= 1"),
    ({"top_p": -0.1}, "top_p", ">= 0"),
    ({"top_k": -2}, "top_k", ">= -1"),
    ({"top_k": 1.5}, "top_k", "int"),
    ({"min_p": 2}, "min_p", "<= 1"),
    ({"presence_penalty": 2.1}, "presence_penalty", "<= 2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", ">= -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", ">= 0.01"),
    ({"seed": 2**64}, "seed", "18446744073709551616"),
    ({"seed": "x"}, "seed", "int"),
    ({"n": 0}, "n", ">= 1"),
    ({"n": 5}, "n", "at most 4"),
    ({"n": 10**40}, "n", "at most 4"),
    ({"best_of": 2}, "best_of", "n is 1"),
    ({"logprobs": 6}, "logprobs", "at most 5"),
    ({"logprobs": -1}, "logprobs", ">= 0"),
    ({"prompt_logprobs": 6}, "prompt_logprobs", "at most 5"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": ["a", ""]}, "stop", "empty"),
    ({"stop": ["a", "b", "c"]}, "stop", "at most 2"),
    ({"stop": "x" * 9}, "stop", "at most 8"),
    ({"stop": 5}, "stop", "str"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "holds token id -1, which is out of range"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids", "out of range"),
    ({"stop_token_ids": [2**63], "min_tokens": 2}, "stop_token_ids", "out of range"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids[0]", "int"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids[0]", "int"),
    ({"stop_token_ids": [None]}, "stop_token_ids[0]", "int"),
    ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids", "at most 2"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias", "out of range"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "out of range"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "int"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "<= 100"),
    ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias", "at most 2"),
    ({"cache_salt": ""}, "cache_salt", "length >= 1"),
    ({"cache_salt": "x" * 257}, "cache_salt", "length <= 256"),
    ({"cache_salt": ["x"]}, "cache_salt", "str"),
    ({"stream": "yes"}, "stream", "bool"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "bool"),
    ({"ttft_ms": 0}, "ttft_ms", "> 0"),
    ({"model": 5}, "model", "str"),
    ({"prompt": 7}, "prompt", "7"),
    ({"prompt": True}, "prompt", "bool"),
    ({"prompt": {"a": 1}}, "prompt", "object"),
    ({"prompt": None}, "prompt", "null"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "1 to 3"),
    ({"prompt": ["a", ""]}, "prompt", "empty"),
    ({"prompt": ["a"] * 4}, "prompt", "1 to 3"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": [-1]}, "prompt", "holds token id -1, which is out of range"),
    ({"prompt": [9, 2**64]}, "prompt", "18446744073709551616, which is out of range"),
    ({"prompt": [1.5]}, "prompt[0]", "float"),
    ({"prompt": ["a", 1]}, "prompt[1]", "token id among prompts"),
    ({"prompt": [[9], [-3]]}, "prompt[1]", "out of range"),
    ({"prompt": [[[9]]]}, "prompt[0][0]", "int"),
    ({"prompt": [{"a": 1}]}, "prompt[0]", "object"),
    ({"prompt": [9] * 64}, "prompt", "maximum context length"),
    ({"prompt": "sea" * 20_000}, "prompt", "maximum context length"),
    ({"prompt": "海" * 3000}, "prompt", "maximum context length"),
    ({"prompt": [9] * 60, "max_tokens": 5}, "max_tokens", "at most 4 fit"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"response_format": 5}, "response_format", "not supported"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "not supported"),
    ({"guided_json": {"type": "object"}}, "guided_json", "not supported"),
    ({"guided_regex": "*("}, "guided_regex", "not supported"),
    ({"grammar": "((("}, "grammar", "not supported"),
    ({"allowed_token_ids": [5]}, "allowed_token_ids", "not supported"),
    ({"bad_words": ["x"]}, "bad_words", "not supported"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
]

CHAT_REFUSALS = [
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": None}, "messages", "array"),
    ({"messages": "hi"}, "messages", "array"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "king"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "required"),
    ({"messages": [{"role": "user", "content": "sea" * 20_000}]}, "messages", "maximum context length"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "not supported",
    ),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", ">= 1"),
    ({"max_completion_tokens": 500}, "max_completion_tokens", "maximum context length"),
    ({"logprobs": 1}, "logprobs", "bool"),
    ({"top_logprobs": 1}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 6}, "top_logprobs", "at most 5"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"tools": "x"}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"functions": [{}]}, "functions", "not supported"),
    ({"chat_template": "{{ x }}"}, "chat_template", "not supported"),
]


def check(status: int, body: dict, param: str, says: str) -> None:
    error = body["error"]
    assert status == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.split("[")[0] in error["message"]
    assert says in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_refusals(serve, stream):
    http = await serve(FakeClient(), config=LIMITS, max_len=64)
    for fields, param, says in COMPLETION_REFUSALS:
        status, body = await http.post(COMPLETIONS, **{"prompt": "sea", "stream": stream, **fields})
        check(status, body, param, says)
    assert http.client.streams == []


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_refusals(serve, stream):
    http = await serve(FakeClient(), config=LIMITS, max_len=64)
    chat = {"messages": [{"role": "user", "content": "sea"}], "stream": stream}
    for fields, param, says in CHAT_REFUSALS:
        status, body = await http.post(CHAT, **{**chat, **fields})
        check(status, body, param, says)
    assert http.client.streams == []


async def test_a_context_overflow_has_its_code(serve):
    http = await serve(FakeClient(), config=LIMITS, max_len=64)
    for fields in ({"prompt": [9] * 64}, {"prompt": "sea", "max_tokens": 64}, {"prompt": "sea" * 20_000}):
        _, body = await http.post(COMPLETIONS, **fields)
        assert body["error"]["code"] == "context_length_exceeded"


async def test_the_servers_own_output_limit(serve):
    http = await serve(FakeClient(), config=Config(limits=Limits(max_output_tokens=7)))
    status, body = await http.post(COMPLETIONS, prompt="sea", max_tokens=8)
    check(status, body, "max_tokens", "at most 7")


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"])
async def test_numbers_that_json_does_not_have(serve, value):
    http = await serve(FakeClient())
    for name in (b"temperature", b"top_p", b"presence_penalty", b"min_p", b"repetition_penalty", b"seed"):
        status, body = await http.raw(COMPLETIONS, b'{"prompt": "sea", "%b": %b}' % (name, value))
        assert status == 400
        assert body["error"]["message"]


async def test_a_number_of_thousands_of_digits(serve):
    http = await serve(FakeClient())
    status, body = await http.raw(COMPLETIONS, b'{"prompt": "sea", "seed": %b}' % (b"9" * 5000))
    check(status, body, "seed", "out of range")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{x",
        b"[]",
        b"null",
        b'"hi"',
        b"12",
        b"true",
        b'{"prompt": "sea"',
        b'{"prompt": "sea"}}',
        b"{'prompt': 'sea'}",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00 sea"}',
        b'\xef\xbb\xbf{"prompt": "sea"}',
        '{"prompt": "sea"}'.encode("utf-16"),
    ],
)
async def test_bodies_that_are_no_json_object(serve, data):
    http = await serve(FakeClient())
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        status, body = await http.raw(path, data)
        assert status == 400
        assert body["error"]["message"]
    assert http.client.streams == []


@pytest.mark.parametrize("depth", [129, 900, 20_000, 60_000])
async def test_deep_nesting_is_refused_wherever_it_is(serve, depth):
    http = await serve(FakeClient())
    arrays, objects = b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth
    for inner in (arrays, objects, b"[" * depth):
        for path, data in (
            (COMPLETIONS, b'{"prompt": "sea", "x": %b}' % inner),
            (COMPLETIONS, b'{"prompt": %b}' % inner),
            (CHAT, b'{"messages": [], "tools": %b}' % inner),
            (CHAT, inner),
        ):
            status, body = await http.raw(path, data)
            assert (status, body["error"]["type"]) == (400, "invalid_request_error")


async def test_brackets_in_text_are_no_nesting(serve, tokenizer):
    http = await serve(FakeClient(lambda client, stream: client.give(stream, [9], ENDED)))
    text = '[{\\"' * 40
    status, _ = await http.raw(COMPLETIONS, b'{"prompt": "%b"}' % text.encode())
    assert status == 200


async def test_nul_does_not_cut_a_prompt(serve, tokenizer):
    http = await serve(FakeClient(lambda client, stream: client.give(stream, [9], ENDED)))
    _, cut = await http.post(COMPLETIONS, prompt="rain\0 by the sea", max_tokens=1)
    assert cut["usage"]["prompt_tokens"] == len(tokenizer.encode("rain\0 by the sea"))


async def test_bodies_too_large(serve):
    http = await serve(FakeClient(), config=LIMITS)
    data = json.dumps({"prompt": "x" * 300_000}).encode()
    status, body = await http.raw(COMPLETIONS, data)
    assert (status, body["error"]["code"]) == (413, "request_too_large")

    async def parts():
        for _ in range(5):
            yield data[:65_536]

    headers = {"Content-Type": "application/json"}  # in chunks: no Content-Length to see it by
    async with http.session.post(http.url + COMPLETIONS, data=parts(), headers=headers) as response:
        assert response.status == 413


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "application/octet-stream"])
async def test_other_media_types(serve, media):
    http = await serve(FakeClient())
    status, body = await http.raw(COMPLETIONS, b'{"prompt": "sea"}', **{"Content-Type": media})
    assert (status, body["error"]["code"]) == (415, "unsupported_media_type")


async def test_unknown_models_paths_and_methods(serve):
    http = await serve(FakeClient())
    for path, fields in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        for stream in (False, True):
            status, body = await http.post(path, model="none", stream=stream, **fields)
            assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert (await http.post("/v1/no/such/thing"))[0] == 404
    status, body = await http.post("/v1/responses", input="x")
    assert (status, body["error"]["code"]) == (400, "unsupported_endpoint")
    assert "Responses API" in body["error"]["message"]
    assert (await http.get(COMPLETIONS))[0] == 405
    assert (await http.post("/health"))[1]["error"]["message"].startswith("POST is not served")


async def test_unknown_fields_are_ignored_with_one_warning(serve, tokenizer, caplog):
    http = await serve(FakeClient(lambda client, stream: client.give(stream, [9], ENDED)))
    status, _ = await http.post(COMPLETIONS, prompt="x", surprise=1, **{"line\nbreak": [1]}, user="me", metadata={})
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert status == 200
    assert warnings == ["ignored 2 unknown field(s) of a CompletionRequest: surprise, line\\nbreak"]
