"""The part of `cbdisagg bench gpu` that asks whole services: a pair of workers against one.

Knows configs and HTTP. With the device "cpu" the same services run on the CPU, which proves the script, not the GPU.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
from cbdisagg_bench.gpu_models import LLAMA_8B, TINY, write_folder
from cbdisagg_bench.gpu_rows import Row, Setting, at_most
from cbdisagg_bench.service import Service, running

PROMPT, ANSWER = 4096, 32
REPEAT = 8
TOLD_S = 5.0

SETTINGS = """
[model]
dtype = "{dtype}"
served_name = "bench"
max_len = {max_len}
{workers}
[kv]
memory_mb = {memory_mb}
prefix_cache = false
[scheduler]
max_batch = {max_batch}
token_budget = {budget}
[policy]
mode = "{mode}"
"""
GROUP = '[[workers]]\nrole = "{role}"\ncount = {count}\ndevice = "{device}"\nthreads = 1\n'


@dataclass(frozen=True, slots=True)
class Told:
    """What a client saw of one answer. Seconds."""

    text: str
    first_s: float
    gap_s: float


def config_text(
    setting: Setting, roles: dict[str, int], dtype: str, *, max_len: int, memory_mb: int, batch: int, budget: int
) -> str:
    """Of a service of random weights; `memory_mb` of each worker on a GPU."""
    groups = "".join(GROUP.format(role=role, count=count, device=setting.name) for role, count in roles.items())
    return SETTINGS.format(
        dtype=dtype,
        workers=groups,
        max_len=max_len,
        memory_mb=setting.size(memory_mb, 16),
        max_batch=batch,
        budget=budget,
        mode="disaggregate" if "decode" in roles else "aggregate",
    )


def pair(setting: Setting) -> Iterator[Row]:
    """1P1D against one worker: the same tokens, and what the hand-over of a long prompt costs."""
    part = "pair"
    shape, prompt = (TINY, 200) if setting.tiny else (LLAMA_8B, PROMPT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        write_folder(folder / "model", shape)
        roles = {"pair": {"prefill": 1, "decode": 1}, "single": {"any": 1}}
        for service, each in roles.items():
            longest = prompt + 64
            text = config_text(setting, each, "bfloat16", max_len=longest, memory_mb=2048, batch=16, budget=longest)
            (folder / f"{service}.toml").write_text(text)
        answers, ways = asyncio.run(_ask_both(folder, shape.vocab, prompt, setting.size(REPEAT, 2)))
    pairs, singles = answers["pair"], answers["single"]
    differing = sum(a.text != b.text for a, b in zip(pairs, singles, strict=True))
    yield at_most(part, f"answers of {ANSWER} tokens that differ, of {len(pairs)}", differing, "answers", 0)
    wanted = "shm" if setting.tiny else "cuda_ipc"
    yield Row(part, f"KV went by {', '.join(sorted(ways)) or 'nothing'}", len(ways), "ways", wanted, ways == {wanted})
    first = {name: statistics.median(each.first_s for each in told[2:] or told) for name, told in answers.items()}
    gap = statistics.median(each.gap_s for each in singles)
    yield Row(part, f"TTFT of {prompt} tokens, one worker", 1e3 * first["single"], "ms")
    yield Row(part, f"TTFT of {prompt} tokens, 1P1D", 1e3 * first["pair"], "ms")
    if gap <= 0:
        if setting.tiny:
            return  # its steps may all be done before the first token is on its way
        raise RuntimeError("answers came in one piece: there is no time of a decode step to compare with")
    yield Row(part, "decode step, as a client sees it", 1e3 * gap, "ms")
    exposed = first["pair"] - first["single"]
    yield at_most(part, "exposed hand-over, in decode steps", exposed / gap, "steps", 1.0)


async def _ask_both(folder: Path, vocab: int, prompt: int, repeat: int) -> tuple[dict[str, list[Told]], set[str]]:
    """Answers by service, which start together and are asked in turn; and the ways that the pair's KV took."""
    answers: dict[str, list[Told]] = {"pair": [], "single": []}
    random = np.random.default_rng(1)
    model = ("--model", str(folder / "model"))
    async with AsyncExitStack() as ending, aiohttp.ClientSession() as session:
        starts = (
            ending.enter_async_context(
                running(name, ("--config", str(folder / f"{name}.toml"), *model), folder / f"{name}.log")
            )
            for name in answers
        )
        services: dict[str, Service] = {}
        for name, started in zip(answers, await asyncio.gather(*starts, return_exceptions=True), strict=True):
            if isinstance(started, BaseException):
                raise started
            services[name] = started
        for _ in range(2 + repeat):
            ids = random.integers(0, vocab, prompt).tolist()
            for name, service in services.items():
                answers[name].append(await _ask(session, service, ids))
        ways = await _ways(session, services["pair"])
    return answers, ways


async def _ask(session: aiohttp.ClientSession, service: Service, ids: list[int]) -> Told:
    body = {"model": "bench", "prompt": ids, "max_tokens": ANSWER, "temperature": 0, "stream": True, "ignore_eos": True}
    began, text, times = time.perf_counter(), "", []
    async with session.post(f"{service.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - began)
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    return Told(text, times[0], (times[-1] - times[0]) / max(1, len(times) - 1))


async def _ways(session: aiohttp.ClientSession, service: Service) -> set[str]:
    """Transports that KV has gone through, as workers tell it: within a second or so."""
    ways: set[str] = set()
    deadline = time.monotonic() + TOLD_S
    while not ways and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        async with session.get(f"{service.url}/metrics") as response:
            text = await response.text()
        ways = set(re.findall(r'^cbdisagg:kv_transfer_bytes\S*transport="(\w+)"\S* [1-9]', text, re.MULTILINE))
    return ways
