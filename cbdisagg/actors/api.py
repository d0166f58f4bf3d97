"""The api's process: the HTTP server and its client of the workers. Neither torch nor transformers.

Life cycle: port and mailbox open -> answers 503 while the workers load -> the first Members that names workers tells
how long a request may be -> the application takes over the same port -> serves until the life ends; asked to leave, it
first finishes what runs. The port is opened first, so that one in use is known at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from functools import partial
from pathlib import Path

from aiohttp import web

from cbdisagg.actors.inbox import Inbox
from cbdisagg.actors.life import Life
from cbdisagg.actors.mailbox import Place
from cbdisagg.actors.placement import worker_names
from cbdisagg.actors.ports import listen, url_of
from cbdisagg.actors.start import Start, read_config
from cbdisagg.api.errors import ApiError, error_response
from cbdisagg.api.server import ModelCard, make_app, make_runner
from cbdisagg.api.service import SERVICE, Service
from cbdisagg.api.tokenizer import Tokenizer, TokenizerError
from cbdisagg.config import Config, ConfigError
from cbdisagg.load import read_api_key
from cbdisagg.messages import Failed, Listening, Progress, Up
from cbdisagg.prepare import served_name

GOODBYE_S = 2.0
"""How long answers in progress may take to end after SIGTERM; shorter than the supervisor's patience."""


async def run_api(life: Life, start: Start, config: Config) -> None:
    """Until the life ends."""
    inbox = Inbox(start.name, start.incarnation, Place.of(config.cluster, Path(start.folder)), config)
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
        inbox.close()


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
    app = make_app(
        config,
        card,
        tokenizer,
        inbox.client,
        api_key=read_api_key(config.http),
        workers=worker_names(config.workers),
        drain=partial(inbox.mailbox.tell, start.supervisor),
    )
    service = app[SERVICE]
    inbox.on_new_leader = lambda: service.renew(read_config(Path(start.folder)))
    runner = make_runner(app, config)
    await runner.setup()
    await web.SockSite(runner, port).start()
    await loading.cleanup()
    inbox.mailbox.tell(start.supervisor, Listening(url_of(config.http, port)))
    life.leave = partial(_leave, life, start, inbox, service)
    try:
        await life.ended
    finally:
        inbox.client.close("the server is shutting down")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await runner.cleanup()
    return None


def _leave(life: Life, start: Start, inbox: Inbox, service: Service) -> None:
    """Nobody is let in any more, and who is inside has `limits.drain_s` to come to an end."""
    inside = service.door.inside
    running = "1 request is running" if inside == 1 else f"{inside} requests are running"
    inbox.mailbox.tell(start.supervisor, Progress(running if inside else "", 0.0))
    life.loop.call_later(service.config.limits.drain_s, life.stop)
    service.door.close(when_empty=life.stop)


async def _not_yet(request: web.BaseRequest) -> web.StreamResponse:
    if request.path == "/health":
        return web.json_response({"status": "ok"})
    refusal = ApiError(503, "not ready: the workers are loading", code="not_ready", retry_after_s=1.0)
    response: web.StreamResponse = error_response(refusal)
    return response
