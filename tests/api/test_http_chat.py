"""Chats as clients read them: the template's prompt, deltas, log probabilities with bytes."""

from __future__ import annotations

import msgspec

from cbdisagg.api.client import Stream
from cbdisagg.api.fake import FakeClient
from cbdisagg.api.schemas_responses import ChatChunk, ChatCompletion
from cbdisagg.messages import Finish, Logprobs, unpack

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "rain"}]


def saying(tokenizer, text, end=(2,)):
    ids = [*tokenizer.encode(text), *end]

    def answer(client: FakeClient, stream: Stream) -> None:
        for number, id in enumerate(ids):
            score = [Logprobs(-0.5, (id, 9), (-0.5, -1.5))] if stream.request.sampling.logprobs >= 0 else []
            finish = Finish("stop") if number == len(ids) - 1 else None
            scores = ()
            if number == 0 and stream.request.sampling.prompt_logprobs >= 0:
                count = len(unpack(stream.request.prompt))
                scores = (None, *[Logprobs(-0.25, (9,), (-0.25,))] * (count - 1))
            client.give(stream, [id], finish, score, scores)

    return answer


def prompt_of(http, tokenizer) -> str:
    return tokenizer.decode(unpack(http.client.streams[-1].request.prompt), skip_special=False)


async def test_a_chat_answer(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, "by the sea")))
    status, body = await http.post(PATH, model="tiny", messages=HELLO, max_completion_tokens=50)
    whole = msgspec.convert(body, ChatCompletion)
    assert status == 200
    assert whole.choices[0].message.content == "by the sea"
    assert whole.choices[0].finish_reason == "stop"
    assert prompt_of(http, tokenizer) == "<|im_start|>user\nrain<|im_end|>\n<|im_start|>assistant\n"
    assert whole.usage.completion_tokens == len(tokenizer.encode("by the sea")) + 1
    assert "prompt_logprobs" not in body or body["prompt_logprobs"] is None


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_an_empty_delta(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, "你好 sea")))
    events = await http.stream(PATH, messages=HELLO, stream_options={"include_usage": True})
    chunks = [msgspec.convert(event, ChatChunk) for event in events]
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant"
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == "你好 sea"
    assert events[-2]["choices"][0]["delta"] == {}
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    tokens = chunks[-1].usage.completion_tokens
    assert len(chunks) == 1 + tokens + 1 + 1  # the role, one for each token, the finish, the usage


async def test_siblings_each_have_a_role_and_an_end(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, "sea")))
    events = await http.stream(PATH, messages=HELLO, n=3)
    for index in range(3):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]


async def test_chat_logprobs_have_exact_bytes(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, "🎉 sea")))
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1}
    _, whole = await http.post(PATH, **body)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert spelled == "🎉 sea<|im_end|>".encode()
    assert all(len(entry["top_logprobs"]) == 1 for entry in entries)
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in entries)
    streamed = []
    for event in await http.stream(PATH, **body):
        streamed += (event["choices"][0]["logprobs"] or {"content": []})["content"]
    assert streamed == entries
    _, plain = await http.post(PATH, messages=HELLO, logprobs=True)
    assert all(entry["top_logprobs"] == [] for entry in plain["choices"][0]["logprobs"]["content"])


async def test_prompt_logprobs_stand_beside_the_choices(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, "sea")))
    _, whole = await http.post(PATH, messages=HELLO, prompt_logprobs=0)
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert whole["prompt_logprobs"][0] is None
    events = await http.stream(PATH, messages=HELLO, prompt_logprobs=0)
    assert events[0]["prompt_logprobs"] == whole["prompt_logprobs"]


async def test_content_parts_and_the_developer_role(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, "sea")))
    parts = [{"type": "text", "text": "rain"}, {"type": "text", "text": "sea"}]
    messages = [{"role": "developer", "content": "home"}, {"role": "user", "content": parts, "name": None}]
    status, _ = await http.post(PATH, messages=messages)
    assert status == 200
    start = "<|im_start|>system\nhome<|im_end|>\n<|im_start|>user\nrain\nsea<|im_end|>\n"
    assert prompt_of(http, tokenizer).startswith(start)


async def test_a_final_message_is_continued_with_its_white_space(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, "sea")))
    for tail in ("OK!", "OK! ", "OK!\n", "OK!\t\n "):
        messages = [*HELLO, {"role": "assistant", "content": tail}]
        status, _ = await http.post(PATH, messages=messages, continue_final_message=True)
        assert status == 200
        assert prompt_of(http, tokenizer).endswith(f"<|im_start|>assistant\n{tail}")
    status, body = await http.post(PATH, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert (status, body["error"]["param"]) == (400, "continue_final_message")


async def test_the_generation_prompt_can_be_left_out(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, "sea")))
    await http.post(PATH, messages=HELLO, add_generation_prompt=False)
    assert prompt_of(http, tokenizer) == "<|im_start|>user\nrain<|im_end|>\n"


async def test_max_tokens_absent_goes_to_the_end_of_the_context(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, "sea")), max_len=100)
    await http.post(PATH, messages=HELLO)
    await http.post(PATH, messages=HELLO, max_tokens=7)
    await http.post(PATH, messages=HELLO, max_tokens=7, max_completion_tokens=8)
    prompt = len(unpack(http.client.streams[0].request.prompt))
    assert [stream.request.sampling.max_tokens for stream in http.client.streams] == [100 - prompt, 7, 8]


async def test_response_format_text_and_no_tools_ask_for_nothing(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, "sea")))
    plain = {"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "functions": None}
    status, _ = await http.post(PATH, messages=HELLO, **plain)
    assert status == 200
