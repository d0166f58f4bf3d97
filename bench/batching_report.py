"""The report: one HTML page that needs nothing else, with pictures, tables, factors, checks, caveats and its origin."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path

import cbdisagg_bench.pictures.style  # noqa: F401  # chooses matplotlib's backend before anybody draws
from cbdisagg_bench.batching_golden import COLUMNS, FOUR, SEVEN, SLOTS, golden
from cbdisagg_bench.batching_outcome import Report
from cbdisagg_bench.batching_run import Results
from cbdisagg_bench.batching_tables import Rows
from cbdisagg_bench.batching_theory import CAVEATS, static_batch
from cbdisagg_bench.pictures.batch import draw_batch, draw_roofline
from cbdisagg_bench.pictures.grids import iteration_grid, slots_of, token_grid
from cbdisagg_bench.pictures.latency import draw_cdfs, draw_phases, draw_tails
from cbdisagg_bench.pictures.memory import draw_memory
from cbdisagg_bench.pictures.slots import Panel, draw_slots
from cbdisagg_bench.pictures.throughput import draw_throughput
from cbdisagg_bench.trace import chrome_events

STEPS_SHOWN = 40
SLOTS_SHOWN = 24
TITLES = {
    "throughput": "Throughput against the cap: the longer answers can be, the more static batches wait",
    "golden": "The article's picture: four sequences in a static batch, and seven in continuous batching",
    "golden_iterations": "The same by iteration: a slot works for somebody, or it does not",
    "slots": "The first steps of this run, static on the left, continuous on the right",
    "memory": "KV memory: what each allocator keeps for what",
    "batch": "The batch that memory allows",
    "roofline": "Why a larger batch pays: tokens per second against tokens in a step",
    "latency_cdf": "End-to-end latency",
    "latency_phases": "Waiting, prefill, decode",
    "tails": "First tokens against gaps: chunk sizes, and disaggregation",
}
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0;font-size:13px}td,th{padding:.2em .7em;border-bottom:1px solid #ddd;
text-align:right}td:first-child,th:first-child{text-align:left}figure{margin:2em 0}img{max-width:100%}
.bad{color:#b00020;font-weight:bold}.note{color:#666;font-size:13px}pre{background:#f5f5f5;padding:1em;overflow:auto}"""


def write_report(report: Report, folder: Path) -> Path:
    """`report.html`, `tables.md`, `results.json`, `pictures/`; the largest cap's S3 as `trace.json` for Perfetto."""
    pictures = folder / "pictures"
    names = draw_all(report, pictures)
    (folder / "results.json").write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    (folder / "tables.md").write_text(_markdown(report), encoding="utf-8")
    for (cap, name), run in report.results.runs.items():
        if name == "S3" and cap == report.results.caps[-1]:
            events = chrome_events(run.burst.trace, f"S3, cap {cap}")
            (folder / "trace.json").write_text(json.dumps(events), encoding="utf-8")
    page = folder / "report.html"
    page.write_text(_page(report, pictures, names), encoding="utf-8")
    return page


def draw_all(report: Report, folder: Path) -> list[str]:
    """The names of what was drawn, in the order of the page."""
    results = report.results
    names = ["golden", "golden_iterations"]
    draw_golden(folder)
    if results.runs:
        names = ["throughput", *names, *_draw_bursts(folder, results, results.caps[-1])]
    if any(not one.rate.fraction for one in report.latencies):
        draw_cdfs(folder, report.latencies, results.scale)
        names.append("latency_cdf")
    if report.latencies:
        draw_phases(folder, report.latencies, results.scale.name)
        names.append("latency_phases")
    if any(point.gap_p99 for point in report.tails):  # answers of one token have no gaps
        draw_tails(folder, report.tails, report.load, results.scale.name)
        names.append("tails")
    return names


def _draw_bursts(folder: Path, results: Results, cap: int) -> list[str]:
    """The pictures of the bursts; the names of those beside the first, the throughput."""
    names = ["memory", "batch", "roofline"]
    draw_throughput(folder, results)
    if {(cap, "S1"), (cap, "S3")} <= results.runs.keys():
        draw_run_slots(folder, results, cap)
        names.insert(0, "slots")
    draw_memory(folder, results, cap)
    draw_batch(folder, results, cap)
    draw_roofline(folder, results, cap)
    return names


def draw_golden(folder: Path) -> None:
    static, continuous = golden(FOUR, "static").trace.steps, golden(SEVEN, "continuous").trace.steps
    tokens = "token of the slot (T1 to T8)"
    panels = [
        Panel("static", tokens, token_grid(static, SLOTS, COLUMNS)),
        Panel("continuous", tokens, token_grid(continuous, SLOTS, COLUMNS)),
    ]
    draw_slots(folder, "golden", "Tokens of each slot, as the article draws them", panels)
    panels = [
        Panel("static", "iteration", iteration_grid(static, SLOTS)),
        Panel("continuous", "iteration", iteration_grid(continuous, SLOTS)),
    ]
    draw_slots(folder, "golden_iterations", "The same runs by iteration", panels)


def draw_run_slots(folder: Path, results: Results, cap: int) -> None:
    static, paged = (results.runs[cap, name].burst.trace.steps[:STEPS_SHOWN] for name in ("S1", "S3"))
    batch = static_batch(results.scale, cap)
    slots = min(SLOTS_SHOWN, slots_of(paged))
    rest = f"memory for {slots - batch} more,\nreserved for lengths that hardly any answer has"
    panels = [
        Panel(f"S1, a static batch of {batch}", "iteration", iteration_grid(static, min(SLOTS_SHOWN, batch)), rest),
        Panel("S3, continuous and paged", "iteration", iteration_grid(paged, slots)),
    ]
    title = f"The first {STEPS_SHOWN} steps, cap {cap}, scale {results.scale.name}: the same KV memory for both"
    draw_slots(folder, "slots", title, panels)


def _page(report: Report, pictures: Path, names: Sequence[str]) -> str:
    figures = "".join(
        f"<figure><h2>{html.escape(TITLES[name])}</h2><img alt='{name}' src='data:image/png;base64,"
        f"{base64.b64encode((pictures / f'{name}.png').read_bytes()).decode()}'></figure>"
        for name in names
    )
    checks = "".join(
        f"<li>holds: {html.escape(check.text)}</li>"
        if check.holds
        else f"<li class='bad'>FAILS: {html.escape(check.text)}</li>"
        for check in report.checks
    )
    caveats = "".join(f"<li>{html.escape(text)}</li>" for text in CAVEATS)
    tables = "".join(map(_table, report.tables))
    made = html.escape(json.dumps(report.origin, indent=1))
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Static, continuous, paged, disaggregated</title>"
        f"<style>{STYLE}</style><h1>Static, continuous, paged, disaggregated: what batching gives</h1>"
        f"<p>{html.escape(_summary(report))}</p>{figures}<h2>Tables</h2>{tables}"
        f"<h2>What must hold</h2><ul>{checks}</ul><h2>Read this with it</h2><ul>{caveats}</ul>"
        f"<h2>How it was made</h2><pre>{made}</pre></html>"
    )


def _markdown(report: Report) -> str:
    """The tables and checks, for whoever reads a repository and not a page."""
    told = [f"`{report.origin['command']}`", _summary(report), *(rows.markdown for rows in report.tables)]
    checks = [f"- {'holds' if check.holds else '**FAILS**'}: {check.text}" for check in report.checks]
    return "\n\n".join(told) + "\n### what must hold\n\n" + "\n".join(checks or ["nothing of this part"]) + "\n"


def _summary(report: Report) -> str:
    results = report.results
    text = f"Scale {results.scale.name}, {results.clock} clock, {report.origin['model']}."
    if not results.runs:
        return text
    cap = results.caps[-1]
    text += f" {len(results.requests[cap])} requests in one burst."
    gain, artefact = results.speedup(cap, "S3"), results.speedup(cap, "S0")
    if gain is not None:
        text += f" At the largest cap, continuous batching on pages gives {gain:.2f} times the fair static throughput"
        text += f", and {gain / artefact:.2f} times that of the article's baseline." if artefact else "."
    return text


def _table(rows: Rows) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in rows.columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row) + "</tr>" for row in rows.rows)
    note = f"<p class='note'>{html.escape(rows.note)}</p>" if rows.note else ""
    return f"<h3>{html.escape(rows.title)}</h3><table><tr>{head}</tr>{body}</table>{note}"
