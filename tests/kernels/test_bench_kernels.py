"""`cbdisagg bench kernels`: what is compared with what, and what the table and the JSON show."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
import torch
from cbdisagg_bench import kernels, kernels_others, limits
from cbdisagg_kernels.native import Native
from rich.console import Console
from typer import BadParameter

ROW = kernels.Row("bfloat16", "qkv", 960, 576, 8, 39.0, 102.4, 28.4, 0.9472, 226.9, 0.4837)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_rates_are_set_against_limits_of_the_same_rounds(library: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COLD_BYTES", 3 * 64 * 128 * 2)
    for module in (kernels, limits):
        monkeypatch.setattr(module, "seconds", lambda call: (call(), 1.0)[1])  # everything takes a second
    pair = kernels.Pair(library, "bfloat16", 64, 128)
    row = pair.measure("some", 5, limits.Limits(library, threads=1), repeat=2)
    assert row.native_us == row.torch_us == pytest.approx(1e6 / 3)
    assert row.gb_per_s == pytest.approx(3 * 64 * 128 * 2 / 1e9)
    assert row.gop_per_s == pytest.approx(3 * 2 * 5 * 64 * 128 / 1e9)
    assert row.dram == pytest.approx(3 * 64 * 128 * 2 / limits.READ_BYTES)
    assert row.peak < 1


def test_operations_of_the_peak(library: Native) -> None:
    """Two for each number of each lane of each chain; words of four bytes hold 1, 2 or 4 numbers."""
    machine = limits.Limits(library, threads=1)
    one, two, four = (machine.multiply(number, 3, 1) for number in (0, 1, 2))
    assert (two, four) == (2 * one, 4 * one)
    lanes = {"native-avx512": 16, "native-avx2": 8}.get(library.name, 4)
    assert one in (12 * lanes * 2, 8 * lanes * 2)


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library: Native) -> None:
    asked = []

    def measure(*arguments: object) -> Iterator[kernels.Row]:
        asked.append(arguments)
        yield ROW

    monkeypatch.setattr(kernels, "measure", measure)
    monkeypatch.setattr(kernels, "native", lambda: library)
    kernels.kernels("int8, bfloat16", "head,qkv", "1,64", threads=1, repeat=3, only="products", as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert asked == [(library, ["int8", "bfloat16"], ["head", "qkv"], [1, 64], 1, 3)]
    assert (report["command"], report["kernels"], report["threads"]) == ("kernels", library.name, 1)
    assert report["rows"][0]["native_us"] == 39.0


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_other_kernels_beside_their_references(library: Native, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The two forms of each case compute the same, but for the rounding."""
    monkeypatch.setattr(kernels_others, "COLD_BYTES", 1)
    cases = [
        *kernels_others.attention_cases(library, kind, 1),
        *kernels_others.small_cases(library, kind, 1),
        *kernels_others.draw_cases(library, 1),
    ]
    assert {case.kernel for case in cases} >= {"attention", "rope, write", "RMSNorm", "SiLU x mul", "argmax", "draw"}
    tolerance = 3e-2 if kind == "bfloat16" else 1e-4
    for case in cases:
        mine, its = case.native(0), case.reference(0)
        if isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)
        elif case.kernel != "logprobs":
            assert mine == its, case


def test_attention_is_set_against_what_bounds_it(library: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernels_others, limits):
        monkeypatch.setattr(module, "seconds", lambda call: (call(), 1.0)[1])  # everything takes a second
    machine = limits.Limits(library, threads=1)
    read = kernels_others.Case("float32", "attention", "", 4, 2, lambda n: None, lambda n: None, nbytes=1e9)
    row = kernels_others.compare(read, machine, repeat=2)
    assert (row.native_us, row.us_per_row, row.rate, row.unit) == (0.25e6, 0.125e6, 4.0, "GB/s")
    assert row.limit == pytest.approx(4e9 / limits.READ_BYTES)
    multiply = kernels_others.Case("float32", "", "", 1, 1, lambda n: None, lambda n: None, operations=2e9)
    assert kernels_others.compare(multiply, machine, repeat=2).unit == "Gop/s"
    assert kernels_others.compare(kernels_others.Case(*("",) * 3, 1, 1, print, print), machine, 2).limit is None


def test_table_fits_80_columns(library: Native) -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(kernels._table([ROW], library, threads=2))
    assert all(len(line) <= 80 for line in out.getvalue().splitlines())
    other = kernels_others.OtherRow(
        "bfloat16", "rope, write", "512 + 256", 11437.0, 22222.0, 115.61, 333, "Gop/s", 0.71
    )
    Console(file=out, width=80).print(kernels_others.others_table([other], "title"))
    assert all(len(line) <= 80 and "…" not in line for line in out.getvalue().splitlines())
    assert " bfloat16 qkv 8 39 102 2.63 28.4 95% 227 48%" in " ".join(out.getvalue().split())


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    for option, value in (("kinds", "int4"), ("shapes", "tail"), ("rows", "0")):
        with pytest.raises(BadParameter, match=value):
            kernels.kernels(**{"kinds": "int8", "shapes": "qkv", "rows": "1", option: value})
    monkeypatch.setattr(kernels, "native", lambda: None)
    with pytest.raises(BadParameter, match="no native kernels"):
        kernels.kernels("int8", "qkv", "1")
