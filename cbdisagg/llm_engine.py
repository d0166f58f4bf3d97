"""Requests of the Python API: checked in the caller's thread, run on the service's loop.

Knows prompts, parameters and how many requests may be under way; nothing of batches, iterators or progress bars.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from msgspec.structs import replace

from cbdisagg.api.client import RequestRejected, Stream
from cbdisagg.api.together import together
from cbdisagg.api.tokenizer import Tokenizer
from cbdisagg.config import Config, ConfigError
from cbdisagg.llm_outputs import Request, RequestOutput
from cbdisagg.llm_params import SamplingParams
from cbdisagg.llm_service import Service
from cbdisagg.load import load_config, print_config
from cbdisagg.messages import RequestId, Sampling, Targets
from cbdisagg.prepare import prepare_model

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's {"prompt": text} or {"prompt_token_ids": ids}."""
Message: TypeAlias = Mapping[str, Any]

TOO_MANY = 429
SHORT_NAMES = {
    "dtype": "model.dtype",
    "weights": "model.weights",
    "max_model_len": "model.max_len",
    "served_model_name": "model.served_name",
}
"""Keys of [model] without their section: `model` itself is the argument that names one. Two are vLLM's names."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, ready to be submitted. `text` is None where token ids were given."""

    text: str | None
    ids: list[int]
    params: SamplingParams
    sampling: Sampling


class Engine:
    """A service, its tokenizer, and the requests on it. `start` before all else, `close` at the end."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.service = Service(config)
        self.tokenizer: Tokenizer
        # So many may wait for a worker before more are refused. The coordinator counts a request twice until the worker
        # it went to has told of it, hence the half.
        self._places = asyncio.Semaphore(max(config.policy.queue_limit // 2, config.limits.n))
        self._turn = asyncio.Lock()
        self._targets = Targets(config.targets.ttft_ms / 1000, config.targets.tpot_ms / 1000)
        self._numbers = count()
        self._requests: dict[str, Request] = {}

    def start(self) -> None:
        """Blocks until requests can be served. Raises ConfigError or ServiceFailed, one line each."""
        self.tokenizer = Tokenizer(prepare_model(self.config.model, lambda stage, fraction: None))
        self.service.start()

    def close(self) -> None:
        self.service.close()

    # ---------------------------------------------------------------------------------- in the caller's thread

    def job(self, prompt: Prompt, params: SamplingParams) -> Job:
        """Raises TypeError or ValueError where the prompt or the parameters do not fit the model."""
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            if not known:
                raise ValueError(f'a prompt has the keys {sorted(prompt)}; it needs "prompt" or "prompt_token_ids"')
            prompt = prompt[known[0]]
        if isinstance(prompt, str):
            return self._job(prompt, self.tokenizer.encode(prompt, special=True), params)
        vocab = self.tokenizer.vocab_size
        ids: list[Any] = list(prompt)
        for id in ids:
            if not isinstance(id, int):
                raise TypeError(f"a prompt has {id!r} among its token ids; they must be whole numbers")
            if not 0 <= id < vocab:
                raise ValueError(f"a prompt has the token id {id}; this model has ids 0 to {vocab - 1}")
        return self._job(None, ids, params)

    def chat_job(self, messages: Sequence[Message], params: SamplingParams, options: Mapping[str, Any]) -> Job:
        """Raises TemplateError as well."""
        text = self.tokenizer.render_chat(messages, **options)
        return self._job(text, self.tokenizer.encode(text), params)

    def _job(self, text: str | None, ids: list[int], params: SamplingParams) -> Job:
        if not ids:
            raise ValueError("a prompt is empty: it has no tokens; at least one is needed")
        most = self.config.limits.n
        if params.n > most:
            raise ValueError(f"n is {params.n}; at most {most} are allowed ([limits] n)")
        tokenizer = self.tokenizer
        sampling = params.sampling(len(ids), self.service.max_len, tokenizer.vocab_size, tokenizer.end_ids)
        return Job(text, ids, params, sampling)

    # -------------------------------------------------------------------------------------- on the service's loop

    async def generate(
        self, job: Job, on_change: Callable[[Request], None] = lambda request: None, id: str | None = None
    ) -> RequestOutput:
        """One request, from its turn to its end. Raises RequestRejected, StreamFailed, ValueError for an id in use."""
        id = str(next(self._numbers)) if id is None else id
        if id in self._requests:
            raise ValueError(f"request_id {id!r} is in use; choose another")
        async with self._turn:  # so that no two hold some places each and wait for the rest
            for taken in range(job.params.n):
                try:
                    await self._places.acquire()
                except asyncio.CancelledError:
                    self._release(taken)
                    raise
        try:
            while True:
                try:
                    return await self._attempt(job, on_change, id)
                except RequestRejected as refusal:
                    if refusal.status != TOO_MANY or not refusal.retry_after_s:
                        raise
                    await asyncio.sleep(refusal.retry_after_s)  # others fill the queue; it said when to come again
        finally:
            self._release(job.params.n)

    async def _attempt(self, job: Job, on_change: Callable[[Request], None], id: str) -> RequestOutput:
        request = Request(id, job.text, job.ids, job.params, self.tokenizer, self._submit(job), on_change)
        self._requests[id] = request
        try:
            await together([request.follow(sequence) for sequence in request.sequences])
            return request.output()
        finally:
            request.abort()  # a follower that was cancelled before its first step has not cancelled its stream
            del self._requests[id]

    async def generate_all(self, jobs: Sequence[Job], on_done: Callable[[], None]) -> list[RequestOutput]:
        """All outputs in order. The first failure cancels the rest and is raised."""

        async def one(job: Job) -> RequestOutput:
            output = await self.generate(job)
            on_done()
            return output

        outputs: list[RequestOutput] = await together([one(job) for job in jobs])
        return outputs

    async def abort(self, id: str) -> None:
        request = self._requests.get(id)
        if request is not None:
            request.abort()

    def _submit(self, job: Job) -> list[Stream]:
        """Siblings differ by `choice`, which keeps their draws apart under one seed."""
        streams: list[Stream] = []
        for choice in range(job.params.n):
            group: RequestId | None = streams[0].id if streams else None
            sampling = replace(job.sampling, choice=choice)
            if choice > 0:
                sampling = replace(sampling, prompt_logprobs=-1)  # the first has them for all
            streams.append(self.service.client.submit(job.ids, sampling, self._targets, group=group))
        return streams

    def _release(self, places: int) -> None:
        for _ in range(places):
            self._places.release()


def settings(model: str | Path | None, config: Config | str | Path | None, overrides: Mapping[str, Any]) -> Config:
    """The Config to serve with: a file or a Config, the model, and keyword arguments over both.

    A keyword is a section with some of its keys (`kv={"pages": 256}`), `workers=[{"role": "any"}]`, or one of
    SHORT_NAMES. Raises ConfigError.
    """
    given = [f"{key}={_toml(value)}" for key, value in _flat(overrides)]
    if model is not None:
        path = str(Path(model).expanduser().absolute()) if _is_path(model) else ""
        given += [f"model.path={_toml(path)}", f"model.name={_toml('' if path else str(model))}"]
    try:
        if not isinstance(config, Config):
            return load_config(None if config is None else Path(config), given)
        with tempfile.TemporaryDirectory() as folder:  # private, as mkdtemp makes it: there may be a key in it
            file = Path(folder) / "Config"
            file.write_text(print_config(config), encoding="utf-8")
            return load_config(file, given)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--set", "keyword argument", 1)) from None


def _flat(overrides: Mapping[str, Any]) -> list[tuple[str, Any]]:
    pairs = []
    for name, value in overrides.items():
        if name in SHORT_NAMES:
            pairs.append((SHORT_NAMES[name], value))
        elif name == "workers":
            pairs.append((name, value))
        elif isinstance(value, Mapping):
            pairs += [(f"{name}.{key}", entry) for key, entry in value.items()]
        else:
            near = ", ".join(f"{name}=" for name in SHORT_NAMES)
            raise ConfigError(
                f'{name} = {value!r}: give a section of the config with its keys, as kv={{"pages": 256}}, or {near}'
            )
    return pairs


def _is_path(model: str | Path) -> bool:
    return isinstance(model, Path) or Path(model).expanduser().exists() or model.startswith((".", "/", "~"))


def _toml(value: Any) -> str:
    """As it stands in a TOML file. JSON's strings and numbers are TOML's too, save DEL in a string."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, Path):
        value = str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
