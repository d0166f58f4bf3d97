"""The Python API without processes: parameters, outputs and how a request grows."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from cbdisagg import SamplingParams
from cbdisagg.api.client import Stream, StreamFailed
from cbdisagg.api.tokenizer import Tokenizer
from cbdisagg.config import Config, ConfigError, Kv, Workers
from cbdisagg.llm import _batch, _Latest, _params
from cbdisagg.llm_engine import settings
from cbdisagg.llm_outputs import Logprob, Request
from cbdisagg.messages import Finish, Generate, Logprobs, RequestId, Sampling, Targets, TokenRun, pack

LETTERS = "abcdefghij"
END = 10


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("letters")
    library = Library(models.BPE({letter: n for n, letter in enumerate(LETTERS)}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    library.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {END}}}')
    return Tokenizer(folder)


# --------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("n", 0, "n is 0; it must be at least 1"),
        ("n", 1.5, "n is 1.5; it must be a whole number"),
        ("temperature", -1, "temperature is -1; it must be at least 0, which is greedy"),
        ("temperature", float("nan"), "temperature is nan"),
        ("temperature", float("inf"), "temperature is inf"),
        ("temperature", "hot", "temperature is 'hot'; it must be a number"),
        ("temperature", True, "temperature is True"),
        ("top_p", 0, "top_p is 0; it must be above 0 and at most 1"),
        ("top_p", 1.1, "top_p is 1.1"),
        ("top_k", -2, "top_k is -2; it must be at least 1, or 0 for no limit"),
        ("min_p", 2, "min_p is 2; it must be between 0 and 1"),
        ("presence_penalty", 3, "presence_penalty is 3; it must be between -2 and 2"),
        ("frequency_penalty", -3, "frequency_penalty is -3"),
        ("repetition_penalty", 0, "repetition_penalty is 0; it must be above 0; 1 is none"),
        ("max_tokens", 0, "max_tokens is 0; it must be at least 1"),
        ("min_tokens", 17, "min_tokens is 17, more than max_tokens, which is 16"),
        ("logprobs", -1, "logprobs is -1; it must be at least 0"),
        ("prompt_logprobs", "2", "prompt_logprobs is '2'; it must be a whole number"),
        ("seed", 1.0, "seed is 1.0; it must be a whole number"),
        ("stop", "", "stop has an empty string"),
        ("stop", [3], "stop has 3; it must be a string or several"),
        ("stop_token_ids", [-1], "a token id in stop_token_ids is -1"),
        ("logit_bias", {3: 101}, r"logit_bias\[3\] is 101; it must be between -100 and 100"),
        ("ignore_eos", 1, "ignore_eos is 1; it must be True or False"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(field: str, value: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        SamplingParams(**{field: value})


def test_what_the_workers_are_told() -> None:
    plain = SamplingParams(temperature=0, seed=5).sampling(3, 100, 50, (END,))
    assert plain == Sampling(max_tokens=16, temperature=0.0, seed=5, end_ids=(END,))
    full = SamplingParams(
        temperature=1e-6,
        top_k=-1,
        top_p=0.5,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.2,
        seed=-1,
        stop_token_ids=iter([3, END]),
        ignore_eos=True,
        max_tokens=None,
        min_tokens=200,
        logprobs=0,
        prompt_logprobs=2,
        logit_bias={7: 1},
    )
    for _ in range(2):  # an iterator given once serves every request
        assert full.sampling(3, 100, 50, (END,)) == Sampling(
            max_tokens=97,
            min_tokens=97,
            temperature=0.0,
            top_p=0.5,
            min_p=0.1,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            repetition_penalty=1.2,
            logit_bias={7: 1.0},
            end_ids=(3, END),
            seed=2**63 - 1,
            logprobs=0,
            prompt_logprobs=2,
        )
    assert SamplingParams(top_k=50).sampling(1, 9, 50, ()).top_k == 0, "all of the vocabulary is no filter"
    seeds = {SamplingParams().sampling(1, 9, 50, ()).seed for _ in range(4)}
    assert len(seeds) == 4, "without a seed every request draws its own"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(stop_token_ids=[50]), "stop_token_ids has the token id 50; this model has ids 0 to 49"),
        (SamplingParams(logit_bias={99: 1.0}), "logit_bias has the token id 99"),
    ],
)
def test_what_the_model_cannot_do_is_refused(params: SamplingParams, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        params.sampling(3, 100, 50, ())


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    assert SamplingParams().sampling(99, 100, 50, ()).max_tokens == 1
    with pytest.raises(ValueError, match="the prompt has 100 tokens; the maximum context length is 100"):
        SamplingParams().sampling(100, 100, 50, ())


# ------------------------------------------------------------------------------------------------------ outputs


class Given:
    """A request whose tokens the test gives."""

    def __init__(self, tokenizer: Tokenizer, n: int = 1, **params: Any) -> None:
        self.cancelled: list[tuple[int, str]] = []
        self.changes = 0
        options = SamplingParams(n=n, **params)
        sampling = options.sampling(2, 100, 11, tokenizer.end_ids)
        self.streams = []
        for k in range(n):
            spec = Generate(RequestId(1, k), 0, pack([0, 1]), b"", b"", b"", sampling, Targets(1, 1), 0.0)
            self.streams.append(Stream(spec, 0.0, lambda stream, reason: self.cancelled.append((stream.id.n, reason))))
        self.request = Request("r", "ab", [0, 1], options, tokenizer, self.streams, self._changed)

    def _changed(self, request: Request) -> None:
        self.changes += 1

    def give(self, text: str, k: int = 0, finish: Finish | None = None, **rest: Any) -> None:
        stream = self.streams[k]
        ids = tuple(END if letter == "." else LETTERS.index(letter) for letter in text)
        stream.take(TokenRun(stream.id, 0, stream.received, ids, finish=finish, **rest))

    async def follow(self) -> None:
        await asyncio.gather(*(self.request.follow(sequence) for sequence in self.request.sequences))


async def test_an_output_has_text_ids_and_scores(tokenizer: Tokenizer) -> None:
    g = Given(tokenizer, logprobs=2, prompt_logprobs=0)
    scores = (None, Logprobs(-3.0))
    g.give("c", logprobs=(Logprobs(-1.0, (3, 2), (-0.5, -1.0)),), prompt_logprobs=scores, cached_tokens=1)
    g.give(".", finish=Finish("stop"), logprobs=(Logprobs(-2.0, (3, 4), (-0.1, -0.2)),))
    await g.follow()
    output = g.request.output()
    [sequence] = output.outputs
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "ab", [0, 1])
    assert (output.finished, output.num_cached_tokens) == (True, 1)
    assert output.prompt_logprobs == [None, {1: Logprob(-3.0, None, "b")}]
    assert (sequence.text, sequence.token_ids, sequence.finish_reason) == ("c", [2, END], "stop")
    assert (sequence.cumulative_logprob, sequence.stop_reason) == (-3.0, None)
    assert sequence.logprobs == [
        {3: Logprob(-0.5, 1, "d"), 2: Logprob(-1.0, 2, "c")},
        {3: Logprob(-0.1, 1, "d"), 4: Logprob(-0.2, 2, "e"), END: Logprob(-2.0, None, "<end>")},
    ]


async def test_without_scores_there_are_none(tokenizer: Tokenizer) -> None:
    g = Given(tokenizer)
    g.give("cd", finish=Finish("length"))
    await g.follow()
    [sequence] = g.request.output().outputs
    assert (sequence.logprobs, sequence.cumulative_logprob, g.request.output().prompt_logprobs) == (None, None, None)
    assert (sequence.text, sequence.finish_reason) == ("cd", "length")


@pytest.mark.parametrize(("include", "text"), [(False, "c"), (True, "cde")])
async def test_a_stop_string_ends_the_sequence_at_once(tokenizer: Tokenizer, include: bool, text: str) -> None:
    g = Given(tokenizer, stop=["x", "de"], include_stop_str_in_output=include)
    g.give("c")
    g.give("d")
    g.give("efgh")
    await g.follow()
    [sequence] = g.request.output().outputs
    assert (sequence.text, sequence.finish_reason, sequence.stop_reason) == (text, "stop", "de")
    assert sequence.token_ids == [2, 3, 4]
    assert g.cancelled == [(0, "stop")]


@pytest.mark.parametrize(("include", "text"), [(False, "c"), (True, "cd")])
async def test_a_stop_token_is_the_reason_and_hidden(tokenizer: Tokenizer, include: bool, text: str) -> None:
    g = Given(tokenizer, stop_token_ids=[3], include_stop_str_in_output=include)
    g.give("cd", finish=Finish("stop"))
    await g.follow()
    [sequence] = g.request.output().outputs
    assert (sequence.text, sequence.finish_reason, sequence.stop_reason) == (text, "stop", 3)


async def test_sequences_end_by_themselves_and_a_failure_is_raised(tokenizer: Tokenizer) -> None:
    g = Given(tokenizer, n=2)
    g.give("c", 0, Finish("length"))
    following = asyncio.create_task(g.follow())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [s.finish_reason for s in g.request.output().outputs] == ["length", None]
    assert not g.request.output().finished
    g.give("d", 1, Finish("error", "no pages"))
    with pytest.raises(StreamFailed, match="no pages"):
        await following


async def test_an_aborted_request_says_so(tokenizer: Tokenizer) -> None:
    g = Given(tokenizer)
    g.give("c")
    following = asyncio.create_task(g.request.follow(g.request.sequences[0]))
    await asyncio.sleep(0)
    g.request.abort()
    await following
    [sequence] = g.request.output().outputs
    assert (sequence.text, sequence.finish_reason) == ("c", "abort")
    assert g.cancelled == [(0, "disconnect")]


async def test_a_reader_that_leaves_cancels_its_streams(tokenizer: Tokenizer) -> None:
    g = Given(tokenizer)
    following = asyncio.create_task(g.request.follow(g.request.sequences[0]))
    await asyncio.sleep(0)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert g.cancelled == [(0, "disconnect")]


async def test_a_slow_reader_gets_the_newest_output_and_then_the_end() -> None:
    latest, future = _Latest(asyncio.get_running_loop()), Future[Any]()
    future.add_done_callback(latest.end_from_thread)

    def outputs(*values: Any) -> None:
        for value in values:
            latest.put_from_thread(type("R", (), {"output": lambda self, value=value: value})())

    await asyncio.to_thread(outputs, 1, 2, 3)
    assert await latest.get() == 3
    await asyncio.to_thread(outputs, 4)
    future.set_exception(StreamFailed("gone"))
    assert await latest.get() == 4
    with pytest.raises(StreamFailed, match="gone"):
        await latest.get()


# --------------------------------------------------------------------------------------------- prompts, settings


def test_what_is_one_prompt_and_what_are_several() -> None:
    assert _batch("text") == ["text"]
    assert _batch([1, 2]) == [[1, 2]]
    assert _batch({"prompt": "x"}) == [{"prompt": "x"}]
    assert _batch(["a", [1]]) == ["a", [1]]
    assert _batch([]) == []
    params = [SamplingParams(seed=n) for n in range(2)]
    assert _params(params, 2) == params
    assert _params(None, 2) == [SamplingParams()] * 2
    with pytest.raises(ValueError, match="2 entries for 3 prompts"):
        _params(params, 3)


def test_settings_come_from_a_config_a_file_and_keywords(tmp_path: Path) -> None:
    assert settings("smollm2", None, {}) == Config()
    base = Config(kv=Kv(memory_mb=64), workers=(Workers(role="any"),))
    assert settings(None, base, {}) == base
    keywords = {"kv": {"page_size": 32}, "dtype": "float32", "weights": "int8", "max_model_len": 256}
    changed = settings(tmp_path, base, keywords)
    assert (changed.model.path, changed.model.name) == (str(tmp_path), "")
    assert (changed.model.dtype, changed.model.weights, changed.model.max_len) == ("float32", "int8", 256)
    assert (changed.kv.page_size, changed.kv.memory_mb, changed.workers) == (32, 64, base.workers)
    file = tmp_path / "one.toml"
    file.write_text("[kv]\nmemory_mb = 99\n")
    one = settings("smollm2", file, {"workers": [{"role": "any", "count": 2}], "served_model_name": 'a"b'})
    assert (one.kv.memory_mb, one.workers, one.model.served_name) == (99, (Workers(role="any", count=2),), 'a"b')


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"kv": {"page_sise": 16}}, "keyword argument.*page_sise.*page_size"),
        ({"pages": 64}, r'pages = 64: give a section of the config with its keys, as kv={"pages": 256}'),
        ({"kv": {"page_size": "big"}}, "page_size"),
    ],
)
def test_a_wrong_keyword_is_named(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings("smollm2", None, keywords)
