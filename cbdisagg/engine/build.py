"""From a model folder to a runner, and what can be said of a model without loading it.

Knows where everything comes from: specs.py reads the config, weights.py the tensors, families.py gives them meaning,
kernels/ops.py the operators, packed_file.py the memory that workers share. The only place that sets torch's number of
threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from cbdisagg_kernels.linear import Linear
from cbdisagg_kernels.ops import Ops, select
from numpy.typing import NDArray

from cbdisagg.config import ModelError
from cbdisagg.engine import packed_file
from cbdisagg.engine.device import Device
from cbdisagg.engine.families import Spec, weights_of
from cbdisagg.engine.kv import LAYOUT, KvShape, as_pool, pool_tensor
from cbdisagg.engine.model import Decoder, make_linears
from cbdisagg.engine.runner import TorchRunner
from cbdisagg.engine.specs import read_spec
from cbdisagg.engine.weight_files import weight_files
from cbdisagg.engine.weights import load

if TYPE_CHECKING:
    from cbdisagg.engine.device_runner import DeviceRunner  # brings Triton: a second and 75 MiB, and not for CPUs

CPU = torch.device("cpu")
SAMPLES = 16
SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as its worker needs to know it before the pool exists.

    `context`: tokens that it can see at most, prompt + output. `fingerprint`: of the weights, the dtype, the pool's
    layout and the operators; workers that differ are never paired. `operators`: their name, as in `Ops`.
    """

    family: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    fingerprint: str
    operators: str

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of `page_size` tokens in one layer."""
        return KvShape(self.layers, self.kv_heads, self.head_dim, page_size, _dtype(self.dtype)).page_bytes


def describe(
    folder: Path, dtype: str, weights: str = "same", cache: Path | None = None, device: torch.device = CPU
) -> ModelInfo:
    """Read the config and look at the weight files. Raises ModelError if the model cannot be served so.

    `weights`: "same" or "int8". `cache`: see `build_runner`.
    """
    spec = read_spec(folder, cache)
    files = weight_files(folder)
    operators = _ops(dtype, weights, device).name
    return ModelInfo(
        family=spec.family,
        dtype=dtype,
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab=spec.vocab,
        context=min(spec.context, spec.window or spec.context),
        fingerprint=f"{_sampled(folder, files)} {dtype} {operators} {LAYOUT}",
        operators=operators,
    )


def weight_bytes(folder: Path, dtype: str, cache: Path | None = None) -> int:
    """What a model takes on a GPU before its pool: products in `dtype`, and the embedding as it is stored."""
    spec = read_spec(folder, cache)
    weights = weights_of(spec, load(folder, torch.device("meta")))
    numbers = sum(columns * inputs for columns, inputs in (product.shape for product in weights.products()))
    return numbers * _dtype(dtype).itemsize + weights.embed.nbytes


def build_runner(
    folder: Path,
    dtype: str,
    memory: NDArray[np.uint8],
    page_size: int,
    max_len: int,
    threads: int,
    ops: Ops | None = None,
    weights: str = "same",
    cache: Path | None = None,
) -> TorchRunner:
    """Load a model on the CPU. `memory` [layers, pages, page_bytes], writable, is its KV pool (`Pool.pages`).

    `max_len`: tokens of prompt + output that a sequence may have. `threads`: of each operator, from now on in the whole
    process. `ops`: others than those that suit this machine best. `weights`: "same" or "int8". `cache`: the folder in
    which packed weights are kept, for all workers of this host; None: in memory of this process. Raises ModelError if
    the folder holds no model of ours, the model cannot see `max_len` tokens, or int8 has no kernels here.
    """
    torch.set_num_threads(threads)
    spec = read_spec(folder, cache)
    _check_length(spec, max_len)
    shape = KvShape(spec.layers, spec.kv_heads, spec.head_dim, page_size, _dtype(dtype))
    ops = ops or _ops(dtype, weights)
    linears = _linears(folder, spec, ops, shape.dtype, cache)
    # Read anew: what packing has read is not mapped any more.
    decoder = Decoder(spec, weights_of(spec, load(folder)), linears, ops, pool_tensor(memory, shape), max_len)
    return TorchRunner(decoder, max_len)


def build_device_runner(
    folder: Path,
    dtype: str,
    memory: Any,
    page_size: int,
    max_len: int,
    device: Device,
    most_slots: int,
    most_batch: int,
    most_rows: int,
    cache: Path | None = None,
    progress: Callable[[str, float], None] = lambda stage, fraction: None,
) -> DeviceRunner:
    """Load a model on a GPU. `memory` [layers, pages, page_bytes], bytes that torch takes by the CUDA array interface.

    `most_slots`, `most_batch`: see `DeviceRunner`. `most_rows`: tokens of the largest step. `progress`: of capturing
    graphs, then of warming up. Raises ModelError as `build_runner` does.
    """
    from cbdisagg.engine.device_runner import DeviceRunner
    from cbdisagg.engine.warm_up import warm_up

    spec = read_spec(folder, cache)
    _check_length(spec, max_len)
    shape = KvShape(spec.layers, spec.kv_heads, spec.head_dim, page_size, _dtype(dtype))
    where = device.torch_device
    pool = as_pool(torch.as_tensor(memory, device=where), shape)
    ops = _ops(dtype, "same", where)
    with device.queueing():
        weights = weights_of(spec, load(folder, where))
        decoder = Decoder(spec, weights, make_linears(weights, ops, shape.dtype), ops, pool, max_len)
    device.mark().wait()
    runner = DeviceRunner(decoder, max_len, device, most_slots, most_batch, partial(progress, "capturing graphs"))
    warm_up(runner, most_batch, most_rows, partial(progress, "warming up"))
    return runner


def _linears(folder: Path, spec: Spec, ops: Ops, dtype: torch.dtype, cache: Path | None) -> dict[str, Linear]:
    """All products, on a packed file if there is a place to keep one in."""
    weights = weights_of(spec, load(folder))
    if cache is not None and ops.packer is not None:
        model = folder.resolve()
        path = packed_file.path_for(cache / "packed", model, dtype, ops.name)
        wanted = packed_file.Wanted(path, model, _source(folder), ops.packer, dtype)
        if (mapped := packed_file.find_or_make(wanted, weights)) is not None:
            return packed_file.bind(mapped, wanted, weights)
    return make_linears(weights, ops, dtype)


def _check_length(spec: Spec, max_len: int) -> None:
    if max_len > spec.context:
        raise ModelError(f"max_len = {max_len}: the model's context is {spec.context} tokens")
    if spec.window is not None and max_len > spec.window:
        raise ModelError(f"max_len = {max_len}: the model has a sliding window, and {spec.window} tokens fill it")


def _dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ModelError(f"dtype = {name!r}: supported are {', '.join(dtypes)}")
    return dtypes[name]


def _ops(dtype: str, weights: str, device: torch.device = CPU) -> Ops:
    try:
        return select(device, _dtype(dtype), quantised=weights == "int8")
    except ValueError:
        raise ModelError(
            f'[model] weights = "{weights}" needs the C kernels, which cannot be had here: install a C compiler (or '
            'set CC, or take away CBDISAGG_NATIVE=0), or set weights = "same"'
        ) from None


def _source(folder: Path) -> str:
    """Tells these weights from others that were, or will be, in the same place."""
    files = weight_files(folder)
    times = " ".join(f"{path.name} {path.stat().st_mtime_ns}" for path in files)
    return f"{_sampled(folder, files)} {times}"


def _sampled(folder: Path, files: list[Path]) -> str:
    """A hash of the config and of samples of the weight files: sizes, heads, and blocks spread over the rest."""
    digest = blake2b(digest_size=16)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for n in range(SAMPLES):
                file.seek(size * n // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
