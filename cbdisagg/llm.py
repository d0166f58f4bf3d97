"""The Python API: `LLM` for batches, `AsyncLLM` for streams, by the names and meanings that users know from vLLM.

Both start the same processes as `cbdisagg serve`, without the HTTP server: this process takes its place
(llm_service.py). Requests live on the service's own loop, in its thread (llm_engine.py); callers, of whatever thread or
loop, get plain outputs.

    with LLM("smollm2") as llm:
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from cbdisagg.actors.launch import ServiceFailed
from cbdisagg.api.client import RequestRejected, StreamFailed
from cbdisagg.api.template import TemplateError
from cbdisagg.api.tokenizer import Tokenizer
from cbdisagg.config import Config, ConfigError
from cbdisagg.llm_engine import Engine, Job, Message, Prompt, settings
from cbdisagg.llm_outputs import CompletionOutput, Logprob, Request, RequestOutput
from cbdisagg.llm_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "Logprob",
    "RequestOutput",
    "RequestRejected",
    "SamplingParams",
    "ServiceFailed",
    "StreamFailed",
    "TemplateError",
]


class LLM:
    """A model served by processes of its own, for batches. A context manager; `close` ends the processes.

    `model`: "smollm2" (comes along), a Hugging Face folder, a .gguf file or a hub id; None takes the config's.
    `config`: a TOML file as under configs/, or a Config. Keyword arguments override it: a section with some of its keys
    (`kv={"pages": 256}`), `workers=[...]`, or `dtype`, `weights`, `max_model_len`, `served_model_name` of [model].

    Raises ConfigError or ServiceFailed, one line each, when it cannot start.
    """

    def __init__(
        self, model: str | Path | None = "smollm2", *, config: Config | str | Path | None = None, **overrides: Any
    ) -> None:
        self._engine = Engine(settings(model, config, overrides))
        self._engine.start()

    @property
    def config(self) -> Config:
        return self._engine.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """One output for each prompt, in order. `sampling_params`: one for all, or one for each.

        `use_tqdm` shows a progress bar. Raises ValueError or TypeError for what the model cannot do, before anything
        runs; RequestRejected or StreamFailed when a request fails, after cancelling the others.
        """
        batch = _batch(prompts)
        params = _params(sampling_params, len(batch))
        return self._run([self._engine.job(p, q) for p, q in zip(batch, params, strict=True)], use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """As `generate`, for one chat or several, through the model's chat template. Raises TemplateError as well."""
        options = _chat_options(add_generation_prompt, continue_final_message, chat_template_kwargs)
        chats: Sequence[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        params = _params(sampling_params, len(chats))
        return self._run([self._engine.chat_job(c, q, options) for c, q in zip(chats, params, strict=True)], use_tqdm)

    def close(self) -> None:
        """End the processes; requests in progress, in other threads, fail. Also done when the interpreter ends."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, jobs: list[Job], show: bool) -> list[RequestOutput]:
        with _progress(show, len(jobs)) as advance:
            future = self._engine.service.run(self._engine.generate_all(jobs, advance))
            try:
                return future.result()
            except BaseException:  # also Ctrl-C: nothing goes on behind the caller's back
                future.cancel()
                raise


class AsyncLLM:
    """A model served by processes of its own, for streams. An async context manager; arguments as for `LLM`.

    Works in any running event loop; nothing of it blocks that loop.
    """

    def __init__(
        self, model: str | Path | None = "smollm2", *, config: Config | str | Path | None = None, **overrides: Any
    ) -> None:
        self._engine = Engine(settings(model, config, overrides))

    @property
    def config(self) -> Config:
        return self._engine.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    async def start(self) -> None:
        """Until requests can be served. Raises ConfigError or ServiceFailed, one line each."""
        try:
            await asyncio.to_thread(self._engine.start)
        except BaseException:  # also a cancellation: the thread would go on starting
            await asyncio.shield(self.close())
            raise

    async def close(self) -> None:
        """End the processes; streams in progress fail."""
        await asyncio.to_thread(self._engine.close)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """All that there is of the request so far, again and again; the last one is `finished`.

        One for each token to a reader that keeps up; a slower one sees only the latest. Leaving the loop cancels the
        request. Raises as `LLM.generate`.
        """
        return self._stream(self._engine.job(prompt, sampling_params or SamplingParams()), request_id)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, for a chat. Raises TemplateError as well."""
        options = _chat_options(add_generation_prompt, continue_final_message, chat_template_kwargs)
        return self._stream(self._engine.chat_job(messages, sampling_params or SamplingParams(), options), request_id)

    async def abort(self, request_id: str) -> None:
        """End a request: its stream's last output then has the finish reason "abort". Nothing if it has ended."""
        await asyncio.wrap_future(self._engine.service.run(self._engine.abort(request_id)))

    async def _stream(self, job: Job, id: str | None) -> AsyncIterator[RequestOutput]:
        latest = _Latest(asyncio.get_running_loop())
        future = self._engine.service.run(self._engine.generate(job, latest.put_from_thread, id))
        future.add_done_callback(latest.end_from_thread)
        try:
            while (output := await latest.get()) is not None:
                yield output
        finally:
            future.cancel()


class _Latest:
    """From the service's thread to a reader's loop: the newest output, and the end. Holds one output at most."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._output: RequestOutput | None = None
        self._future: Future[RequestOutput] | None = None
        self._news = asyncio.Event()

    def put_from_thread(self, request: Request) -> None:
        self._call(self._put, request.output())

    def end_from_thread(self, future: Future[RequestOutput]) -> None:
        self._call(self._end, future)

    async def get(self) -> RequestOutput | None:
        """The newest output that has not been given yet; None after the last. Raises what the request has raised."""
        while self._output is None:
            if self._future is not None:
                self._future.result()
                return None
            self._news.clear()
            await self._news.wait()
        output, self._output = self._output, None
        return output

    def _put(self, output: RequestOutput) -> None:
        self._output = output
        self._news.set()

    def _end(self, future: Future[RequestOutput]) -> None:
        self._future = future
        self._news.set()

    def _call(self, function: Callable[[Any], None], value: object) -> None:
        with suppress(RuntimeError):  # the reader's loop has been closed: there is nobody to tell
            self._loop.call_soon_threadsafe(function, value)


def _batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Token ids in a list are one prompt; texts, lists and dicts in a list are several."""
    if isinstance(prompts, (str, Mapping)) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * prompts
    if len(params) != prompts:
        raise ValueError(f"sampling_params has {len(params)} entries for {prompts} prompts; give one, or one for each")
    return list(params)


def _chat_options(add: bool, continue_final: bool, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**(variables or {}), "add_generation_prompt": add, "continue_final_message": continue_final}


@contextmanager
def _progress(show: bool, total: int) -> Iterator[Callable[[], None]]:
    """A function to call, from any thread, when one more prompt is done."""
    if not show:
        yield lambda: None
        return
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    with Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task("prompts", total=total)
        yield lambda: progress.advance(task)
