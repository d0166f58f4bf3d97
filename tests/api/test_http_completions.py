"""Completions as clients read them: texts, counts, indices, stop strings, echo and log probabilities."""

from __future__ import annotations

import msgspec
import pytest

from cbdisagg.api.client import Stream
from cbdisagg.api.fake import FakeClient
from cbdisagg.api.schemas_responses import Completion, CompletionChunk
from cbdisagg.api.tokenizer import Tokenizer
from cbdisagg.messages import Finish, Logprobs, unpack

PATH = "/v1/completions"
STOP, LENGTH = Finish("stop"), Finish("length")


def saying(tokenizer: Tokenizer, text: str, finish: Finish = LENGTH, end: tuple[int, ...] = ()):
    """An answer of `text`, one token per update."""
    ids = [*tokenizer.encode(text), *end]

    def answer(client: FakeClient, stream: Stream) -> None:
        for number, id in enumerate(ids):
            client.give(stream, [id], finish if number == len(ids) - 1 else None)

    return answer


def scored(tokenizer: Tokenizer, ids: list[int], finish: Finish = LENGTH):
    """An answer of `ids` with two alternatives for every token, prompt included."""

    def score(id: int) -> Logprobs:
        return Logprobs(-0.0625 * (id + 1) / 8, (id, 5), (-0.0625 * (id + 1) / 8, -9.5))

    def answer(client: FakeClient, stream: Stream) -> None:
        prompt = unpack(stream.request.prompt)
        scores = [None, *(score(id) for id in prompt[1:])] if stream.request.sampling.prompt_logprobs >= 0 else ()
        for number, id in enumerate(ids):
            last = number == len(ids) - 1
            client.give(stream, [id], finish if last else None, [score(id)], scores if number == 0 else ())

    return answer


async def test_a_completion_has_text_counts_and_reason(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, " upon a time"), cached_tokens=1))
    status, body = await http.post(PATH, model="tiny", prompt="Once", max_tokens=50)
    whole = msgspec.convert(body, Completion)
    assert status == 200
    assert whole.choices[0].text == " upon a time"
    assert whole.choices[0].finish_reason == "length"
    prompt, output = len(tokenizer.encode("Once")), len(tokenizer.encode(" upon a time"))
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (prompt, output)
    assert whole.usage.total_tokens == prompt + output
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert isinstance(body["created"], int)


async def test_the_end_token_counts_but_never_shows(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, " rain", STOP, end=(2,))))
    for skip in (True, False):
        _, body = await http.post(PATH, prompt="the", max_tokens=50, skip_special_tokens=skip)
        assert body["choices"][0]["text"] == " rain"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["stop_reason"] is None
    assert body["usage"]["completion_tokens"] == len(tokenizer.encode(" rain")) + 1


async def test_a_stop_token_id_is_the_reason_and_shows_only_if_asked_for(serve, tokenizer):
    stop = tokenizer.encode(" sea")[-1]
    http = await serve(FakeClient(saying(tokenizer, " by the", STOP, end=(stop,))))
    for include, text in ((False, " by the"), (True, " by the" + tokenizer.token_text(stop))):
        _, body = await http.post(
            PATH, prompt="the", max_tokens=50, stop_token_ids=[stop], include_stop_str_in_output=include
        )
        assert body["choices"][0]["text"] == text
        assert body["choices"][0]["stop_reason"] == stop
    assert http.client.streams[0].request.sampling.end_ids == (2, stop)


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_text_wherever_tokens_divide(serve, tokenizer, include):
    text = "Once upon a time there was a small village by the sea"
    http = await serve(FakeClient(saying(tokenizer, text)))
    for start in range(4, 30):
        stop = text[start : start + 5]
        want = text[: text.index(stop) + (len(stop) if include else 0)]
        body = {"prompt": "x", "max_tokens": 90, "stop": [stop, "never"], "include_stop_str_in_output": include}
        _, whole = await http.post(PATH, **body)
        choice = whole["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (want, "stop", stop)
        events = await http.stream(PATH, **body)
        pieces = [event["choices"][0]["text"] for event in events]
        assert "".join(pieces) == want
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        assert len(pieces) == whole["usage"]["completion_tokens"]  # what is held back still has its chunk


async def test_a_stop_string_cancels_the_work(serve, tokenizer):
    def endless(client: FakeClient, stream: Stream) -> None:
        client.give(stream, tokenizer.encode(" rain sea and"))

    http = await serve(FakeClient(endless))
    _, body = await http.post(PATH, prompt="x", max_tokens=90, stop="sea")
    assert body["choices"][0]["text"] == " rain "
    assert http.client.cancels == [(0, "stop")]


async def test_min_tokens_pass_over_stop_strings(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, " rain rain rain rain")))
    first = len(tokenizer.encode(" rain"))
    _, body = await http.post(PATH, prompt="x", max_tokens=90, min_tokens=first + 1, stop=["rain"])
    assert body["choices"][0]["text"].startswith(" rain ")
    assert http.client.streams[0].request.sampling.min_tokens == first + 1


async def test_streamed_text_equals_the_whole_one_chunk_per_token(serve, tokenizer):
    text = " 你好 🎉 sea"
    http = await serve(FakeClient(saying(tokenizer, text)))
    events = await http.stream(PATH, prompt="x", max_tokens=90)
    chunks = [msgspec.convert(event, CompletionChunk) for event in events]
    assert len(chunks) == len(tokenizer.encode(text))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert all("\ufffd" not in chunk.choices[0].text for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all("usage" not in event for event in events)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_usage_comes_when_asked_for_and_once(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, " by the sea")))
    for options in (None, {}, {"include_usage": False}, {"continuous_usage_stats": True}):
        events = await http.stream(PATH, prompt="x", max_tokens=90, stream_options=options)
        assert all("usage" not in event and event["choices"] for event in events)
    events = await http.stream(PATH, prompt="x", max_tokens=90, stream_options={"include_usage": True})
    assert [event.get("usage") is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["choices"] == []
    _, whole = await http.post(PATH, prompt="x", max_tokens=90)
    assert events[-1]["usage"] == whole["usage"]
    every = {"include_usage": True, "continuous_usage_stats": True}
    events = await http.stream(PATH, prompt="x", max_tokens=90, stream_options=every)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [*range(1, len(events)), len(events) - 1]


async def test_choices_keep_the_order_of_prompts_and_siblings(serve, tokenizer):
    def answer(client: FakeClient, stream: Stream) -> None:
        prompt = tokenizer.decode(unpack(stream.request.prompt), skip_special=False)
        client.give(stream, tokenizer.encode(f"{prompt}{stream.request.sampling.choice}"), LENGTH)

    http = await serve(FakeClient(answer))
    _, body = await http.post(PATH, prompt=["rain", "sea"], n=2, best_of=2, max_tokens=20, seed=7, temperature=0.9)
    texts = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert texts == [(0, "rain0"), (1, "rain1"), (2, "sea0"), (3, "sea1")]
    prompts = len(tokenizer.encode("rain")) + len(tokenizer.encode("sea"))
    assert body["usage"]["prompt_tokens"] == prompts  # each prompt once
    groups = [stream.request.group for stream in http.client.streams]
    assert groups == [None, http.client.streams[0].id, None, http.client.streams[2].id]
    assert {stream.request.sampling.seed for stream in http.client.streams} == {7}
    events = await http.stream(PATH, prompt=["rain", "sea"], n=2, max_tokens=20)
    streamed = [""] * 4
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == ["rain0", "rain1", "sea0", "sea1"]


async def test_token_ids_are_taken_as_they_are(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, " rain")))
    _, one = await http.post(PATH, prompt=[10, 11, 12], max_tokens=5)
    _, two = await http.post(PATH, prompt=[[10, 11], [12]], max_tokens=5)
    assert [list(unpack(stream.request.prompt)) for stream in http.client.streams] == [[10, 11, 12], [10, 11], [12]]
    assert (one["usage"]["prompt_tokens"], two["usage"]["prompt_tokens"]) == (3, 3)


async def test_a_seed_is_drawn_when_none_is_given(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, " rain")))
    for seed in (None, None, 0, -5):
        await http.post(PATH, prompt="x", seed=seed)
    drawn = [stream.request.sampling.seed for stream in http.client.streams]
    assert drawn[0] != drawn[1]
    assert drawn[2] == 0
    assert all(0 <= seed < 2**63 for seed in drawn)


async def test_echo_gives_the_prompt_back_and_stop_strings_do_not_see_it(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, " a village")))
    for prompt in ("rain by the sea", tokenizer.encode("rain by the sea")):
        body = {"prompt": prompt, "max_tokens": 20, "echo": True, "stop": ["by the"]}
        _, whole = await http.post(PATH, **body)
        assert whole["choices"][0]["text"] == "rain by the sea a village"
        events = await http.stream(PATH, **body)
        assert "".join(event["choices"][0]["text"] for event in events) == "rain by the sea a village"


async def test_logprob_arrays_cover_the_prompt_and_the_answer(serve, tokenizer):
    ids = [*tokenizer.encode(" 你 sea"), 2]
    http = await serve(FakeClient(scored(tokenizer, ids, STOP)))
    prompt = "Once upon"
    body = {"prompt": prompt, "max_tokens": 90, "echo": True, "logprobs": 2}
    _, whole = await http.post(PATH, **body)
    choice = whole["choices"][0]
    arrays = choice["logprobs"]
    count = len(tokenizer.encode(prompt)) + len(ids)
    assert [len(arrays[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [count] * 4
    assert arrays["token_logprobs"][0] is None
    assert arrays["top_logprobs"][0] is None
    assert "".join(arrays["tokens"]) == choice["text"] == prompt + " 你 sea"
    assert arrays["tokens"][-1] == ""  # the end token has its entry, and no text
    assert "<|im_end|>" in arrays["top_logprobs"][-1]
    for own, top in zip(arrays["token_logprobs"][1:], arrays["top_logprobs"][1:], strict=True):
        assert own == max(top.values())
    for offset, token in zip(arrays["text_offset"], arrays["tokens"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    joined: dict[str, list] = {name: [] for name in arrays}
    for event in await http.stream(PATH, **body):
        for name in arrays:
            joined[name] += event["choices"][0]["logprobs"][name]
    assert joined == arrays


async def test_logprobs_zero_gives_only_the_token_itself(serve, tokenizer):
    http = await serve(FakeClient(scored(tokenizer, tokenizer.encode(" rain"))))
    _, body = await http.post(PATH, prompt="x", logprobs=0, max_tokens=9)
    assert all(len(top) == 1 for top in body["choices"][0]["logprobs"]["top_logprobs"])
    assert http.client.streams[0].request.sampling.logprobs == 0


async def test_logprobs_that_json_cannot_hold_become_the_floor(serve, tokenizer):
    def answer(client: FakeClient, stream: Stream) -> None:
        bad = (float("-inf"), float("nan"))
        client.give(stream, [9], LENGTH, [Logprobs(float("-inf"), (7, 8), bad)])

    http = await serve(FakeClient(answer))
    _, body = await http.post(PATH, prompt="x", logprobs=2)
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
    assert set(body["choices"][0]["logprobs"]["top_logprobs"][0].values()) == {-9999.0}


@pytest.mark.parametrize("logprobs", [None, 0, 1])
async def test_max_tokens_zero_scores_the_prompt_and_shows_no_token(serve, tokenizer, logprobs):
    http = await serve(FakeClient(scored(tokenizer, [9])))
    _, body = await http.post(PATH, prompt="by the sea", max_tokens=0, echo=True, logprobs=logprobs)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("by the sea", "length")
    assert body["usage"]["completion_tokens"] == 0
    assert http.client.streams[0].request.sampling.max_tokens == 1
    if logprobs is not None:
        assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]


async def test_prompt_logprobs_name_ids_and_ranks(serve, tokenizer):
    http = await serve(FakeClient(scored(tokenizer, [9])))
    _, body = await http.post(PATH, prompt=[20, 21, 5], prompt_logprobs=1, max_tokens=1)
    scores = body["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert scores[1] == {"21": {"logprob": -22 / 128, "rank": 1, "decoded_token": tokenizer.token_text(21)}}
    events = await http.stream(PATH, prompt=[20, 21, 5], prompt_logprobs=1, max_tokens=1)
    assert events[0]["choices"][0]["prompt_logprobs"] == scores
    assert all("prompt_logprobs" not in event["choices"][0] for event in events[1:])


async def test_max_tokens_absent_is_sixteen_or_what_fits(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, " rain")), max_len=20)
    await http.post(PATH, prompt=[9] * 2)
    await http.post(PATH, prompt=[9] * 15, max_tokens=None)
    assert [stream.request.sampling.max_tokens for stream in http.client.streams] == [16, 5]


async def test_every_sampling_field_reaches_the_workers(serve, tokenizer):
    http = await serve(FakeClient(saying(tokenizer, " rain")))
    fields = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence_penalty": -1.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.25,
        "min_tokens": 3,
        "max_tokens": 30,
        "seed": 11,
    }
    await http.post(
        PATH, prompt="x", logit_bias={"9": -100, "10": 1.5}, ignore_eos=True, cache_salt="a", ttft_ms=100, **fields
    )
    request = http.client.streams[0].request
    for name, value in fields.items():
        assert getattr(request.sampling, name) == value
    assert request.sampling.logit_bias == {9: -100.0, 10: 1.5}
    assert request.sampling.end_ids == ()
    assert http.client.salts == ["a"]
    assert (request.targets.ttft_s, request.targets.tpot_s) == (0.1, 0.05)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 9_999_999}, {"top_k": 0}),
        ({"top_k": 2**31}, {"top_k": 0}),
        ({"top_p": 0}, {"top_k": 1, "top_p": 1.0}),
        ({"top_p": 1}, {"top_p": 1.0}),
        ({"temperature": 1e-9}, {"temperature": 0.0}),
        ({"temperature": None, "top_p": None, "stop": None, "n": None}, {"temperature": 1.0, "top_p": 1.0}),
        ({"seed": -(2**63)}, {"seed": 0}),
    ],
)
async def test_edge_values_mean_what_users_expect(serve, tokenizer, asked, meant):
    http = await serve(FakeClient(saying(tokenizer, " rain")))
    status, _ = await http.post(PATH, prompt="x", **asked)
    assert status == 200
    sampling = http.client.streams[0].request.sampling
    assert {name: getattr(sampling, name) for name in meant} == meant
