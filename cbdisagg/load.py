"""From TOML, `--set` and the environment to a Config that can be served: the only reader of the three.

A value is taken from the last of: the default, the file, the overrides. Everything given has an effect or is refused,
by one line that names the source, the key, the value and the nearest valid key or the values allowed.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Struct

from cbdisagg.config import EMBEDDED_MODEL, Config, ConfigError, Http, Workers
from cbdisagg.validate import ONE_OF, Problem, cautions, problems, show

log = logging.getLogger(__name__)

Table = dict[str, Any]
NO_OPTIONS: Mapping[str, Sequence[str]] = MappingProxyType({})
CURVE_FILES = ("cbdisagg.key", "cbdisagg.key_secret")
TYPES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
SECTIONS = {item.name: item.type for item in msgspec.structs.fields(Config)}
KEYS: dict[str, dict[str, Any]] = {
    name: {item.name: item.type for item in msgspec.structs.fields(Workers if name == "workers" else kind)}
    for name, kind in SECTIONS.items()
}
"""section -> key -> type of its value"""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A Config, and which of its keys (dotted) were given where; the others have their defaults."""

    config: Config
    origins: Mapping[str, str]


def load_config(
    path: Path | None = None, overrides: Sequence[str] = (), options: Mapping[str, Sequence[str]] = NO_OPTIONS
) -> Config:
    """The Config of a TOML file (None: the defaults, 1 prefill + 1 decode worker) with "section.key=value" overrides.

    `options`: overrides that came by options of their own; {"--port": ["http.port=80"]} is blamed on --port.
    Raises ConfigError. What is allowed but rarely wanted is logged as a warning.
    """
    config = resolve(path, overrides, options).config
    for line in cautions(config):
        log.warning(line)
    return config


def resolve(
    path: Path | None = None, overrides: Sequence[str] = (), options: Mapping[str, Sequence[str]] = NO_OPTIONS
) -> Resolved:
    """As `load_config`, silently, and with the origin of each value for `print_config`."""
    tables = _read_toml(path) if path else {}
    if path:
        _settle_profile(tables, path.expanduser().parent)
    origins = {key: str(path) for key in _given(tables)}
    for source, given in {**options, "--set": overrides}.items():
        for override in given:
            _override(tables, origins, override, source, str(path))
    try:
        config = _build(tables)
        for problem in problems(config, os.sched_getaffinity(0)):
            raise _Refused(problem)
        for problem in _file_problems(config):
            raise _Refused(problem)
    except _Refused as refused:
        raise ConfigError(_name_source(refused.problem, origins)) from None
    return Resolved(config, origins)


def read_api_key(http: Http) -> str:
    """The key that requests must carry, "" for none: `api_key`, or the first line of `api_key_file`."""
    if not http.api_key_file:
        return http.api_key
    key = Path(http.api_key_file).expanduser().read_text(encoding="utf-8").split("\n", 1)[0].strip()
    if not key:
        raise ValueError("its first line is empty")
    return key


def cache_folder() -> Path:
    """Where prepared models are kept: $CBDISAGG_CACHE, else $XDG_CACHE_HOME/cbdisagg, else ~/.cache/cbdisagg."""
    own, shared = os.environ.get("CBDISAGG_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own).expanduser() if own else Path(shared or Path.home() / ".cache").expanduser() / "cbdisagg"


def environment(**changes: str) -> dict[str, str]:
    """The environment of a child process: this one's with changes."""
    return os.environ | changes


def print_config(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """The whole Config as TOML that loads to the same Config; a comment on each key tells its default and its source.

    Without `origins`, a value that differs from its default is said to be "set".
    """
    import tomlkit

    document = tomlkit.document()
    document.add(
        tomlkit.comment("Every setting of cbdisagg as it is now. Comments: where the value is from, its default.")
    )

    def table(section: str, values: Struct, defaults: Struct) -> Any:
        result = tomlkit.table()
        for name, value in msgspec.structs.asdict(values).items():
            default = getattr(defaults, name)
            known = "default" if value == default or origins is not None else "set"
            source = (origins or {}).get(f"{section}.{name}", known)
            note = source if source == "default" else f"{source}; default {show(default)}"
            result.add(name, tomlkit.item(value).comment(" ".join(note.split())))
        return result

    standard = Config()
    for name in SECTIONS:
        values = getattr(config, name)
        if name == "workers":
            groups = tomlkit.aot()
            for index, group in enumerate(values):
                same = values == standard.workers
                groups.append(table(f"workers.{index}", group, standard.workers[index] if same else Workers()))
            document.add(name, groups)
        else:
            document.add(name, table(name, values, getattr(standard, name)))
    return tomlkit.dumps(document)


# ------------------------------------------------------------------------------------------------------ reading


class _Refused(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def _name_source(problem: Problem, origins: Mapping[str, str]) -> str:
    """Put the file, or --set, in front: the source of the key itself, else of what was given beneath it."""
    source = origins.get(problem.key)
    if source is None:
        source = next((where for key, where in origins.items() if key.startswith(problem.key + ".")), None)
    return f"{source}: {problem}" if source else str(problem)


def _read_toml(path: Path) -> Table:
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text, so it is no TOML file") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {_explain(str(error), text)}") from None


def _settle_profile(tables: Table, folder: Path) -> None:
    """A relative `[profile] path` in a file counts from the file's folder: a tuned config and its profile lie together,
    wherever the service is started.
    """
    section = tables.get("profile")
    given = section.get("path") if isinstance(section, dict) else None
    if section and isinstance(given, str) and given:
        section["path"] = os.path.normpath(folder.absolute() / Path(given).expanduser())


def _explain(message: str, text: str) -> str:
    """tomllib's message with the line that it is about, and a plain word for a key that is given twice."""
    found = re.search(r"line (\d+)", message)
    number = int(found[1]) if found else len(text.splitlines())
    lines = text.splitlines()
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    if "overwrite" in message or "twice" in message:
        return f"line {number}: {line}: this key was given before"
    return f"line {number}: {line}: not valid TOML: {message.split(' (at')[0]}"


def _given(tables: Table) -> Iterator[str]:
    """The dotted keys of all values; a table that is empty, or where none belongs, counts as one value."""
    for section, value in tables.items():
        if section == "workers" and isinstance(value, list) and value:
            for index, group in enumerate(value):
                names = group if isinstance(group, dict) and group else [""]
                yield from (f"workers.{index}.{name}".rstrip(".") for name in names)
        elif section in KEYS and isinstance(value, dict) and value:
            yield from (f"{section}.{name}" for name in value)
        else:
            yield section


def _override(tables: Table, origins: dict[str, str], override: str, source: str, file: str) -> None:
    """Put one "section.key=value" into the tables, over what the file says. `source`: the option that it came by."""
    key, equals, text = override.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{source} {override}: write section.key=value, as kv.page_size=16")
    if origins.get(key) == source:
        raise ConfigError(f"{source} {override}: this key was given before")
    if (rival := _rival(key, origins, source, file)) is not None:
        raise ConfigError(f"{rival} and {source} {override} exclude each other; keep one of the two")
    if parts[0] == "workers":
        tables.setdefault("workers", [msgspec.structs.asdict(group) for group in Config().workers])
    if len(parts) == 3 and parts[0] == "workers":
        target = _worker_group(tables["workers"], parts[1], override)
    elif len(parts) == 2 and parts[0] != "workers":
        target = tables.setdefault(parts[0], {})
    elif parts == ["workers"]:
        for old in [old for old in origins if old.startswith("workers.")]:
            del origins[old]
        target = tables
    else:
        near = _nearest_anywhere(parts[-1])
        raise ConfigError(f"{source} {override}: no such key; {near or 'write section.key=value, as kv.page_size=16'}")
    if not isinstance(target, dict):
        return  # the file has a value where a table belongs: _build will say so
    target[parts[-1]] = _parse(text.strip(), KEYS.get(parts[0], {}).get(parts[-1]))
    for pair in ONE_OF:
        if key in pair and target[parts[-1]]:
            other = pair[1 - pair.index(key)]
            if origins.get(other) == file:  # the file's choice gives way to the operator's
                tables[parts[0]].pop(other.split(".")[1])
                del origins[other]
    origins |= dict.fromkeys(_given({"workers": tables["workers"]}) if parts == ["workers"] else [key], source)


def _rival(key: str, origins: Mapping[str, str], source: str, file: str) -> str | None:
    """The other option of the command line that has set this key."""
    origin = origins.get(key)
    return None if origin in (None, source, file) else origin


def _worker_group(groups: object, index: str, override: str) -> object:
    count = len(groups) if isinstance(groups, list) else 0
    if not (index.isascii() and index.isdigit() and int(index) < count):
        raise ConfigError(f"--set {override}: there are {count} groups of workers, numbered from workers.0")
    assert isinstance(groups, list)
    return groups[int(index)]


def _parse(text: str, kind: Any) -> object:
    """The value of an override: TOML, or plain text where that is what is wanted or where it is no TOML."""
    quoted = text[:1] in ("'", '"')
    if not quoted and (kind is str or get_origin(kind) is Literal):
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


# ----------------------------------------------------------------------------------------------------- building


def _build(tables: Table) -> Config:
    sections: dict[str, Any] = {}
    for name, value in tables.items():
        if name not in SECTIONS:
            raise _Refused(_unknown_section(name, value))
        if name == "workers":
            sections[name] = _build_workers(value)
        elif not isinstance(value, dict):
            raise _Refused(Problem(name, value, f"wrong type; want a section, [{name}] and its keys below"))
        else:
            sections[name] = _build_section(name, name, SECTIONS[name], value)
    model = sections.get("model")
    if model is not None and not (model.path or model.name):
        sections["model"] = msgspec.structs.replace(model, name=EMBEDDED_MODEL)
    return Config(**sections)


def _build_workers(value: object) -> tuple[Workers, ...]:
    if not isinstance(value, list) or not all(isinstance(group, dict) for group in value):
        raise _Refused(Problem("workers", value, "wrong type; want a list: [[workers]], once for each group"))
    return tuple(_build_section("workers", f"workers.{n}", Workers, group) for n, group in enumerate(value))


def _build_section(section: str, where: str, kind: Any, table: Table) -> Any:
    values = {}
    for name, value in table.items():
        if name not in KEYS[section]:
            raise _Refused(Problem(f"{where}.{name}", value, f"unknown key; {_nearest(section, name)}"))
        try:
            values[name] = msgspec.convert(value, KEYS[section][name], strict=True)
        except msgspec.ValidationError:
            raise _Refused(Problem(f"{where}.{name}", value, _wanted(KEYS[section][name], value))) from None
    return kind(**values)


def _unknown_section(name: str, value: object) -> Problem:
    if not isinstance(value, dict | list):
        inside = _nearest_anywhere(name)
        return Problem(name, value, f"unknown key; {inside or 'it belongs below a [section]'}")
    near = difflib.get_close_matches(name, SECTIONS, n=1, cutoff=0)[0]
    return Problem(name, value, f"unknown section; did you mean {_header(near)}?")


def _header(section: str) -> str:
    return f"[[{section}]]" if section == "workers" else f"[{section}]"


def _nearest(section: str, name: str) -> str:
    """The key of this section that is meant, or the section where the key belongs, or the nearest of what there is."""
    close = difflib.get_close_matches(name, KEYS[section], n=1)
    if close:
        return f"did you mean {close[0]}?"
    nearest = difflib.get_close_matches(name, KEYS[section], n=1, cutoff=0)[0]
    return _nearest_anywhere(name) or f"the nearest is {nearest}; keys here: {', '.join(KEYS[section])}"


def _nearest_anywhere(name: str) -> str:
    """The key of any section that is meant by `name`, as a question; "" if none is close."""
    places = {key: section for section in reversed(KEYS) for key in KEYS[section]}
    close = difflib.get_close_matches(name, places, n=1)
    return f"did you mean {_header(places[close[0]])} {close[0]}?" if close else ""


def _wanted(kind: Any, value: object) -> str:
    if get_origin(kind) is Literal:
        allowed = [str(choice) for choice in get_args(kind)]
        close = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {show(close[0])}?" if close and len(allowed) > 1 else ""
        return f"not allowed; want {' or '.join(show(choice) for choice in allowed)}{hint}"
    return f"wrong type; want {TYPES[kind]}"


def _file_problems(config: Config) -> Iterator[Problem]:
    """What the keys that name files say about the disk. The model's are checked where it is prepared."""
    if config.http.api_key_file:
        try:
            read_api_key(config.http)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            yield Problem("http.api_key_file", config.http.api_key_file, f"cannot be used: {reason}")
    if config.cluster.curve_keys:
        folder = Path(config.cluster.curve_keys).expanduser()
        missing = [name for name in CURVE_FILES if not os.access(folder / name, os.R_OK)]
        if missing:
            yield Problem("cluster.curve_keys", config.cluster.curve_keys, f"{missing[0]} in it cannot be read")
    if config.profile.path and not os.access(Path(config.profile.path).expanduser(), os.R_OK):
        yield Problem("profile.path", config.profile.path, "cannot be read; measure one with cbdisagg profile --out")
    journal = Path(config.debug.journal).expanduser()
    if config.debug.journal and journal.exists() and not journal.is_dir():
        yield Problem("debug.journal", config.debug.journal, "must be a folder; this is a file")
