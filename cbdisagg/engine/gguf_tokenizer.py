"""From the tokenizer in a GGUF file's metadata to `tokenizer.json` and `tokenizer_config.json`.

Two kinds: "gpt2", byte-level BPE with merges, whose way to split text GGUF only names ("pre"); and "llama",
SentencePiece BPE, whose merges follow from the scores. A kind or a name that is not known is refused: a tokenizer that
is almost right gives a model that is almost right.
"""

from __future__ import annotations

import json
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from cbdisagg.config import ModelError

Json: TypeAlias = dict[str, Any]
Merges: TypeAlias = list[tuple[str, str]]

SPACE = "▁"
UNLIMITED = int(1e30)  # how transformers writes "no limit", where the context is not known
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


class TokenType(IntEnum):
    """tokenizer.ggml.token_type"""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def write_tokenizer(values: Json, folder: Path, context: int) -> None:
    """Write the two files. Raises ModelError if the kind is unknown, KeyError if the metadata lacks a key."""
    kind = values["tokenizer.ggml.model"]
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(values)
    elif kind == "llama":
        tokenizer, adds_bos = _sentence_piece(values), True
    else:
        raise ModelError(f"has a tokenizer of the kind {kind!r}; 'gpt2' and 'llama' can be read")
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    types = values.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    _add_special(tokenizer, tokens, types)
    named = {
        name: tokens[identity]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (identity := values.get(f"tokenizer.ggml.{key}_token_id")) is not None and identity < len(tokens)
    }
    begin = _edge(values, "bos", adds_bos, named)
    end = _edge(values, "eos", False, named)
    if begin or end:
        tokenizer.post_processor = _template(tokenizer, begin, end)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: Json = {f"{name}_token": token for name, token in named.items()}
    config |= {
        "add_bos_token": bool(begin),
        "add_eos_token": bool(end),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context or UNLIMITED,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if template := values.get("tokenizer.chat_template"):
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_level(values: Json) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether models of its kind begin every text with their begin token unless they say so."""
    name = values.get("tokenizer.ggml.pre", "default")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        split: Any = whole
    elif name in ("smollm", "starcoder", "refact", "command-r"):  # each digit is a token
        split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    elif name in ("llama-bpe", "llama3", "llama-v3"):
        parts = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
        split = pre_tokenizers.Sequence([parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        raise ModelError(f"splits text in the way {name!r}, which is not known here")
    llama3 = name.startswith("llama")
    vocabulary = {token: n for n, token in enumerate(values["tokenizer.ggml.tokens"])}
    merges = [_merge(line) for line in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocabulary, merges, fuse_unk=False, byte_fallback=False, ignore_merges=llama3))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, llama3


def _merge(line: str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not space:
        raise ModelError(f"{line!r} is not a merge of two tokens")
    return left, right


def _sentence_piece(values: Json) -> Tokenizer:
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    unknown = values.get("tokenizer.ggml.unknown_token_id", 0)
    vocabulary = {token: n for n, token in enumerate(tokens)}
    merges = merges_of(tokens, values["tokenizer.ggml.scores"], values["tokenizer.ggml.token_type"])
    model = BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces, text = normalizers.Replace(" ", SPACE), [decoders.Replace(SPACE, " "), decoders.ByteFallback()]
    text.append(decoders.Fuse())
    if values.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        text.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(text)
    return tokenizer


def merges_of(tokens: list[str], scores: list[float], types: list[int]) -> Merges:
    """The merges whose order makes BPE do what SentencePiece does: of all pairs, join the one with the best score.

    Every way to cut a token into two others is a merge; all those of one token stand together, better tokens first.
    """
    normal = {token: n for n, token in enumerate(tokens) if types[n] == TokenType.NORMAL}
    ordered = sorted(normal, key=lambda token: (-scores[normal[token]], normal[token]))
    return [
        (token[:cut], token[cut:])
        for token in ordered
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]


def _add_special(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are found in text before it is split; in order of their ids, as tokenizers requires."""
    for token, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _edge(values: Json, name: str, default: bool, named: dict[str, str]) -> str:
    """The token put before ("bos") or after ("eos") every text; "" for none."""
    return named.get(name, "") if values.get(f"tokenizer.ggml.add_{name}_token", default) else ""


def _template(tokenizer: Tokenizer, begin: str, end: str) -> processors.TemplateProcessing:
    single = " ".join(part for part in (begin, "$A", end) if part)
    pair = " ".join(part for part in (begin, "$A", end, begin and f"{begin}:1", "$B:1", end and f"{end}:1") if part)
    return processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(t, tokenizer.token_to_id(t)) for t in {begin, end} if t]
    )
