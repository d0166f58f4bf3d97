"""What a request says of its targets, its tenant and its class reaches the workers; what makes no sense is named."""

from __future__ import annotations

import json

import pytest

from cbdisagg.api.fake import FakeClient
from cbdisagg.config import Config, Targets
from cbdisagg.messages import Finish, Generate

PATH = "/v1/completions"


def ending(client, stream):
    client.give(stream, [9], Finish("length"))


async def asked(serve, headers: dict[str, str] | None = None, config: Config | None = None, **body: object) -> Generate:
    """What is submitted for such a request."""
    http = await serve(FakeClient(ending), **({"config": config} if config else {}))
    status, answer = await http.raw(PATH, json.dumps({"prompt": "rain", **body}).encode(), **(headers or {}))
    assert status == 200, answer
    return http.client.streams[-1].request


async def test_targets_come_from_the_body_then_the_headers_then_the_config(serve):
    config = Config(targets=Targets(ttft_ms=3000, tpot_ms=30))
    headers = {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "12.5"}
    request = await asked(serve, config=config)
    assert (request.targets.ttft_s, request.targets.tpot_s) == (3.0, 0.03)
    request = await asked(serve, headers, config)
    assert (request.targets.ttft_s, request.targets.tpot_s) == (0.25, 0.0125)
    request = await asked(serve, headers, config, ttft_ms=100)
    assert (request.targets.ttft_s, request.targets.tpot_s) == (0.1, 0.0125)


async def test_a_class_is_a_number_of_the_body_or_a_header(serve):
    assert (await asked(serve)).priority == 0
    assert (await asked(serve, {"x-priority": "-7"})).priority == -7
    assert (await asked(serve, {"x-priority": "-7"}, priority=3)).priority == 3


async def test_tenants_are_told_apart_and_not_named(serve):
    """By header, else by user, else by key; nobody in particular otherwise."""
    assert (await asked(serve)).tenant == ""
    key = {"Authorization": "Bearer abc"}
    by_key, by_user = (await asked(serve, key)).tenant, (await asked(serve, key, user="anna")).tenant
    by_name = (await asked(serve, {**key, "x-tenant-id": "acme"}, user="anna")).tenant
    assert len({by_key, by_user, by_name, ""}) == 4
    assert by_user == (await asked(serve, user="anna")).tenant != (await asked(serve, user="abc")).tenant
    assert all(len(tenant) == 16 and "a" * 4 not in tenant for tenant in (by_key, by_user, by_name))
    assert (await asked(serve, user="x" * 5000)).tenant != (await asked(serve, user="x" * 5001)).tenant


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-slo-ttft-ms", "0"),
        ("x-slo-ttft-ms", "-3"),
        ("x-slo-ttft-ms", "fast"),
        ("x-slo-tpot-ms", "nan"),
        ("x-slo-tpot-ms", "inf"),
        ("x-slo-tpot-ms", ""),
        ("x-priority", "high"),
        ("x-priority", "101"),
        ("x-priority", "1.5"),
        ("x-priority", "--1"),
        ("x-priority", "9" * 9000),
    ],
)
async def test_a_header_that_makes_no_sense_is_named(serve, name, value):
    http = await serve(FakeClient(ending))
    status, answer = await http.raw(PATH, b'{"prompt": "rain"}', **{name: value[:2000]})
    assert status == 400 and answer["error"]["param"] == name
    assert answer["error"]["message"].startswith(f"{name} must be ")
    assert not http.client.streams


@pytest.mark.parametrize("body", [{"priority": 101}, {"priority": 1.5}, {"user": 5}])
async def test_a_field_that_makes_no_sense_is_named(serve, body):
    http = await serve(FakeClient(ending))
    status, answer = await http.post(PATH, prompt="rain", **body)
    assert status == 400 and answer["error"]["param"] == next(iter(body))
