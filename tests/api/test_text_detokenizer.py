"""Tokens to text in parts: the sum is the text of the whole, no part holds half a character, time is linear."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from cbdisagg.api.detokenizer import Detokenizer
from cbdisagg.api.pieces import decoding_of
from cbdisagg.api.tokenizer import Tokenizer, TokenizerError

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Größe, naïve café — “quotes” … 日本語のテキスト, 日本, 😀😀 👩‍👩‍👧 🇩🇪",
    "def f(x):\n    return x  + 1\n\n\tif x == 12: pass",
]
ADDED = [AddedToken("<tool call>", special=False), AddedToken("<e>", special=True), AddedToken("<s>", special=True)]


def byte_level() -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


def byte_fallback(*, strip: bool) -> Library:
    """As Llama 2 (which strips the space that it puts before a text) or Gemma (which does not)."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    pieces = ["▁", "▁▁", "▁the", "the", "▁fox", "t", "h", "e", "é", "日", "本", "<0xZZ>", "▁a▁b", "\n"]
    vocabulary |= {piece: 257 + n for n, piece in enumerate(pieces)}
    library = Library(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.normalizer = normalizers.Replace(" ", "▁")
    if strip:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), library.normalizer])
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    library.decoder = decoders.Sequence(steps)
    return library


def metaspace(scheme: str) -> Library:
    pieces = ["▁", "▁the", "the", "▁fox", "x", "▁▁a", "日", "<unk>"]
    library = Library(models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="<unk>"))
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return library


def word_piece() -> Library:
    pieces = ["[UNK]", "the", "fox", "##es", "##s", "日", "jump", "##ed"]
    library = Library(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece(cleanup=False)
    return library


LIBRARIES = {
    "byte_level": byte_level,
    "llama": lambda: byte_fallback(strip=True),
    "gemma": lambda: byte_fallback(strip=False),
    "metaspace": lambda: metaspace("always"),
    "metaspace_never": lambda: metaspace("never"),
    "word_piece": word_piece,
}


@pytest.fixture(scope="module", params=LIBRARIES)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer, Library]:
    library = LIBRARIES[request.param]()
    library.add_tokens(ADDED)
    folder = tmp_path_factory.mktemp(request.param)
    library.save(str(folder / "tokenizer.json"))
    return request.param, Tokenizer(folder), library


def pieces(tokenizer: Tokenizer, ids: Sequence[int], *, prompt: Sequence[int] = (), **options: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    return [*(detokenizer.feed(id) for id in ids), detokenizer.finish()]


def draw_ids(data: st.DataObject, library: Library) -> list[int]:
    return data.draw(st.lists(st.integers(0, library.get_vocab_size() + 1), max_size=30))


@given(data=st.data(), skip=st.booleans())
def test_the_parts_are_the_whole(named: tuple[str, Tokenizer, Library], data: st.DataObject, skip: bool) -> None:
    _, tokenizer, library = named
    ids = draw_ids(data, library)
    parts = pieces(tokenizer, ids, skip_special=skip)
    assert "".join(parts) == tokenizer.decode(ids, skip_special=skip)
    assert not any("\ud800" <= character <= "\udfff" for part in parts for character in part)


@given(data=st.data(), skip=st.booleans())
def test_decodes_as_the_library_does(named: tuple[str, Tokenizer, Library], data: st.DataObject, skip: bool) -> None:
    name, tokenizer, library = named
    if name in ("llama", "gemma"):  # the library gives up on a run of bytes as a whole; text that is text is equal
        text = data.draw(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<▁"), max_size=20))
        ids = library.encode(text).ids
    else:
        ids = draw_ids(data, library)
    assert tokenizer.decode(ids, skip_special=skip) == library.decode(ids, skip_special_tokens=skip)


@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<▁"), max_size=30))
def test_each_part_holds_whole_characters(named: tuple[str, Tokenizer, Library], text: str) -> None:
    name, tokenizer, _ = named
    if name not in ("byte_level", "llama", "gemma"):
        return  # these cannot represent all text
    parts = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@given(data=st.data(), cut=st.integers(0, 30))
def test_a_continuation_adds_what_the_prompt_lacks(
    named: tuple[str, Tokenizer, Library], data: st.DataObject, cut: int
) -> None:
    name, tokenizer, library = named
    if name == "word_piece":
        return  # the library gives it no bytes to compare by
    ids = draw_ids(data, library)
    shown = [id for id in ids[:cut] if id not in tokenizer.special_ids and tokenizer.token_bytes(id)]
    head = [tokenizer.first_bytes(shown[0]), *map(tokenizer.token_bytes, shown[1:])] if shown else []
    before = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(head))  # without a half character
    after = "".join(pieces(tokenizer, ids[cut:], prompt=ids[:cut]))
    assert before + after == tokenizer.decode(ids, skip_special=True)


def test_the_first_token_of_a_continuation_keeps_its_space(tmp_path: Path) -> None:
    library = byte_fallback(strip=True)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    fox = library.token_to_id("▁fox")
    assert "".join(pieces(tokenizer, [fox, fox])) == "fox fox" == tokenizer.decode([fox, fox], skip_special=True)
    assert "".join(pieces(tokenizer, [fox, fox], prompt=[fox])) == " fox fox"


def test_a_prompt_that_ends_within_a_character_is_completed(tmp_path: Path) -> None:
    library = byte_fallback(strip=False)
    library.save(str(tmp_path / "tokenizer.json"))
    euro = [1 + byte for byte in "€".encode()]
    assert pieces(Tokenizer(tmp_path), euro[2:], prompt=euro[:2]) == ["€", ""]


def test_endless_invalid_bytes_cost_the_same_for_each(tmp_path: Path) -> None:
    library = byte_level()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer, decoded = Tokenizer(tmp_path), []
    ids = [next(id for id in range(400) if tokenizer.token_bytes(id) == bytes([0xF0]))] * 5000
    tokenizer.decode = lambda ids, **_: decoded.append(len(ids))  # type: ignore[method-assign,assignment]
    assert "".join(pieces(tokenizer, ids)) == "\ufffd" * 5000
    assert not decoded, "no token is decoded a second time"


def test_tokens_without_bytes_are_decoded_in_a_bounded_window(tmp_path: Path) -> None:
    library = word_piece()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer, decoded = Tokenizer(tmp_path), []
    assert not tokenizer.exact
    plain = tokenizer.decode

    def counting(ids: list[int], *, skip_special: bool) -> str:
        decoded.append(len(ids))
        return plain(ids, skip_special=skip_special)

    tokenizer.decode = counting  # type: ignore[method-assign,assignment]
    whole = "".join(pieces(tokenizer, [1, 2, 3, 4] * 100))
    assert whole == plain([1, 2, 3, 4] * 100, skip_special=True)
    assert max(decoded) <= 32


def test_hidden_and_special_tokens_do_not_show(tmp_path: Path) -> None:
    library = byte_level()
    library.add_tokens(ADDED)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    end, tool = library.token_to_id("<e>"), library.token_to_id("<tool call>")
    a = tokenizer.encode("a")[0]
    assert "".join(pieces(tokenizer, [a, end, tool, a])) == "a<tool call>a"
    assert "".join(pieces(tokenizer, [a, end, a], skip_special=False)) == "a<e>a"
    assert "".join(pieces(tokenizer, [a, end, a], skip_special=False, hide=frozenset({end}))) == "aa"


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("english")
    byte_level().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@given(data=st.data(), include=st.booleans())
def test_stop_strings_work_across_tokens(english: Tokenizer, data: st.DataObject, include: bool) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from([*CORPUS[1], " the", " dog", ", "]), min_size=1, max_size=40)))
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    at = text.index(stop)
    detokenizer = Detokenizer(english, stop=[stop], include_stop=include)
    shown = ""
    for id in english.encode(text):
        shown += detokenizer.feed(id)
        assert text.startswith(shown)
        if detokenizer.stopped is not None:
            break
    assert shown + detokenizer.finish() == text[: at + len(stop) if include else at]
    assert detokenizer.stopped == stop


def test_no_stop_string_ends_the_first_min_tokens(english: Tokenizer) -> None:
    ids = english.encode("x") * 3
    for least, shown in ((0, ""), (1, "x"), (2, "xx"), (3, "xxx")):
        detokenizer = Detokenizer(english, stop=["x"], min_tokens=least)
        assert "".join(map(detokenizer.feed, ids)) + detokenizer.finish() == shown
        assert (detokenizer.stopped is None) == (least == 3)


def test_reads_the_files_of_a_model_folder(tmp_path: Path) -> None:
    library = byte_level()
    library.add_tokens(ADDED)
    library.enable_padding(length=64)
    library.enable_truncation(2)
    start, end = library.token_to_id("<s>"), library.token_to_id("<e>")
    library.save(str(tmp_path / "tokenizer.json"))
    files: dict[str, Any] = {"special_tokens_map.json": {"eos_token": {"content": "<e>"}}}
    write(tmp_path, files)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.end_ids == (end,)
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert tokenizer.decode(tokenizer.encode(CORPUS[0], special=True), skip_special=False) == CORPUS[0]
    write(tmp_path, {"config.json": {"eos_token_id": 7, "vocab_size": 512}})
    assert Tokenizer(tmp_path).end_ids == (7,)
    assert Tokenizer(tmp_path).vocab_size == 512
    write(tmp_path, {"generation_config.json": {"eos_token_id": [3, end]}})
    assert Tokenizer(tmp_path).end_ids == (3, end)
    write(tmp_path, {"tokenizer_config.json": {"bos_token": "<s>", "add_bos_token": True, "eos_token": "<e>"}})
    assert Tokenizer(tmp_path).encode("a", special=True) == [start, *tokenizer.encode("a")]
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", start)])
    library.save(str(tmp_path / "tokenizer.json"))
    both = Tokenizer(tmp_path)
    assert both.encode("a", special=True) == [start, *tokenizer.encode("a")]
    assert both.encode("<s>a<e>") == [start, *tokenizer.encode("a"), end]
    assert both.encode("a") == tokenizer.encode("a")


def test_token_bytes_of_ids_that_do_not_exist_are_empty(english: Tokenizer) -> None:
    assert english.token_bytes(99_999) == b""
    assert english.token_text(99_999) == ""
    assert english.decode([99_999], skip_special=True) == ""


@pytest.mark.parametrize(
    ("content", "words"), [("{", "tokenizer.json"), ("[]", "expected a JSON object"), ("{}", "json")]
)
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer.json.*No such file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=words):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "steps",
    [
        [{"type": "ByteFallback"}, {"type": "Replace", "pattern": {"String": "_"}, "content": " "}],
        [{"type": "Replace", "pattern": {"Regex": "_+"}, "content": " "}, {"type": "ByteFallback"}],
        [{"type": "ByteFallback"}, {"type": "Strip", "content": " ", "start": 2, "stop": 0}],
        [{"type": "CTC"}],
    ],
)
def test_other_decoders_have_no_bytes(steps: list[dict[str, Any]]) -> None:
    assert decoding_of({"type": "Sequence", "decoders": steps}) is None
    assert decoding_of(None) is None


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
