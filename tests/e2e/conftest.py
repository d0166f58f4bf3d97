"""The real small model as transformers computes it, services that serve it with real processes, and their client."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

END_OF_START = "Stop with Ctrl-C."
NEARLY_EQUAL = 1e-4
"""Two logits that are closer than this may be told apart differently by sums in another order."""
PATIENCE_S = 150.0
REPORTED_S = 1.0
"""A worker's load is told within 0.05 s of a change, and the workers' loads within 0.2 s of that; and some patience."""


@dataclass(frozen=True)
class Reference:
    """What `generate` gives. Tokens before `sure` are beyond doubt; at `sure` the two best logits nearly tied."""

    ids: list[int]
    sure: int


@dataclass
class SmallModel:
    """SmolLM2 in float32. `tokenizer` is the api's own: its names of tokens are those of listed log probabilities."""

    folder: Path
    twin: Any
    tokenizer: Any
    known: dict[tuple[tuple[int, ...], int], Reference] = field(default_factory=dict)

    def greedy(self, prompt: Sequence[int], count: int) -> Reference:
        """Computed once for each (prompt, count), whatever the number of tests that ask."""
        import torch

        key = (tuple(prompt), count)
        if key not in self.known:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # services have the other cores, and threads that wait for each other burn them
            out = self.twin.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
            torch.set_num_threads(threads)
            best = torch.cat(out.logits).topk(2).values
            ties = (best[:, 0] - best[:, 1] < NEARLY_EQUAL).nonzero().flatten().tolist()
            self.known[key] = Reference(out.sequences[0, len(prompt) :].tolist(), ties[0] if ties else count)
        return self.known[key]

    @property
    def id_of(self) -> dict[str, int]:
        """Ids by the names under which log probabilities are listed; they are one to one."""
        from cbdisagg.api.logprobs import token_name

        names = {token_name(self.tokenizer, id): id for id in range(self.tokenizer.vocab_size)}
        assert len(names) == self.tokenizer.vocab_size
        return names


@pytest.fixture(scope="session")
def small_model() -> SmallModel:
    import torch
    from transformers import AutoModelForCausalLM

    from cbdisagg.api.tokenizer import Tokenizer
    from cbdisagg.config import Model
    from cbdisagg.prepare import prepare_model

    folder = prepare_model(Model(name="smollm2"), lambda stage, fraction: None)
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return SmallModel(folder, twin, Tokenizer(folder))


@dataclass(frozen=True)
class Metrics:
    """One scrape. Keys are as they are written: `name{label="value"}`."""

    values: dict[str, float]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of this name with these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for key, value in self.values.items()
            if key.partition("{")[0] == f"cbdisagg:{name}" and all(label in key for label in wanted)
        )

    @property
    def idle(self) -> bool:
        """Nobody runs or waits, and no page is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(self.total(name) for name in names)


class Service:
    """A running service, and a session with it. Prompts are ids; so are answers, by `id_of`."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    @staticmethod
    def body(prompt: Sequence[int], count: int, **fields: Any) -> dict[str, Any]:
        """A greedy stream that goes on to the last of `count` tokens, each told with its name."""
        plain = {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False, "logprobs": 0, "stream": True}
        return {"prompt": list(prompt), "max_tokens": count, **plain, **fields}

    async def stream(self, prompt: Sequence[int], count: int, **fields: Any) -> AsyncIterator[dict[str, Any]]:
        """The choices of each event of a request as `body` makes it. Closing it closes the connection."""
        async with self.session.post(f"{self.url}/v1/completions", json=self.body(prompt, count, **fields)) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        yield choice

    async def metrics(self) -> Metrics:
        async with self.session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return Metrics({key: float(value) for key, value in pairs})

    async def until(self, condition: Callable[[Metrics], bool]) -> Metrics:
        """The first scrape for which it holds; workers report a few times a second."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(metrics := await self.metrics()):  # noqa: ASYNC110  # another process changes it
                await asyncio.sleep(0.02)  # leaves the cores to the workers; nothing hangs on how long
        return metrics

    async def until_idle(self) -> Metrics:
        """Idle for longer than what workers tell takes to reach /metrics: a scrape may show the time before."""
        since: list[float] = []

        def settled(metrics: Metrics) -> bool:
            if not metrics.idle:
                since.clear()
                return False
            since.append(time.monotonic())
            return since[-1] - since[0] > REPORTED_S

        metrics = await self.until(settled)
        assert metrics.total("kv_page_leaks_total") == 0
        return metrics


@contextmanager
def running(config: Path) -> Iterator[str]:
    """The URL of a service with this config, on a port of its own; it ends in order."""
    command = [sys.executable, "-m", "cbdisagg", "serve", "--config", str(config), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith(END_OF_START):
                    break
            assert lines, "it ended before it was ready"
            yield lines[0].split(" at ")[1].split("/v1")[0]
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


@pytest.fixture(scope="session")
def serving() -> Callable[[Path], Any]:
    """serving(config): see `running`."""
    return running


@pytest.fixture
async def service(url: str) -> AsyncIterator[Service]:
    """The service at the test's `url`; nothing runs there before the test nor after it."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        service = Service(url, session)
        await service.until_idle()
        yield service
        await service.until_idle()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, 400 byte pairs, a chat template: a model folder in all respects."""
    import torch
    from cbdisagg_bench.faults_load import WORDS
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    texts = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
