"""Compiles what the launchers of the Triton kernels pick, for GPUs that are not there; one JSON line for each kernel.

A program of its own, for in a process whose kernels are interpreted nothing can be compiled. Launchers run as they are,
on CPU tensors; a stub in place of the driver says which GPU it would be, and each launch ends when it is compiled.
Usage: ahead_of_time.py CAPABILITY likely|all [PART PARTS]: of all cases, every PARTS-th from number PART on.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

import torch
import triton
from cbdisagg_kernels.gpu import sample
from cbdisagg_kernels.gpu.activation import silu_mul
from cbdisagg_kernels.gpu.decode_attention import decode_attention
from cbdisagg_kernels.gpu.norm import rms_norm
from cbdisagg_kernels.gpu.pages import copy_pages
from cbdisagg_kernels.gpu.prefill_attention import prefill_attention
from cbdisagg_kernels.gpu.rope_write import rope_write
from cbdisagg_kernels.gpu.shapes import Heads
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LLAMA_8B, OPT_13B, SMOLLM2 = Heads(32, 8, 128, 16), Heads(40, 40, 128, 16), Heads(9, 3, 64, 16)
PLACES = ((32, 0), (1, 1))
"""Sequences, and after how many words a step's numbers begin: kernels are the same for all of them."""


class StubDriver:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def cases(all_of_them: bool) -> Iterator[tuple[Heads, torch.dtype, tuple[int, ...]]]:
    """Heads, dtype, and into how many shares contexts are divided."""
    yield LLAMA_8B, torch.bfloat16, (1, 8)
    if all_of_them:
        yield OPT_13B, torch.float16, (1, 8)
        yield SMOLLM2, torch.bfloat16, (1, 32)
        dims = (64, 80, 128, 192, 256)
        for dtype, dim, group, window in product((torch.float32, torch.bfloat16), dims, (4, 32), (0, 512)):
            yield Heads(2 * group, 2, dim, 16, window), dtype, (1, 32)
        for dim in dims:  # to registers and shared memory it is the other half
            yield Heads(8, 2, dim, 16, 512), torch.float16, (1, 8)
        for dim, page in product(dims, (8, 32, 64)):  # which are in addresses only
            yield Heads(8, 2, dim, page), torch.bfloat16, (1, 2)
        for dtype, dim in product((torch.float32, torch.bfloat16), dims):  # more heads to a KV head than any model has
            yield Heads(64, 1, dim, 16), dtype, (1, 32)


def words(at: int, *shape: int) -> torch.Tensor:
    return torch.zeros(at + math.prod(shape), dtype=torch.int32)[at:].view(shape)


def launch(heads: Heads, dtype: torch.dtype, splits: tuple[int, ...]) -> None:
    """Every kernel that depends on the heads."""
    planes = heads.heads + 2 * heads.kv_heads
    qkv = torch.zeros(32, planes, heads.head_dim, dtype=dtype)
    layer = torch.zeros(4, 2, heads.kv_heads, heads.page_size, heads.head_dim, dtype=dtype)
    out = torch.zeros(32, heads.heads * heads.head_dim, dtype=dtype)
    turn = (torch.zeros(64, heads.head_dim // 2), torch.zeros(64, heads.head_dim // 2))
    flat = layer.view(torch.uint8).view(4, -1)
    for sequences, at in PLACES:
        positions, tables, tiles = words(at, 32), words(at, 64, sequences), words(at, 16, 4)
        rope_write(qkv, layer, positions, positions, tables, turn, heads)
        for count in splits:
            decode_attention(qkv, layer, positions, tables, out[:sequences], heads, count)
        prefill_attention(qkv, layer, tiles, tables, out, heads)
        copy_pages(flat, flat.clone(), positions[:3], positions[:3])


def launch_rest(dtype: torch.dtype, hidden: int, inner: int, vocab: int) -> None:
    """What depends on the model's widths only."""
    x = torch.zeros(16, hidden, dtype=dtype)
    rms_norm(x, x[0], 1e-5)
    rms_norm(x, x[0], 1e-5, x.clone())
    silu_mul(torch.zeros(16, 2 * inner, dtype=dtype))
    logits = torch.zeros(16, vocab)
    sample.argmax(logits)
    for _, at in PLACES:
        ints = words(at, 16)
        sample.draw(logits, sample.Draws(*[ints.view(torch.float32)] * 3, *[ints] * 5))


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and the bytes of local memory that it spills to or keeps arrays in."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [BIN / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL")}  # type: ignore[index]


def main(capability: int, all_of_them: bool, part: int = 0, parts: int = 1) -> None:
    driver.set_active(StubDriver(capability))
    compile_and_launch, seen = JITFunction.run, set()

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            what = {
                "kernel": kernel.metadata.name,
                "shared": kernel.metadata.shared,
                "warps": kernel.metadata.num_warps,
            }
            print(json.dumps(what | resources(kernel.asm["cubin"]) | {"case": where}), flush=True)
        return kernel

    JITFunction.run = compile_only
    for heads, dtype, splits in islice(cases(all_of_them), part, None, parts):
        where = f"{heads} {dtype}"
        launch(heads, dtype, splits)
    widths = [(torch.bfloat16, 4096, 14336, 128_256)]
    if all_of_them:
        widths += [(torch.float16, 5120, 20480, 50_272), (torch.float32, 576, 1536, 49_152)]
    for dtype, hidden, inner, vocab in widths if part == 0 else []:
        where = f"{hidden} {inner} {vocab} {dtype}"
        launch_rest(dtype, hidden, inner, vocab)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "all", *map(int, sys.argv[3:]))
