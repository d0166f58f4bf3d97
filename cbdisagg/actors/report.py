"""What `serve` says once everything is up: where it is, how to try it, what runs where. Pure: facts in, text out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cbdisagg.actors.cores import Cores
from cbdisagg.config import Kv, Model
from cbdisagg.core.sizing import DEFAULT_POOL_BYTES
from cbdisagg.messages import Pair

TEMPERATURE = 0.2
"""Of the request to try: a small model's answer makes sense only near the likeliest words."""


@dataclass(frozen=True, slots=True)
class Running:
    """One process. `threads` 0: it computes nothing."""

    name: str
    pid: int
    threads: int = 0
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """`chat`: the model has a chat template. `key`: what a shell has to paste for the API key, "" if none is asked.

    `context`: the line that tells how long a request may be; `numbers` what it is computed in, `cores` on how many.
    """

    url: str
    model_name: str
    model_folder: str
    chat: bool
    key: str
    context: str
    numbers: str
    cores: str
    processes: Sequence[Running]
    pairs: Sequence[Pair]
    transfer_kind: str
    seconds: float


def ready_text(facts: Facts) -> str:
    lines = [
        f"cbdisagg serves {facts.model_name} at {facts.url}/v1  (ready after {facts.seconds:.1f} s)",
        "",
        "Try it:",
        f"  {curl_line(facts)}",
        "",
        f"Model folder (give it to clients that want a tokenizer): {facts.model_folder}",
        facts.context,
        facts.numbers,
        facts.cores,
        "Processes:",
        *(f"  {_process_line(process)}" for process in facts.processes),
    ]
    if facts.pairs:
        lines += ["KV pages move:", *(f"  {_pair_line(pair)}" for pair in facts.pairs)]
    lines += [f"Warning: {text}" for text in warnings(facts.pairs, facts.transfer_kind)]
    return "\n".join([*lines, "Stop with Ctrl-C."])


def stopping_line(running: str) -> str:
    """What is said when the service has been asked to end; `running`: what is finished before."""
    return f"Stopping: {running}; again to stop at once" if running else "Stopping ..."


def context_line(kv: Kv, wanted: int, max_len: int, model_context: int, gpus: bool = False) -> str:
    """How long a request may be (`max_len` tokens) and, if the model could see more, what keeps it from that.

    `wanted`: [model] max_len; 0 leaves the length to the pool. `model_context` 0: not known. `gpus`: that is where
    pools are, and take what memory_fraction leaves.
    """
    line = f"Context: {max_len:,} tokens"
    if max_len >= model_context:
        return line
    if wanted:
        return f"{line} (the model could {model_context:,}; model.max_len = {wanted})"
    if kv.pages:
        pool = f"kv.pages = {kv.pages}"
    elif kv.memory_mb:
        pool = f"kv.memory_mb = {kv.memory_mb}"
    elif gpus:
        pool = "the pool, see workers.N.memory_fraction,"
    else:
        pool = f"the pool of {DEFAULT_POOL_BYTES >> 20} MiB, see kv.memory_mb,"
    return f"{line} (the model could {model_context:,}; {pool} holds no more)"


def numbers_line(model: Model, operators: Iterable[str]) -> str:
    """`operators`: those of all workers, as kernels/ops.py names them."""
    weights = "" if model.weights == "same" else f", weights in {model.weights}"
    by = " and ".join(sorted(filter(None, operators)))
    return f"Numbers: {model.dtype}{weights}" + (f", by {by}" if by else "")


def cores_line(cores: Cores) -> str:
    """How many may be busy at once, and why not all that are there."""
    line = f"Cores: {cores.at_once}"
    return line if cores.are_ours else f"{line} of {len(cores.numbers)}, as the CPU quota of this container allows"


def curl_line(facts: Facts) -> str:
    """One line for a shell that streams an answer."""
    if facts.chat:
        path = "/v1/chat/completions"
        question: dict[str, object] = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    else:
        path, question = "/v1/completions", {"prompt": "The sky is blue because", "max_tokens": 64}
    body = json.dumps({"model": facts.model_name, "stream": True, "temperature": TEMPERATURE, **question})
    headers = ["-H 'Content-Type: application/json'"]
    if facts.key:
        headers.append(f'-H "Authorization: Bearer {facts.key}"')
    return f"curl -N {facts.url}{path} {' '.join(headers)} -d {shlex.quote(body)}"


def warnings(pairs: Iterable[Pair], transfer_kind: str) -> list[str]:
    """One line for each pair that does not use what it should."""
    lines = []
    for pair in pairs:
        way = f"from {pair.prefill.name} to {pair.decode.name}"
        if not pair.kind:
            lines.append(f"KV pages cannot move {way}: {pair.note}. Each computes its own prompts.")
        elif pair.note:
            wanted = "the fastest way" if transfer_kind == "auto" else transfer_kind
            lines.append(f"KV pages move {way} by {pair.kind}, as {wanted} does not work: {pair.note}.")
    return lines


def _process_line(process: Running) -> str:
    line = f"{process.name:<12} pid {process.pid:<8}"
    if not process.threads:
        return line.rstrip()
    line += "1 thread" if process.threads == 1 else f"{process.threads} threads"
    if process.cpus:
        cores = ", ".join(map(str, process.cpus))
        return f"{line} on core{'s' if len(process.cpus) > 1 else ''} {cores}"
    return f"{line}, not pinned"


def _pair_line(pair: Pair) -> str:
    way = f"{pair.prefill.name} -> {pair.decode.name}"
    return f"{way}: {pair.kind}, {pair.bytes_per_s / 1e9:.1f} GB/s measured" if pair.kind else f"{way}: not at all"
