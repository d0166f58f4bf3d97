"""LLM and AsyncLLM over real processes and the real small model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from cbdisagg import LLM, AsyncLLM, SamplingParams
from cbdisagg.llm import ConfigError, RequestOutput, RequestRejected, ServiceFailed, StreamFailed

pytestmark = pytest.mark.e2e

SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "kv": {"memory_mb": 96}}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["The capital of France is", "Once upon a time", "def add(a, b):\n", "1, 2, 3, 4,"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", **SMALL) as llm:
        yield llm
        assert llm._engine.service.client.streams == 0, "no stream is left behind"


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in together] == PROMPTS
    assert "Paris" in together[0].outputs[0].text
    for output in together:
        [alone] = llm.generate(output.prompt_token_ids, GREEDY)
        assert (ids(alone), alone.prompt) == (ids(output), None)
        assert llm.tokenizer.decode(ids(output), skip_special=True) == output.outputs[0].text
        assert output.finished
    each = llm.generate(PROMPTS[:2], [GREEDY, SamplingParams(temperature=0, max_tokens=3)], use_tqdm=True)
    assert [len(ids(output)) for output in each] == [12, 3]
    assert "2/2" in capsys.readouterr().out


def test_more_prompts_than_may_wait(llm: LLM) -> None:
    outputs = llm.generate([[n % 100 + 50] * 4 for n in range(300)], SamplingParams(temperature=0, max_tokens=1))
    assert [output.prompt_token_ids[0] for output in outputs] == [n % 100 + 50 for n in range(300)]
    assert all(len(ids(output)) == 1 for output in outputs)


def test_chat_and_siblings(llm: LLM) -> None:
    chat = [{"role": "user", "content": "Name a colour."}]
    [one] = llm.chat(chat, GREEDY)
    assert one.prompt is not None and one.prompt.endswith("<|im_start|>assistant\n")
    [several] = llm.chat(chat, SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8))
    assert [sequence.index for sequence in several.outputs] == [0, 1, 2]
    assert len({sequence.text for sequence in several.outputs}) > 1
    [again] = llm.chat(chat, SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8))
    assert [s.token_ids for s in again.outputs] == [s.token_ids for s in several.outputs]
    [continued] = llm.chat(
        [*chat, {"role": "assistant", "content": "My colour is\n"}],
        GREEDY,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert continued.prompt is not None and continued.prompt.endswith("My colour is\n")


def test_stop_strings_and_scores(llm: LLM) -> None:
    [whole] = llm.generate(PROMPTS[1], GREEDY)
    text = whole.outputs[0].text
    stop = text[5:8]
    [cut] = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=12, stop=stop, logprobs=2))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert cut.outputs[0].logprobs is not None
    for id, entry in zip(ids(cut), cut.outputs[0].logprobs, strict=True):
        assert entry[id].rank == 1
    [scored] = llm.generate(PROMPTS[1], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert scored.prompt_logprobs is not None
    assert [entry is None for entry in scored.prompt_logprobs] == [True] + [False] * (len(scored.prompt_token_ids) - 1)


def test_what_cannot_be_done_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="maximum context length is 512"):
        llm.generate(["fine", [1] * 512], GREEDY)
    with pytest.raises(ValueError, match="token id 49152; this model has ids 0 to 49151"):
        llm.generate([[49152]], GREEDY)
    with pytest.raises(ValueError, match="is empty"):
        llm.generate("", GREEDY)
    with pytest.raises(ValueError, match="n is 99; at most 16"):
        llm.generate("x", SamplingParams(n=99))


def test_a_target_that_nobody_could_keep_is_an_error_and_no_endless_wait() -> None:
    policy, targets = {"admission": "early-reject"}, {"ttft_ms": 1}
    with (
        LLM("smollm2", **SMALL, policy=policy, targets=targets, workers=[{"role": "any"}]) as hurried,
        pytest.raises(RequestRejected, match="even if nobody else were served"),
    ):
        hurried.generate(PROMPTS[0], GREEDY)


def test_several_threads_may_ask_at_once(llm: LLM) -> None:
    expected = [ids(output) for output in llm.generate(PROMPTS, GREEDY)]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        found = list(threads.map(lambda prompt: ids(llm.generate(prompt, GREEDY)[0]), PROMPTS))
    assert found == expected


def test_a_stream_survives_its_worker(llm: LLM) -> None:
    """The decode worker is killed while it writes: the same tokens come, and none of them twice."""
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=60, ignore_eos=True)
    [calm] = llm.generate(PROMPTS[1], params)
    engine = llm._engine
    killed = []

    def kill(request: Any) -> None:
        if request.sequences[0].stream.received >= 10 and not killed:
            killed.extend(child for child in children(engine.service._supervisor) if "decode" in command(child))
            for child in killed:
                child.kill()

    output = engine.service.run(engine.generate(engine.job(PROMPTS[1], params), kill)).result(120)
    assert len(killed) == 1
    assert ids(output) == ids(calm)
    assert engine.service.client.resumed["worker"] == 1


async def test_streams_are_cumulative_and_can_be_left_or_aborted() -> None:
    async with AsyncLLM("smollm2", workers=[{"role": "any", "threads": 1}], **SMALL) as llm:
        seen: list[RequestOutput] = [output async for output in llm.generate(PROMPTS[1], GREEDY)]
        assert len(seen) > 1
        for before, after in pairwise(seen):
            assert after.outputs[0].text.startswith(before.outputs[0].text)
            assert ids(after)[: len(ids(before))] == ids(before)
        assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]

        endless = SamplingParams(max_tokens=400, ignore_eos=True)
        async for output in llm.generate(PROMPTS[0], endless, request_id="mine"):
            if not output.finished:
                with pytest.raises(ValueError, match="'mine' is in use"):
                    await anext(aiter(llm.generate("x", GREEDY, request_id="mine")))
                await llm.abort("mine")
        assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")

        left = llm.generate(PROMPTS[0], endless)
        await anext(aiter(left))
        await left.aclose()  # type: ignore[attr-defined]
        both = await asyncio.gather(*(last(llm.generate(prompt, GREEDY)) for prompt in PROMPTS[:2]))
        assert ids(both[1]) == ids(seen[-1])
        running = llm.generate(PROMPTS[0], endless)
        await anext(aiter(running))
    with pytest.raises(StreamFailed, match="has been closed"):
        await last(running)


async def last(stream: Any) -> RequestOutput:
    outputs: list[RequestOutput] = [output async for output in stream]
    return outputs[-1]


def test_a_start_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        LLM(tmp_path)
    with pytest.raises(ServiceFailed, match="context is 8192 tokens") as caught:
        LLM("smollm2", max_model_len=100_000)
    assert "\n" not in str(caught.value)


SCRIPT = textwrap.dedent(
    """
    import sys
    from cbdisagg import LLM, SamplingParams
    one = [{"role": "any", "threads": 1}]
    llm = LLM("smollm2", dtype="float32", max_model_len=256, kv={"memory_mb": 64}, workers=one)
    print(llm._engine.service._supervisor.pid, llm._engine.service._folder.path, flush=True)
    sys.stdin.readline()
    print(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].text)
    """
)


@pytest.mark.parametrize("way", ["end", "kill"])
def test_a_script_without_a_main_guard_leaves_nothing_behind(way: str, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as script:
        assert script.stdin is not None and script.stdout is not None
        pid, folder = script.stdout.readline().split()
        processes = [psutil.Process(int(pid)), *psutil.Process(int(pid)).children(recursive=True)]
        assert len(processes) >= 3
        if way == "kill":
            os.kill(script.pid, signal.SIGKILL)
        else:
            script.stdin.write("\n")
            script.stdin.flush()
            assert "Paris" in script.stdout.read()
        script.wait(60)
        _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
    if way == "end":  # what a killed process leaves of its own is swept at the next start
        assert not Path(folder).exists()


def children(supervisor: subprocess.Popen[str] | None) -> list[psutil.Process]:
    assert supervisor is not None
    return psutil.Process(supervisor.pid).children()


def command(process: psutil.Process) -> str:
    return " ".join(process.cmdline())
