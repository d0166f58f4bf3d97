"""Tiny random models in float32, each as a folder for our engine and as the transformers model that it must equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

PAGE = 8
VOCAB = 160
CONTEXT = 160
NEARLY_EQUAL = 1e-4
"""Two logits that are closer than this may be told apart differently by sums in another order."""

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA = {**_SHAPE, "intermediate_size": 96, "initializer_range": 0.3}
_OPT = {**_SHAPE, "ffn_dim": 96, "init_std": 0.3}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-mha": lambda: LlamaConfig(**_LLAMA, num_key_value_heads=4),
    "llama-gqa": lambda: LlamaConfig(**_LLAMA, num_key_value_heads=2, tie_word_embeddings=True),
    "opt": lambda: OPTConfig(**_OPT, word_embed_proj_dim=64),
    "opt-post-norm": lambda: OPTConfig(**_OPT, word_embed_proj_dim=32, do_layer_norm_before=False),
}


@dataclass(frozen=True)
class Reference:
    """What `generate` gives. Tokens before `sure` are beyond doubt; at `sure` the two best logits nearly tied."""

    ids: list[int]
    sure: int


@dataclass
class TinyModel:
    name: str
    folder: Path
    twin: Any
    known: dict[tuple[tuple[int, ...], int], Reference] = field(default_factory=dict)

    def greedy(self, prompt: Sequence[int], count: int) -> Reference:
        """Computed once for each (prompt, count), whatever the number of tests that ask."""
        key = (tuple(prompt), count)
        if key not in self.known:
            out = self.twin.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            best = torch.cat(out.logits).topk(2).values
            ties = (best[:, 0] - best[:, 1] < NEARLY_EQUAL).nonzero().flatten().tolist()
            self.known[key] = Reference(out.sequences[0, len(prompt) :].tolist(), ties[0] if ties else count)
        return self.known[key]


def make_model(name: str, folder: Path) -> TinyModel:
    torch.manual_seed(sum(name.encode()))
    twin = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval().float()
    for parameter in twin.parameters():
        if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide a mix-up
            parameter.data += 0.1 * torch.randn_like(parameter)
    twin.save_pretrained(folder)
    return TinyModel(name, folder, twin)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(VOCAB), k=length)
