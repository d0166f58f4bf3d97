"""A tiny model folder, and the HTTP application around a client without workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tokenizers import Tokenizer as Trained
from tokenizers import decoders, models, pre_tokenizers, trainers

from cbdisagg.api.fake import FakeClient
from cbdisagg.api.server import ModelCard, make_app, make_runner
from cbdisagg.api.tokenizer import Tokenizer
from cbdisagg.config import Config
from cbdisagg.messages import Drain

DEFAULTS = Config()
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["Once upon a time there was a small village by the sea, and a girl walked home in the rain."] * 20
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 400 ids with SmolLM2's special tokens: ids 0 to 2, and 2 ends a sequence."""
    folder = tmp_path_factory.mktemp("model")
    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    trained.save(str(folder / "tokenizer.json"))
    texts = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    vocab = trained.get_vocab_size()
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab, "eos_token_id": 2}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


class Http:
    """A running server and a session to talk to it."""

    def __init__(
        self, runner: web.AppRunner, client: FakeClient, session: aiohttp.ClientSession, drained: list[Drain]
    ) -> None:
        self.url = "http://{}:{}".format(*runner.addresses[0])
        self.runner, self.app, self.client, self.session = runner, runner.app, client, session
        self.drained = drained

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the server run until the condition holds; pytest's time limit is the only clock."""
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)  # what is waited for has no event of its own

    async def post(self, path: str, **body: object) -> tuple[int, dict]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, json.loads(await response.read())

    async def raw(self, path: str, data: bytes, **headers: str) -> tuple[int, dict]:
        headers = {"Content-Type": "application/json"} | headers
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, json.loads(await response.read())

    async def get(self, path: str, **headers: str) -> tuple[int, dict]:
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, json.loads(await response.read())

    async def stream(self, path: str, **body: object) -> list[dict]:
        """The events of a stream that ends well, in order, each checked to be exactly `data: {json}`."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream"
            events = (await response.read()).split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        assert all(event.startswith(b"data: {") and b"\n" not in event for event in events[:-2])
        return [json.loads(event[6:]) for event in events[:-2]]


Serve = Callable[..., Awaitable[Http]]


@pytest.fixture
async def serve(tokenizer: Tokenizer) -> AsyncIterator[Serve]:
    """`await serve(client, config=..., api_key=..., max_len=...)` starts the real application on a free port."""
    runners: list[web.AppRunner] = []
    session = aiohttp.ClientSession()

    async def start(
        client: FakeClient,
        *,
        config: Config = DEFAULTS,
        api_key: str = "",
        max_len: int = 256,
        host: str = "127.0.0.1",
    ) -> Http:
        card = ModelCard("tiny", max_len, tokenizer.vocab_size, 1_700_000_000)
        drained: list[Drain] = []
        app = make_app(
            config,
            card,
            tokenizer,
            client,  # type: ignore[arg-type]  # a fake client
            api_key=api_key,
            workers=("prefill-0", "decode-0"),
            drain=drained.append,
        )
        runner = make_runner(app, config, grace_s=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, host, 0).start()
        return Http(runner, client, session, drained)

    yield start
    await session.close()
    for runner in runners:
        await runner.cleanup()
