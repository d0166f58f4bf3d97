"""Text to token ids and back, from the files of a model folder, on `tokenizers` alone.

Knows tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json and
chat_template.jinja; runs no code from the folder. Immutable after construction, and safe to use from several threads:
`encode` releases the interpreter while it works.

Where tokens have bytes (`exact`; see pieces.py) `decode` joins those and reads them as UTF-8, with U+FFFD for what is
not. It differs from the library in one corner: a run of `<0xAB>` tokens that is not UTF-8 as a whole keeps its valid
characters, because a stream has shown them before it can know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from cbdisagg.api.pieces import decoding_of
from cbdisagg.api.template import ChatTemplate, TemplateError


class TokenizerError(Exception):
    """The folder's tokenizer cannot be used; one line that names the file."""


class Tokenizer:
    """The tokenizer of one model folder.

    `end_ids` end a generated sequence; `special_ids` are tokens that are no text; `vocab_size` is the model's own, with
    padding rows; `exact` says that `token_bytes` is the exact contribution of a token to the text.
    """

    def __init__(self, folder: Path) -> None:
        source = _read_json(folder / "tokenizer.json", required=True)
        self._tokenizer = _load(folder / "tokenizer.json")
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        names = _special_names(config)
        self._decoding = decoding_of(source.get("decoder"))
        self._bytes: dict[int, bytes] = {}
        self._begin = self._edge(config, "add_bos_token", names.get("bos_token"))
        self._end = self._edge(config, "add_eos_token", names.get("eos_token"))
        self.exact = self._decoding is not None
        self.special_ids = frozenset(
            id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        model = _read_json(folder / "config.json")
        self.end_ids = self._end_ids(_read_json(folder / "generation_config.json"), model, names.get("eos_token"))
        self.vocab_size: int = (
            model.get("vocab_size")
            or (model.get("text_config") or {}).get("vocab_size")
            or self._tokenizer.get_vocab_size()
        )
        template = _template_source(folder, config)
        self._template = None if template is None else ChatTemplate(template, names)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of `text`. `special` adds what the model wants around a text, such as its begin token."""
        # The batch call computes no offsets and releases the interpreter lock; encode() does neither.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        if special and self._begin is not None and ids[:1] != [self._begin]:
            ids.insert(0, self._begin)
        if special and self._end is not None and ids[-1:] != [self._end]:
            ids.append(self._end)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool) -> str:
        """The text of a whole sequence, as if it began there (a space that only marks the start is dropped)."""
        if self._decoding is None:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
            return text
        hidden = self.special_ids if skip_special else frozenset()
        shown = [id for id in ids if id not in hidden and self.token_bytes(id)]
        parts = [self.first_bytes(shown[0]), *map(self.token_bytes, shown[1:])] if shown else []
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """What this token adds to a text, within it; nothing for an id that the vocabulary does not have."""
        known = self._bytes.get(id)
        if known is None:
            known = self._bytes[id] = self._compute_bytes(id)
        return known

    def first_bytes(self, id: int) -> bytes:
        """What this token adds to a text that it begins."""
        piece = self._tokenizer.id_to_token(id)
        if piece is None or self._decoding is None:
            return self.token_bytes(id)
        return self._decoding.first(piece)

    def token_text(self, id: int) -> str:
        """The token alone; U+FFFD where it holds a part of a character."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        **variables: Any,
    ) -> str:
        """The prompt text of a chat. Raises TemplateError, also if the model has no template."""
        if self._template is None:
            raise TemplateError("this model has no chat template; use completions, or add chat_template.jinja to it")
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )

    def _compute_bytes(self, id: int) -> bytes:
        piece = self._tokenizer.id_to_token(id)
        if piece is None:
            return b""
        if self._decoding is None:
            text: str = self._tokenizer.decode([id], skip_special_tokens=False)
            return text.encode()
        return self._decoding.inner(piece)

    def _edge(self, config: Mapping[str, Any], switch: str, token: str | None) -> int | None:
        """The id to put at one end of a text where the config asks for it; the post-processor may do it already."""
        if token is None or config.get(switch) is not True:
            return None
        id: int | None = self._tokenizer.token_to_id(token)
        return id

    def _end_ids(self, generation: Mapping[str, Any], model: Mapping[str, Any], token: str | None) -> tuple[int, ...]:
        for config in (generation, model, model.get("text_config") or {}):
            ids = config.get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (ids,)
        id = None if token is None else self._tokenizer.token_to_id(token)
        return () if id is None else (id,)


def _load(path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise TokenizerError(f"{path}: {error}") from None
    tokenizer.no_padding()  # both would be saved from training and change what a prompt is
    tokenizer.no_truncation()
    return tokenizer


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is not there and not required."""
    if not path.exists() and not required:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _special_names(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, as chat templates know them; a token is a string, or an object with its content."""
    extra = config.get("extra_special_tokens")
    entries = {**(extra if isinstance(extra, dict) else {}), **config}
    named = {}
    for name, value in entries.items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            named[name] = token
    return named


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the config's `chat_template`: a string, or a list of named ones with a default."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
