"""Tiny random models with their transformers twin, and a driver that runs sequences on a runner as a worker would."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cbdisagg_kernels import ops
from cbdisagg_kernels.native import native
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, OPTConfig

from cbdisagg.engine.build import build_runner, describe
from cbdisagg.engine.runner import TorchRunner
from cbdisagg.messages import Admit, Logprobs, Push, Sampling, Slice, StepPlan, StepResult, pack

PAGE = 8
VOCAB = 200
CONTEXT = 96
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
OPT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "init_std": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-mha": lambda: LlamaConfig(**LLAMA, num_key_value_heads=4),
    "llama-gqa-tied": lambda: LlamaConfig(**LLAMA, num_key_value_heads=2, tie_word_embeddings=True),
    "llama-biased-scaled": lambda: LlamaConfig(
        **LLAMA, num_key_value_heads=1, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE
    ),
    "mistral": lambda: MistralConfig(**LLAMA, num_key_value_heads=2, head_dim=24, sliding_window=None),
    "opt": lambda: OPTConfig(**OPT, word_embed_proj_dim=64),
    "opt-post-norm-projected": lambda: OPTConfig(**OPT, word_embed_proj_dim=32, do_layer_norm_before=False),
}


@dataclass
class Twin:
    """One model twice: as transformers computes it, and its folder for ours."""

    name: str
    folder: Path
    reference: Any
    pages: int = 80

    def runner(
        self,
        dtype: str = "float32",
        max_len: int = CONTEXT,
        threads: int = 1,
        weights: str = "same",
        cache: Path | None = None,
    ) -> TorchRunner:
        info = describe(self.folder, dtype, weights, cache)
        memory = np.zeros((info.layers, self.pages, info.page_bytes(PAGE)), np.uint8)
        return build_runner(self.folder, dtype, memory, PAGE, max_len, threads, weights=weights, cache=cache)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), vocab] in float32."""
        with torch.inference_mode():
            return self.reference(torch.tensor([ids])).logits[0]

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """What `generate` gives, and for each token how far the best logit is above the second."""
        out = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2).values
        return out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def make_twin(name: str, folder: Path) -> Twin:
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval().float()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide a mix-up
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return Twin(name, folder, model)


@pytest.fixture(scope="session", params=list(CONFIGS))
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """Every family and variant in turn."""
    return make_twin(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return make_twin("llama-gqa-tied", tmp_path_factory.mktemp("llama"))


@dataclass
class Sequence:
    """One sequence on its way: what it got so far."""

    prompt: list[int]
    sampling: Sampling
    output: list[int] = field(default_factory=list)
    given: int = 0  # output tokens that it was admitted with
    start_step: int = 0
    computed: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    slot: int = -1

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def done(self) -> bool:
        ended = len(self.output) > self.given and self.output[-1] in self.sampling.end_ids
        return len(self.output) >= self.sampling.max_tokens or ended


class Driver:
    """Serves sequences on a runner: pages in random order, chunks as `chunk()` says, slots reused.

    `mixed`: all running sequences share one plan; otherwise each has its own.
    """

    def __init__(
        self, runner: TorchRunner, pages: int, seed: int, chunk: Callable[[], int], mixed: bool = True
    ) -> None:
        self.runner, self.chunk, self.mixed = runner, chunk, mixed
        self.free = list(range(pages))
        random.Random(seed).shuffle(self.free)
        self.slots = list(range(64))
        self.plans = 0

    def serve(self, sequences: list[Sequence]) -> list[Sequence]:
        waiting, running, step = list(sequences), list[Sequence](), 0
        while waiting or running:
            admits = []
            for sequence in [each for each in waiting if each.start_step <= step]:
                waiting.remove(sequence)
                running.append(sequence)
                admits.append(self._admit(sequence))
            grow = tuple(each for each in map(self._grow, running) if each[1])
            parts = [self._slice(sequence) for sequence in running]
            if self.mixed:
                self._finish(running, parts, self._run((), tuple(admits), grow, tuple(parts)))
            else:
                self._run((), tuple(admits), grow, ())
                for sequence, part in zip(running, parts, strict=True):
                    self._finish([sequence], [part], self._run((), (), (), (part,)))
            ended = [sequence for sequence in running if sequence.done]
            self._release(ended)
            running = [sequence for sequence in running if not sequence.done]
            step += 1
        return sequences

    def _admit(self, sequence: Sequence) -> Admit:
        sequence.slot, sequence.given = self.slots.pop(0), len(sequence.output)
        return Admit(sequence.slot, pack(sequence.prompt), pack(sequence.output), (), sequence.sampling)

    def _grow(self, sequence: Sequence) -> tuple[int, tuple[int, ...]]:
        missing = -(-sequence.length // PAGE) - len(sequence.pages)
        new = [self.free.pop() for _ in range(missing)]
        sequence.pages += new
        return sequence.slot, tuple(new)

    def _slice(self, sequence: Sequence) -> Slice:
        count = min(self.chunk(), sequence.length - sequence.computed)
        draws = int(sequence.computed + count == sequence.length)
        scores = sequence.sampling.prompt_logprobs >= 0 and sequence.computed < len(sequence.prompt)
        return Slice(sequence.slot, sequence.computed, count, draws, scores)

    def _run(self, release: Any, admit: Any, grow: Any, slices: Any) -> StepResult:
        self.plans += 1
        result = self.runner.run(StepPlan(self.plans, release, admit, grow, slices), no_push)
        assert result.number == self.plans
        assert len(result.sampled) == len(slices)
        return result

    def _finish(self, sequences: list[Sequence], parts: list[Slice], result: StepResult) -> None:
        for sequence, part, sampled in zip(sequences, parts, result.sampled, strict=True):
            assert len(sampled.ids) == part.draws
            sequence.computed += part.count
            sequence.output += sampled.ids
            sequence.logprobs += sampled.logprobs
            sequence.prompt_logprobs += sampled.prompt_logprobs

    def _release(self, ended: list[Sequence]) -> None:
        for sequence in ended:
            self.free[:0] = sequence.pages
            self.slots.append(sequence.slot)
        if ended:
            self._run(tuple(sequence.slot for sequence in ended), (), (), ())


def no_push(layer: int, push: Push) -> None:
    raise AssertionError("nothing is pushed here")


@pytest.fixture(scope="session")
def make_sequence() -> type[Sequence]:
    return Sequence


@pytest.fixture
def drive() -> Callable[..., list[Sequence]]:
    """drive(twin, sequences, seed, chunk=..., mixed=..., runner=...) -> the sequences, served."""

    def serve(twin: Twin, sequences: list[Sequence], seed: int = 0, **how: Any) -> list[Sequence]:
        runner = how.pop("runner", None) or twin.runner()
        how.setdefault("chunk", lambda: 1 << 20)
        return Driver(runner, twin.pages, seed, **how).serve(sequences)

    return serve


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runners that a test builds take the C kernels, then torch's operators."""
    if request.param == "torch":
        monkeypatch.setattr(ops, "native", lambda: None)
    elif native() is None:
        pytest.skip("no native kernels here")
    return str(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rounding is the same in every test run, and the models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
