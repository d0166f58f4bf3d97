"""Llama-shaped models with random weights, made on the device: in memory for steps, as folders for services.

A folder holds no weights either, only how each process draws them on its own device.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from cbdisagg_bench.faults_load import WORDS
from cbdisagg_bench.gpu_rows import Setting
from cbdisagg_bench.step import random_tensors
from cbdisagg_kernels.gpu.ops import triton_ops
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig

from cbdisagg.engine.device_runner import DeviceRunner
from cbdisagg.engine.families import spec_of, weights_of
from cbdisagg.engine.kv import KvShape, as_pool
from cbdisagg.engine.model import Decoder, make_linears
from cbdisagg.engine.random_weights import Drawn, write_recipe
from cbdisagg.engine.warm_up import warm_up

PAGE = 16
SPREAD = 0.04


@dataclass(frozen=True, slots=True)
class Llama:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int = 8192

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.context,
            bos_token_id=None,
            eos_token_id=None,
        )


LLAMA_8B = Llama(32, 4096, 14_336, 32, 8, 128, 128_256)
TINY = Llama(2, 64, 96, 4, 2, 16, 400, 2048)


def device_runner(
    setting: Setting, shape: Llama, pages: int, max_len: int, most_batch: int, most_rows: int
) -> DeviceRunner:
    """In bfloat16 (tiny: float32), with a pool of `pages` pages of PAGE tokens; warmed up."""
    dtype = torch.float32 if setting.tiny else torch.bfloat16
    spec = spec_of(shape.config())
    kv = KvShape(spec.layers, spec.kv_heads, spec.head_dim, PAGE, dtype)
    memory = torch.zeros(spec.layers, pages, kv.page_bytes, dtype=torch.uint8, device=setting.torch_device)
    with torch.device(setting.torch_device), setting.device.queueing():
        weights = weights_of(spec, random_tensors(spec, shape.inner))
    ops = triton_ops(setting.torch_device)
    with setting.device.queueing():
        linears = make_linears(weights, ops, dtype)
    decoder = Decoder(spec, weights, linears, ops, as_pool(memory, kv), max_len)
    setting.device.mark().wait()
    runner = DeviceRunner(decoder, max_len, setting.device, most_slots=2 * most_batch, most_batch=most_batch)
    warm_up(runner, most_batch, most_rows)
    return runner


def write_folder(folder: Path, shape: Llama) -> Path:
    """A model folder that services load: bfloat16, and a tokenizer of the words of `bench faults`, then numbers."""
    config = shape.config()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    spec = spec_of(config)
    with torch.device("meta"):
        tensors = random_tensors(spec, shape.inner)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    drawn = {
        name: Drawn(tuple(tensor.shape), spread=SPREAD) if tensor.dim() > 1 else Drawn(tuple(tensor.shape), mean=1.0)
        for name, tensor in tensors.items()
    }
    write_recipe(folder, torch.bfloat16, drawn)
    names = [*dict.fromkeys(WORDS), *map(str, range(shape.vocab))][: shape.vocab]
    words = Tokenizer(WordLevel({name: n for n, name in enumerate(names)}, unk_token=names[0]))
    words.pre_tokenizer = Whitespace()
    words.save(str(folder / "tokenizer.json"))
    texts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(texts), encoding="utf-8")
    return folder
