"""Settings: what is refused in which words, what the files in configs/ say, and that a printed Config loads again."""

from __future__ import annotations

import logging
import os
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cbdisagg.config import EMBEDDED_MODEL, Config, ConfigError, Http, Kv, Model, Policy, Scheduler, Workers
from cbdisagg.load import SECTIONS, cache_folder, load_config, print_config, read_api_key, resolve
from cbdisagg.validate import RANGES, cautions, parse_cpus, problems, validate

CONFIGS = Path(__file__).parents[1] / "configs"
CORES = frozenset(range(4))


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages and limits must not depend on the machine that runs the tests."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: CORES)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    """The line with which a file is refused, without the folder of the file."""
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(f"{tmp_path}/", "")


REFUSED = {
    # unknown names: the nearest of the section, of another section, of all
    "[kv]\npage_sise = 16": "x.toml: [kv] page_sise = 16: unknown key; did you mean page_size?",
    "[[workers]]\ncuont = 1": "x.toml: [workers.0] cuont = 1: unknown key; did you mean count?",
    "[kv]\nqueue_limit = 1": "x.toml: [kv] queue_limit = 1: unknown key; did you mean [policy] queue_limit?",
    "[kv]\nzzz = 1": "x.toml: [kv] zzz = 1: unknown key; the nearest is page_size; "
    "keys here: page_size, pages, memory_mb, prefix_cache, allocator",
    "[polcy]\nmode = 'auto'": 'x.toml: polcy = {"mode": "auto"}: unknown section; did you mean [policy]?',
    "[worker]\ncount = 1": 'x.toml: worker = {"count": 1}: unknown section; did you mean [[workers]]?',
    "port = 80": "x.toml: port = 80: unknown key; did you mean [http] port?",
    "zzz = 80": "x.toml: zzz = 80: unknown key; it belongs below a [section]",
    # wrong types
    "[kv]\npage_size = '16'": 'x.toml: [kv] page_size = "16": wrong type; want an integer',
    "[kv]\npage_size = 16.0": "x.toml: [kv] page_size = 16.0: wrong type; want an integer",
    "[kv]\nprefix_cache = 1": "x.toml: [kv] prefix_cache = 1: wrong type; want true or false",
    "[http]\nport = true": "x.toml: [http] port = true: wrong type; want an integer",
    "[http]\nhost = 1": "x.toml: [http] host = 1: wrong type; want a string",
    "[targets]\nttft_ms = '1s'": 'x.toml: [targets] ttft_ms = "1s": wrong type; want a number',
    "[targets]\nttft_ms = 2026-01-01": 'x.toml: [targets] ttft_ms = "2026-01-01": wrong type; want a number',
    "kv = 3": "x.toml: kv = 3: wrong type; want a section, [kv] and its keys below",
    "[workers]\ncount = 1": 'x.toml: workers = {"count": 1}: wrong type; want a list: [[workers]], once for each group',
    # choices
    "[policy]\nmode = 'atuo'": 'x.toml: [policy] mode = "atuo": not allowed; want "auto" or "aggregate" or '
    '"disaggregate"; did you mean "auto"?',
    "[[workers]]\nrole = 'both'": 'x.toml: [workers.0] role = "both": not allowed; want "prefill" or "decode" or "any"',
    # values
    "[http]\nport = 65536": "x.toml: [http] port = 65536: must be from 0 to 65535",
    "[targets]\ntpot_ms = 0": "x.toml: [targets] tpot_ms = 0.0: must be from 0.1 to 600000",
    "[targets]\nttft_ms = nan": "x.toml: [targets] ttft_ms = NaN: must be from 1 to 3600000",
    "[targets]\nttft_ms = inf": "x.toml: [targets] ttft_ms = Infinity: must be from 1 to 3600000",
    "[kv]\npage_size = 24": "x.toml: [kv] page_size = 24: must be a power of two from 8 to 128",
    "[kv]\npages = -1": "x.toml: [kv] pages = -1: must be from 0 to 1073741824",
    "[limits]\nn = 0": "x.toml: [limits] n = 0: must be from 1 to 1024",
    "[model]\nserved_name = 'a b'": 'x.toml: [model] served_name = "a b": must have no white space',
    "[http]\nhost = ''": 'x.toml: [http] host = "": must be an address or a name, as "127.0.0.1"',
    "[[workers]]\ncount = 0": "x.toml: [workers.0] count = 0: must be from 1 to 256",
    "[[workers]]\nthreads = 5": "x.toml: [workers.0] threads = 5: must be from 0 (shared out) to 4, "
    "the cores of this machine",
    "[[workers]]\ndevice = 'tpu'": 'x.toml: [workers.0] device = "tpu": must be "cpu" or a GPU, as "cuda:0"',
    "[[workers]]\ndevice = 'cuda'": 'x.toml: [workers.0] device = "cuda": must be "cpu" or a GPU, as "cuda:0"',
    "[[workers]]\ndevice = 'cuda:00'": 'x.toml: [workers.0] device = "cuda:00": must be "cpu" or a GPU, as "cuda:0"',
    "[[workers]]\nmemory_fraction = 0.5": "x.toml: [workers.0] memory_fraction = 0.5: is for GPUs; on a CPU set "
    "[kv] memory_mb",
    "[[workers]]\ndevice = 'cuda:1'\nmemory_fraction = 0.6\ncount = 2": "x.toml: [workers.0] memory_fraction = 0.6: "
    "the workers on cuda:1 would take 1.20 of its memory; at most 1",
    "[[workers]]\ndevice = 'cuda:0'\nmemory_fraction = -1.0": "x.toml: [workers.0] memory_fraction = -1.0: must be "
    "from 0 (shared evenly) to 1",
    "[[workers]]\nrole = 'any'\n[[workers]]\ndevice = 'cuda:0'": 'x.toml: [workers.1] device = "cuda:0": other workers '
    'are on "cpu", another kind of device: pages of one mean nothing to the other',
    "[[workers]]\ndevice = 'cuda:0'\n[[workers]]\ndevice = 'cpu'\nmemory_fraction = 0.5": "x.toml: [workers.1] device "
    '= "cpu": other workers are on "cuda:0", another kind of device: pages of one mean nothing to the other',
    "[model]\ndtype = 'float16'": 'x.toml: [model] dtype = "float16": is for GPUs; CPUs compute '
    '"bfloat16" and "float32"',
    "[model]\nweights = 'int8'\n[[workers]]\ndevice = 'cuda:0'": 'x.toml: [model] weights = "int8": is for CPUs; on '
    'GPUs only "same" is there',
    "[transfer]\nkind = 'cuda_ipc'": 'x.toml: [transfer] kind = "cuda_ipc": is for GPUs; on CPUs there are "shm" and '
    '"zmq"',
    "[transfer]\nkind = 'shm'\n[[workers]]\ndevice = 'cuda:0'": 'x.toml: [transfer] kind = "shm": is for CPUs; on GPUs '
    'there are "cuda_ipc" and "zmq"',
    "workers = []": "x.toml: workers = []: at least one group of workers is needed",
    # pinning
    "[[workers]]\ncpus = '2-9'": 'x.toml: [workers.0] cpus = "2-9": core 4 is not there; usable cores: 0-3',
    "[[workers]]\ncpus = 'a'": "x.toml: [workers.0] cpus = \"a\": 'a' is neither a core nor a range of cores; "
    'write "0,2-3", "none", or "" to let serve choose',
    "[[workers]]\ncpus = '1,1'": 'x.toml: [workers.0] cpus = "1,1": a core is named twice; '
    'write "0,2-3", "none", or "" to let serve choose',
    "[[workers]]\ncpus = '0-1'\n[[workers]]\ncpus = '1'": 'x.toml: [workers.1] cpus = "1": '
    "core 1 is pinned by [workers.0] too",
    "[[workers]]\ncount = 2\nthreads = 2\ncpus = '0-2'": 'x.toml: [workers.0] cpus = "0-2": '
    "3 cores for 2 workers of 2 threads; name at least 4",
    "[[workers]]\ncount = 2\ncpus = '0-2'": 'x.toml: [workers.0] cpus = "0-2": '
    "3 cores cannot be shared evenly by 2 workers",
    # contradictions
    "[model]\npath = '/m'\nname = 'o/m'": 'x.toml: [model] name = "o/m": [model] path is given too; '
    "keep one of the two",
    "[kv]\npages = 8\nmemory_mb = 8": "x.toml: [kv] memory_mb = 8: [kv] pages is given too; keep one of the two",
    "[kv]\npages = 6\n[model]\nmax_len = 97": "x.toml: [kv] pages = 6: must be at least 7 for [model] max_len = 97: "
    "one request must fit in the pool",
    "[[workers]]\nrole = 'prefill'": 'x.toml: [workers.0] role = "prefill": no worker is there to decode; '
    'add role "decode" or "any"',
    "[[workers]]\nrole = 'decode'": 'x.toml: [workers.0] role = "decode": no worker is there to prefill; '
    'add role "prefill" or "any"',
    "[policy]\nmode = 'disaggregate'\n[[workers]]": 'x.toml: [policy] mode = "disaggregate": needs two workers, '
    "one to prefill and one to decode; there is 1",
    "[policy]\npin_prefill = 2": "x.toml: [policy] pin_prefill = 2: must be at most 1, the workers whose role is not "
    '"decode"',
    "[policy]\npin_decode = 2\n[[workers]]\ncount = 2": "x.toml: [policy] pin_decode = 2: must be at most 1: some "
    "worker has to prefill",
    "[policy]\npin_decode = 2\npin_prefill = 2\n[[workers]]\ncount = 3": "x.toml: [policy] pin_decode = 2: with "
    "pin_prefill = 2 must be at most 1: there are 3 workers",
    "[policy]\npin_decode = 1\nmode = 'aggregate'": "x.toml: [policy] pin_decode = 1: must be 0 with mode = "
    '"aggregate": there each worker does both',
    "[scheduler]\nmax_batch = 65\ntoken_budget = 64": "x.toml: [scheduler] token_budget = 64: must be at least "
    "[scheduler] max_batch = 65: each running sequence takes one token of a step",
    "[scheduler]\nbatching = 'static'": 'x.toml: [scheduler] batching = "static": needs [kv] allocator = '
    '"reserve-max": a static batch reserves what a sequence can need',
    "[scheduler]\nstatic_length = 5": "x.toml: [scheduler] static_length = 5: has an effect with [scheduler] "
    'batching = "static-global" only',
    "[kv]\nallocator = 'reserve-max'": 'x.toml: [kv] allocator = "reserve-max": needs one worker, or [policy] mode = '
    '"aggregate", and no role but "any": it cannot hand requests over',
    "[cluster]\nadvertise = 'a'": 'x.toml: [cluster] advertise = "a": has no effect without [cluster] bind, '
    "which switches to tcp",
    "[cluster]\nbind = '10.0.0.1'": 'x.toml: [cluster] bind = "10.0.0.1": tcp needs [cluster] curve_keys, '
    "a folder with cbdisagg.key and cbdisagg.key_secret",
    # files that keys name
    "[http]\napi_key_file = '/nowhere/key'": 'x.toml: [http] api_key_file = "/nowhere/key": cannot be used: '
    "No such file or directory",
    "[cluster]\nbind = '10.0.0.1'\ncurve_keys = '/nowhere'": 'x.toml: [cluster] curve_keys = "/nowhere": '
    "cbdisagg.key in it cannot be read",
    "[debug]\njournal = '/dev/null'": 'x.toml: [debug] journal = "/dev/null": must be a folder; this is a file',
    # TOML itself
    "[kv]\npages = 1\npages = 2": "x.toml: line 3: pages = 2: this key was given before",
    "[kv]\npages =": "x.toml: line 2: pages =: not valid TOML: Invalid value",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals_name_file_key_value_and_what_would_be_right(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path, text) == REFUSED[text]


BAD_OVERRIDES = {
    "kv.page_sise=16": "--set: [kv] page_sise = 16: unknown key; did you mean page_size?",
    "kv.page_size=x": '--set: [kv] page_size = "x": wrong type; want an integer',
    "kv.page_size=20": "--set: [kv] page_size = 20: must be a power of two from 8 to 128",
    "kv.page_size": "--set kv.page_size: write section.key=value, as kv.page_size=16",
    "page_size=16": "--set page_size=16: no such key; did you mean [kv] page_size?",
    "workers.count=2": "--set workers.count=2: no such key; did you mean [[workers]] count?",
    "workers.2.count=1": "--set workers.2.count=1: there are 2 groups of workers, numbered from workers.0",
    "workers.1.count=x": '--set: [workers.1] count = "x": wrong type; want an integer',
    "workers=3": "--set: workers = 3: wrong type; want a list: [[workers]], once for each group",
}


@pytest.mark.parametrize("override", BAD_OVERRIDES)
def test_refused_overrides(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert str(caught.value) == BAD_OVERRIDES[override]


def test_the_same_override_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--set http\.port=2: this key was given before"):
        load_config(None, ["http.port=1", "http.port=2"])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    with pytest.raises(ConfigError, match=r"latin\.toml: is not UTF-8"):
        load_config(tmp_path / "latin.toml")


def test_an_api_key_is_never_shown(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("abc")
    line = refusal(tmp_path, f"[http]\napi_key = 'hush'\napi_key_file = '{key_file}'")
    assert "keep one of the two" in line and "hush" not in line
    assert "hush" not in refusal(tmp_path, "[http]\napi_key = ['hush']")


def test_no_file_gives_the_defaults() -> None:
    assert load_config() == Config()


def test_later_sources_win(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[http]\nport = 1\nhost = '::1'\n[targets]\nttft_ms = 5")
    config = load_config(path, ["http.port=2", "policy.mode=aggregate", "workers.1.cpus=0", "model.served_name='x'"])
    assert (config.http, config.targets.ttft_ms, config.policy.mode) == (Http("::1", 2), 5.0, "aggregate")
    assert config.workers == (Workers("prefill"), Workers("decode", cpus="0"))
    assert config.model == Model(name=EMBEDDED_MODEL, served_name="x")
    whole = load_config(path, ['workers=[{role = "any", count = 2}]'])
    assert whole.workers == (Workers("any", 2),)


def test_an_override_takes_the_place_of_the_file_s_other_way_to_say_it(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[model]\nname = 'smollm2'\n[kv]\nmemory_mb = 64")
    config = load_config(path, ["model.path=/m", "kv.pages=4096"])
    assert (config.model, config.kv) == (Model(path="/m"), Kv(pages=4096))
    assert load_config(path, ["kv.pages=0"]).kv == Kv(memory_mb=64)
    with pytest.raises(ConfigError, match="keep one of the two"):
        load_config(path, ["kv.pages=4096", "kv.memory_mb=1"])


def test_validate_checks_a_config_that_was_made_in_python() -> None:
    validate(Config(), CORES)
    with pytest.raises(ConfigError, match=r"\[kv\] page_size = 7: must be from 8 to 128"):
        validate(Config(kv=Kv(page_size=7)), CORES)
    with pytest.raises(ConfigError, match=r"\[policy\] mode"):
        validate(Config(workers=(Workers(),), policy=Policy(mode="disaggregate")), CORES)


def test_an_open_address_without_a_key_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(None, ["http.host=0.0.0.0"])
    assert "everyone who can reach this address" in caplog.text
    assert not cautions(Config(http=Http(host="0.0.0.0", api_key="k")))
    assert not any(cautions(Config(http=Http(host=host))) for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"))


def test_every_number_has_a_range() -> None:
    numbers = {
        f"{section}.{item.name}"
        for section, kind in SECTIONS.items()
        if section != "workers"
        for item in msgspec.structs.fields(kind)
        if item.type in (int, float)
    }
    assert numbers == RANGES.keys()


@pytest.mark.parametrize(("text", "cores"), [("0", (0,)), ("0,2-3", (0, 2, 3)), (" 3 , 0-1", (0, 1, 3)), ("5-5", (5,))])
def test_core_lists(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cores


@pytest.mark.parametrize("text", ["", ",", "1-", "-1", "2-1", "0,0", "0-9999999", "²", "1 2"])
def test_what_is_no_core_list(text: str) -> None:
    with pytest.raises(ValueError, match="core"):
        parse_cpus(text)


# ----------------------------------------------------------------------------------------------- files in configs/


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_config_files_load_say_what_they_are_for_and_comment_every_key(path: Path) -> None:
    load_config(path)
    text = path.read_text()
    assert text.startswith("# ") and len(text.split("\n\n")[0].split()) > 15
    given_keys = tomllib.loads(text)
    for section, kind in SECTIONS.items():
        for table in given_keys[section] if section == "workers" else [given_keys[section]]:
            fields = Workers if section == "workers" else kind
            assert set(table) == {item.name for item in msgspec.structs.fields(fields)}, section
    lines = [line for line in text.splitlines() if " = " in line and not line.startswith("#")]
    assert all("# " in line.split(" = ", 1)[1] for line in lines)


def test_the_config_files_are_those_of_the_readme_and_differ_as_they_say() -> None:
    files = {path.stem: load_config(path) for path in CONFIGS.glob("*.toml")}
    assert files.keys() == {"1p1d", "2p2d", "colocated", "gpu-1p1d", "gpu-2p2d"}
    assert [(each.role, each.device) for each in files["gpu-1p1d"].workers] == [
        ("prefill", "cuda:0"),
        ("decode", "cuda:0"),
    ]
    assert [each.device for each in files["gpu-2p2d"].workers] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert all((config.transfer.floor_gbps > 0) == name.startswith("gpu-") for name, config in files.items())
    assert files["1p1d"] == Config()
    assert files["2p2d"] == Config(workers=(Workers("prefill", 2), Workers("decode", 2)))
    assert files["colocated"] == Config(workers=(Workers("any"),))
    latency, throughput = (
        load_config(CONFIGS / "tuned" / f"{name}.toml") for name in ("chat-latency", "batch-throughput")
    )
    assert latency.targets.ttft_ms < Config().targets.ttft_ms < throughput.targets.ttft_ms
    assert latency.targets.tpot_ms < Config().targets.tpot_ms < throughput.targets.tpot_ms


# --------------------------------------------------------------------------------------------------- print_config


def value(kind: Any, key: str) -> st.SearchStrategy[Any]:
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    low, high = RANGES[key]
    return st.integers(int(low), int(high)) if kind is int else st.floats(low, high)


def section(name: str, kind: Any, /, **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    free = {item.name: value(item.type, f"{name}.{item.name}") for item in msgspec.structs.fields(kind)}
    return st.builds(kind, **(free | fixed))


nothing, text = st.just(""), st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
dtypes = st.sampled_from(["float32", "bfloat16"])
models = st.one_of(
    section(
        "model",
        Model,
        name=text.filter(bool),
        path=nothing,
        served_name=st.sampled_from(["", "名", "a/b"]),
        dtype=dtypes,
    ),
    section("model", Model, name=nothing, path=text.filter(bool), served_name=nothing, dtype=dtypes),
)
groups = st.builds(
    Workers, st.sampled_from(["prefill", "decode", "any"]), st.integers(1, 3), st.just("cpu"), st.integers(0, 4)
)
configs = st.builds(
    Config,
    model=models,
    targets=section("targets", SECTIONS["targets"]),
    workers=st.lists(groups, min_size=1, max_size=3).map(tuple),
    kv=section("kv", Kv, page_size=st.sampled_from([8, 16, 32, 64, 128]), pages=st.just(0), allocator=st.just("paged")),
    scheduler=section("scheduler", Scheduler, batching=st.just("continuous"), static_length=st.just(0)),
    policy=section("policy", Policy, pin_prefill=st.just(0), pin_decode=st.just(0)),
    transfer=section("transfer", SECTIONS["transfer"], kind=st.sampled_from(["auto", "shm", "zmq"])),
    http=section("http", Http, api_key_file=nothing),
    limits=section("limits", SECTIONS["limits"]),
    cluster=st.just(SECTIONS["cluster"]()),
    debug=section("debug", SECTIONS["debug"], journal=nothing),
)


@settings(max_examples=60, deadline=None)
@given(configs)
def test_a_printed_config_loads_to_the_same_config(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    assume(not list(problems(config, CORES)))
    path = tmp_path_factory.mktemp("printed") / "x.toml"
    path.write_text(print_config(config), encoding="utf-8", newline="")
    assert load_config(path) == config


def test_a_printed_config_tells_defaults_and_sources(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[kv]\npages = 2048")
    resolved = resolve(path, ["http.port=9"])
    lines = print_config(resolved.config, resolved.origins).splitlines()
    assert "page_size = 16 # default" in lines
    assert f"pages = 2048 # {path}; default 0" in lines
    assert "port = 9 # --set; default 8000" in lines
    assert 'role = "prefill" # default' in lines
    assert "port = 9 # set; default 8000" in print_config(resolved.config).splitlines()


# ---------------------------------------------------------------------------------------------------- environment


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("CBDISAGG_CACHE", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "cbdisagg"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/cbdisagg")
    monkeypatch.setenv("CBDISAGG_CACHE", "~/c")
    assert cache_folder() == tmp_path / "c"


def test_the_api_key_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("s3cret \nnot this\n")
    assert read_api_key(Http(api_key_file=str(path))) == "s3cret"
    assert read_api_key(Http(api_key="k")) == "k"
    path.write_text("\nx")
    assert "its first line is empty" in refusal(tmp_path, f"[http]\napi_key_file = '{path}'")


def test_a_profile_named_in_a_file_is_looked_for_from_the_file_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the service is started; one named by --set from where that is."""
    for folder in ("configs", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "costs.json").write_text("{}")
    file = tmp_path / "configs" / "a.toml"
    file.write_text('[profile]\npath = "../costs.json"\n')
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(file).profile.path == str(tmp_path / "costs.json")
    assert load_config(Path("../configs/a.toml")).profile.path == str(tmp_path / "costs.json")
    assert load_config(None, ["profile.path=../costs.json"]).profile.path == "../costs.json"
    with pytest.raises(ConfigError, match=r"profile\.path = 'costs\.json'|costs\.json.*cannot be read"):
        load_config(file, ["profile.path=costs.json"])
