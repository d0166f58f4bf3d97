"""The api's process: the HTTP server and its client of the workers. Neither torch nor transformers.

Life cycle: port and mailbox open -> answers 503 while the workers load -> the first Members that names workers tells
how long a request may be -> the application takes over the same port -> serves until the life ends. The port is opened
first, so that one in use is known at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path

import msgspec
from aiohttp import web

from cbdisagg.actors.life import Life
from cbdisagg.actors.mailbox import Mailbox, Place
from cbdisagg.actors.ports import listen, url_of
from cbdisagg.actors.start import Start
from cbdisagg.api.client import Client
from cbdisagg.api.errors import ApiError, error_response
from cbdisagg.api.server import ModelCard, make_app, make_runner
from cbdisagg.api.tokenizer import Tokenizer, TokenizerError
from cbdisagg.config import Config, ConfigError
from cbdisagg.load import read_api_key
from cbdisagg.messages import Address, Failed, Lead, Listening, Members, Suspect, ToApi, Up
from cbdisagg.prepare import served_name

GOODBYE_S = 2.0
"""How long answers in progress may take to end after SIGTERM; shorter than the supervisor's patience."""


async def run_api(life: Life, start: Start, config: Config) -> None:
    """Until the life ends."""
    inbox = Inbox(start, config)
    try:
        try:
            port = listen(config.http)
            tokenizer = Tokenizer(Path(start.model))
        except (ConfigError, TokenizerError) as error:
            inbox.mailbox.tell(start.supervisor, Failed(str(error)))
            await life.ended  # the supervisor stops everyone
            return
        inbox.mailbox.tell(start.supervisor, Up(inbox.mailbox.address, "api", os.getpid()))
        await _serve(life, start, config, inbox, port, tokenizer)
    finally:
        inbox.mailbox.close()


async def _serve(
    life: Life, start: Start, config: Config, inbox: Inbox, port: socket.socket, tokenizer: Tokenizer
) -> None:
    loading = web.ServerRunner(web.Server(_not_yet), handle_signals=False)
    await loading.setup()
    await web.SockSite(loading, port.dup()).start()  # of a copy: closing it leaves the port open
    await asyncio.wait((life.ended, inbox.max_len), return_when=asyncio.FIRST_COMPLETED)
    if life.ended.done():
        return life.ended.result()
    card = ModelCard(served_name(config.model), inbox.max_len.result(), tokenizer.vocab_size, int(time.time()))
    runner = make_runner(make_app(config, card, tokenizer, inbox.client, api_key=read_api_key(config.http)), config)
    await runner.setup()
    await web.SockSite(runner, port).start()
    await loading.cleanup()
    inbox.mailbox.tell(start.supervisor, Listening(url_of(config.http, port)))
    try:
        await life.ended
    finally:
        inbox.client.close("the server is shutting down")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await runner.cleanup()
    return None


async def _not_yet(request: web.BaseRequest) -> web.StreamResponse:
    if request.path == "/health":
        return web.json_response({"status": "ok"})
    refusal = ApiError(503, "not ready: the workers are loading", code="not_ready", retry_after_s=1.0)
    response: web.StreamResponse = error_response(refusal)
    return response


class Inbox:
    """The mailbox of an api incarnation and the client behind it. `max_len`: once a worker has said how long."""

    def __init__(self, start: Start, config: Config) -> None:
        decoder: msgspec.msgpack.Decoder[ToApi] = msgspec.msgpack.Decoder(ToApi)
        place = Place.of(config.cluster, Path(start.folder))
        self.mailbox = Mailbox(start.name, start.incarnation, place, decoder)
        self.client = Client(
            start.incarnation, self.mailbox.tell, model=served_name(config.model), page_size=config.kv.page_size
        )
        self.max_len: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._coordinator: Address | None = None
        self.mailbox.start(self._receive, self._lost_messages)

    def _receive(self, sender: Address, message: ToApi) -> None:
        if isinstance(message, Members):
            for _, incarnation in message.dead:
                self.mailbox.forget(incarnation)
            if message.workers and not self.max_len.done():
                self.max_len.set_result(min(info.max_len for info in message.workers))
        elif isinstance(message, Lead):
            if self._coordinator is not None and self._coordinator != message.coordinator:
                self.mailbox.forget(self._coordinator.incarnation)
            self._coordinator = message.coordinator
        self.client.receive(sender, message)

    def _lost_messages(self, sender: Address) -> None:
        if self._coordinator is not None:
            suspect = Suspect(sender.name, sender.incarnation, "messages of it were lost")
            self.mailbox.tell(self._coordinator, suspect)
