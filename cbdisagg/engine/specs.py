"""The `Spec` of a model folder: from its config.json by way of transformers, or as it was kept from an earlier start.

Reading a config takes transformers, whose import takes a second and 75 MB of each worker for good; what comes out of it
is a page of numbers. So they are kept, in a file that is named after all they depend on: the config, the version of
transformers, and the code that turns one into the other. A file that is damaged or missing costs that second.
"""

from __future__ import annotations

import contextlib
import json
import os
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import msgspec

from cbdisagg.config import ModelError
from cbdisagg.engine import families
from cbdisagg.engine.families import Spec, check_family, spec_of

FOLDER = "specs"
CHECK_BYTES = 16
_decoder = msgspec.json.Decoder(Spec)


def read_spec(folder: Path, cache: Path | None = None) -> Spec:
    """Of a Hugging Face folder. `cache`: where specs are kept, under `specs/`. Raises ModelError if it is none of ours.

    No code of the folder is run.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder}: config.json is missing: not a Hugging Face model folder")
    if cache is None:
        return _by_transformers(folder)
    kept = cache / FOLDER / f"{_key(config)}.json"
    spec = _recall(kept)
    if spec is None:
        spec = _by_transformers(folder)
        _keep(spec, kept)
    return spec


def _by_transformers(folder: Path) -> Spec:
    config = folder / "config.json"
    try:
        check_family(json.loads(config.read_text(encoding="utf-8"))["model_type"])
        from transformers import AutoConfig  # slow to import

        return spec_of(AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ModelError(f"{config}: {str(error).splitlines()[0]}") from None


def _key(config: Path) -> str:
    digest = blake2b(version("transformers").encode(), digest_size=16)
    for path in (config, Path(families.__file__), Path(__file__)):
        digest.update(blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def _recall(kept: Path) -> Spec | None:
    try:
        content = kept.read_bytes()
        check, text = content[:CHECK_BYTES], content[CHECK_BYTES:]
        return _decoder.decode(text) if check == _check(text) else None
    except (OSError, msgspec.MsgspecError):
        return None


def _keep(spec: Spec, kept: Path) -> None:
    """For the next start; workers that start at once rename whole files, one over the other."""
    text, unfinished = msgspec.json.encode(spec), kept.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):  # no room, or no right to write: the next start reads the config again
        kept.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_bytes(_check(text) + text)
            unfinished.replace(kept)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise


def _check(text: bytes) -> bytes:
    return blake2b(text, digest_size=CHECK_BYTES).digest()
