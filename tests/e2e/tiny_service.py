"""A model of 400 kB, and services with it: started, watched from outside as an operator would, and ended in any way.

Knows processes, files and sockets of one host; all of a service's temporary files lie in a folder of the test's own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB, WIDTH, INNER, LAYERS, HEADS, KV_HEADS = 400, 64, 96, 2, 4, 2
CONTEXT = 1024
NORMS = ("input_layernorm", "post_attention_layernorm")
END_OF_START = "Stop with Ctrl-C."
PATIENCE_S = 150.0
TEXT = "once upon a time there was a small village by the sea and a girl who walked home in the rain "

SETTINGS = """
[model]
dtype = "float32"
served_name = "tiny"
{workers}
[kv]
pages = {pages}
[scheduler]
max_batch = 16
token_budget = 128
[policy]
mode = "disaggregate"
[transfer]
kind = "{kind}"
[debug]
invariants = {invariants}
"""
WORKERS = '[[workers]]\nrole = "{role}"\ncount = {count}\nthreads = 1\n'


def make_model(folder: Path) -> Path:
    """Random weights and a byte-level tokenizer: a model folder in all respects."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}))
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
    }
    texts = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
    rest = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps({**texts, **shape, **rest, "tie_word_embeddings": False}))
    random = np.random.default_rng(7)
    kv = WIDTH // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, WIDTH), "lm_head": (VOCAB, WIDTH)}
    for n in range(LAYERS):
        own = {"q_proj": (WIDTH, WIDTH), "k_proj": (kv, WIDTH), "v_proj": (kv, WIDTH), "o_proj": (WIDTH, WIDTH)}
        mlp = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
        shapes |= {f"model.layers.{n}.self_attn.{name}": size for name, size in own.items()}
        shapes |= {f"model.layers.{n}.mlp.{name}": size for name, size in mlp.items()}
    weights = {f"{name}.weight": (0.3 * random.standard_normal(size)) for name, size in shapes.items()}
    norms = [f"model.layers.{n}.{name}" for n in range(LAYERS) for name in NORMS]
    weights |= {f"{name}.weight": np.ones(WIDTH) for name in [*norms, "model.norm"]}
    save_file({name: weight.astype(np.float32) for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def settings(prefill: int = 1, decode: int = 1, pages: int = 128, kind: str = "auto", invariants: bool = True) -> str:
    """The text of a config file."""
    groups = WORKERS.format(role="prefill", count=prefill) + WORKERS.format(role="decode", count=decode)
    return SETTINGS.format(workers=groups, pages=pages, kind=kind, invariants=str(invariants).lower())


@dataclass
class Running:
    """A service that is ready. `family`: its processes as they were then, the supervisor first."""

    process: subprocess.Popen[str]
    url: str
    folder: Path
    text: str
    family: list[psutil.Process] = field(default_factory=list)

    def complete(self, prompt: str = "once upon a time", tokens: int = 16, **fields: Any) -> str:
        """The text of a greedy answer."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            text: str = json.load(response)["choices"][0]["text"]
        return text

    def complete_in_the_end(self) -> str:
        """As a client does that is told 503 while no worker is there: ask again."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.complete()
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def sockets(self) -> list[Path]:
        """All internal ones."""
        return sorted(path for path in self.folder.glob("cbdisagg-*/*") if path.is_socket())

    def end(self, how: int, patience_s: float = PATIENCE_S) -> int:
        """Send the supervisor a signal; its status. On return no process of the family is left."""
        self.process.send_signal(how)
        status = self.process.wait(patience_s)
        _, alive = psutil.wait_procs(self.family, timeout=20)
        assert alive == [], alive
        return status

    def kill_family(self) -> None:
        """All at once, as the kernel or an operator in a hurry would."""
        for process in self.family:
            process.suspend()  # so that none sees another one die
        for process in self.family:
            process.kill()
        self.process.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(self.family, timeout=20)
        assert alive == [], alive


def begin(model: Path, config: Path, folder: Path, *options: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a service; see `until_ready`. Its temporary files go to `folder`."""
    command = [*prefix, sys.executable, "-m", "cbdisagg", "serve", "--config", str(config), "--model", str(model)]
    return subprocess.Popen(
        [*command, "--port", "0", *options],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )


def until_ready(process: subprocess.Popen[str], folder: Path) -> Running:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(END_OF_START):
            break
    assert lines, "it ended before it was ready"
    url = lines[0].split(" at ")[1].split("/v1")[0]
    running = Running(process, url, folder, "".join(lines))
    root = psutil.Process(process.pid)
    running.family = [root, *root.children(recursive=True)]
    return running


@contextmanager
def started(model: Path, config: Path, folder: Path, *options: str) -> Iterator[Running]:
    """A service for as long as the block lasts, unless it ends itself."""
    with begin(model, config, folder, *options) as process:
        try:
            yield until_ready(process, folder)
        finally:
            process.kill()


@contextmanager
def short_folder() -> Iterator[Path]:
    """pytest's own folders are too deep for the path of a socket."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def left_behind(folder: Path) -> dict[str, list[str]]:
    """What a service may have left on this host: files, shared memory, sockets, processes."""

    def lines(path: str, wanted: Callable[[str], bool]) -> list[str]:
        return sorted(line for line in Path(path).read_text().splitlines() if wanted(line))

    return {
        "files": sorted(path.name for path in folder.iterdir()),
        "shared memory": sorted(name for name in os.listdir("/dev/shm") if "cbdisagg" in name),
        "segments": [line.split()[1] for line in lines("/proc/sysvipc/shm", lambda line: "key" not in line)],
        "sockets": lines("/proc/net/unix", lambda line: str(folder) in line),
        "processes": [str(process.pid) for process in psutil.process_iter() if _lives_in(process, folder)],
    }


def _lives_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
