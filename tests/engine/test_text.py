"""Ids and text: characters split over tokens, stop strings across token borders, and others' settings kept out."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st

from tests.engine import tiny
from verifiers.chat import Codec
from verifiers.engine.text.detokenizer import StopWatch, TextStream, first_stop, safe_length
from verifiers.engine.text.logprobs import TokenTexts

CODEC = Codec(tiny.tokenizer())


def streamed(text: str, stops: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(CODEC, CODEC.encode("hello world", special=False), stops)
    return [stream.push(token) for token in CODEC.encode(text, special=False)] + [stream.finish()]


def test_no_half_character_is_ever_shown() -> None:
    text = "naïve 🎉🎊 漢字 the answer"
    pieces = streamed(text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_never_comes_whole_is_shown_broken_at_the_end() -> None:
    stream = TextStream(CODEC)
    ids = CODEC.encode("🎉", special=False)
    assert [stream.push(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert set(stream.finish()) == {"\ufffd"}


def test_bytes_that_are_no_text_do_not_hold_up_the_stream() -> None:
    continuation = CODEC.encode("é", special=False)[-1]
    stream = TextStream(CODEC)
    shown = [stream.push(continuation) for _ in range(100)]
    assert sum(map(len, shown)) > 80


@given(st.text())
def test_pieces_add_up_to_the_text(text: str) -> None:
    assert "".join(streamed(text)) == text


@given(st.lists(st.integers(0, 319), max_size=24))
def test_whatever_is_sampled_a_stream_adds_up_to_the_whole(ids: list[int]) -> None:
    stream = TextStream(CODEC)
    assert "".join([*map(stream.push, ids), stream.finish()]) == CODEC.decode(ids)


LETTERS = "abc<>é"


@given(
    st.text(alphabet=LETTERS, max_size=40),
    st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stream_shows_just_what_the_whole_reply_says(text: str, stops: list[str]) -> None:
    watch, stream = StopWatch(CODEC, stops), TextStream(CODEC, (), stops)
    sampled: list[int] = []
    pieces: list[str] = []
    for token in CODEC.encode(text, special=False):
        sampled.append(token)
        pieces.append(stream.push(token))
        if watch(token, 0.0):
            break
    pieces.append(stream.finish())
    whole = CODEC.decode(sampled)
    stop = first_stop(whole, stops)
    assert "".join(pieces) == (whole if stop < 0 else whole[:stop])
    assert stop >= 0 or whole == text


@pytest.mark.parametrize("stop", ["</answer>", "\n", "🎉", "4", " world", "swer"])
def test_a_stop_string_is_noticed_with_the_token_that_completes_it(stop: str) -> None:
    ids = CODEC.encode(f"hello{stop} and more", special=False)
    watch = StopWatch(CODEC, [stop])
    seen = next(n for n, token in enumerate(ids, 1) if watch(token, 0.0))
    assert stop in CODEC.decode(ids[:seen])
    assert stop not in CODEC.decode(ids[: seen - 1])


def test_only_tokens_that_can_end_a_stop_string_are_looked_at() -> None:
    enders = CODEC.enders("</answer>")
    assert enders is not None
    assert CODEC.encode(">", special=False)[0] in enders
    assert CODEC.encode("hello", special=False)[0] not in enders
    assert CODEC.enders("\n") is None


def test_text_is_held_back_only_while_a_stop_may_be_under_way() -> None:
    assert safe_length("a </answ", ["</answer>"]) == 2
    assert safe_length("a </b", ["</answer>"]) == 5
    assert safe_length("aaa", []) == 3


SPACED = {"▁": 0, "▁a": 1, "▁b": 2, "<unk>": 3, "c": 4}


def spaced_codec() -> Codec:
    """A tokenizer that eats the space before its first word, as sentencepiece's do."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel(SPACED, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Codec(type("Holder", (), {"backend_tokenizer": backend})())


CODECS = {"bytes": (CODEC, 320), "spaces": (spaced_codec(), 6)}


@pytest.mark.parametrize("name", CODECS)
@given(st.data())
def test_a_reply_reads_the_same_whether_its_special_tokens_are_looked_for_or_decoded(name: str, data: Any) -> None:
    codec, size = CODECS[name]
    tokens = st.lists(st.integers(0, size - 1) | st.sampled_from([0, 1, 2]), max_size=12)
    before, ids = data.draw(tokens), data.draw(tokens)

    def read_in_full(special: bool) -> str:
        tail = before[-4:]
        start, whole = codec.decode(tail, special=special), codec.decode([*tail, *ids], special=special)
        if whole.startswith(start) and not start.endswith("\ufffd"):
            return whole[len(start) :]
        return codec.decode(ids, special=special)

    assert codec.continuations(before, ids) == (read_in_full(False), read_in_full(True))


def test_truncation_and_padding_that_a_trainer_switches_on_do_not_reach_us() -> None:
    shared = tiny.tokenizer()
    codec = Codec(shared)
    shared(["hello world hello world"], truncation=True, max_length=2, padding="max_length")
    assert codec.decode(codec.encode("hello world hello world", special=True)) == "hello world hello world"


def test_a_space_before_a_reply_is_kept_where_a_tokenizer_eats_it_at_the_start() -> None:
    codec = spaced_codec()
    assert codec.decode([2]) == "b"
    assert codec.continuation([1], [2]) == " b"
    stream = TextStream(codec, [1])
    assert stream.push(2) + stream.finish() == " b"


def test_where_a_tokenizer_eats_spaces_tokens_are_shown_with_theirs_and_begin_where_they_do() -> None:
    codec = spaced_codec()
    ids = [codec.encode("<s>", special=False)[0], *codec.encode("a b a", special=False)]
    options = SimpleNamespace(echo=True, return_tokens_as_token_ids=False)
    texts = TokenTexts(SimpleNamespace(ids=ids, options=options, echoed="a b a"), codec)
    starts = [(texts.at, texts.push(token).shown) for token in ids]
    assert starts == [(0, "<s>"), (0, "a"), (1, " b"), (3, " a")]


def test_a_stop_string_that_begins_with_the_space_of_the_first_token_ends_the_reply_there() -> None:
    codec = spaced_codec()
    watch, stream = StopWatch(codec, [" b"], [1]), TextStream(codec, [1], [" b"])
    assert watch(2, 0.0)
    assert stream.push(2) + stream.finish() == ""


def fallback_codec() -> Codec:
    """Byte fallback, as Llama 2's and Gemma's: a run of bytes that is no UTF-8 is broken as a whole."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    named = [f"<0x{byte:02X}>" for byte in (0x0A, 0x61, 0x82, 0xA9, 0xAC, 0xC3, 0xE2)]
    names = ["<unk>", "▁", "▁a", "b", "é", *named]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Codec(type("Holder", (), {"backend_tokenizer": backend})())


def word_codec(decoder: Any, names: Sequence[str]) -> Codec:
    from tokenizers import AddedToken, Tokenizer, models

    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Codec(type("Holder", (), {"backend_tokenizer": backend})())


def decoded_by(name: str) -> Codec:
    """A codec whose tokenizer has a decoder of this kind."""
    from tokenizers import decoders

    if name == "byte fallback":
        return fallback_codec()
    if name == "spaces":
        return spaced_codec()
    if name == "word pieces":
        return word_codec(decoders.WordPiece(), ["[UNK]", "a", "##b", ".", "n't", "'", "##\ufffd", "do"])
    if name == "suffixes":
        return word_codec(decoders.BPEDecoder(suffix="</w>"), ["<unk>", "a", "a</w>", "b</w>", "."])
    split = ["a", "Ġ", "Ġa", "Ã", "©", "â", "Ĥ", "¬", "Ã©", "©Ã"]  # of characters, named by byte
    in_steps = decoders.Sequence([decoders.Replace("~", "-"), decoders.ByteLevel()])
    return word_codec(decoders.ByteLevel() if name == "bytes" else in_steps, split)


KINDS = ["byte fallback", "spaces", "word pieces", "suffixes", "bytes", "bytes in steps"]


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_whatever_the_decoder_pieces_add_up_to_the_final_text(kind: str, data: Any) -> None:
    codec = decoded_by(kind)
    tokens = st.lists(st.integers(0, 14), max_size=14)  # some of them are beyond the vocabulary
    before, ids = data.draw(tokens), data.draw(tokens)
    stream = TextStream(codec, before)
    assert "".join([*map(stream.push, ids), stream.finish()]) == codec.continuation(before, ids)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_whatever_the_decoder_a_stop_string_ends_stream_and_text_alike(kind: str, data: Any) -> None:
    codec = decoded_by(kind)
    tokens = st.lists(st.integers(0, 14), max_size=40)
    before, sampled = data.draw(tokens), data.draw(tokens)
    stops = data.draw(st.lists(st.sampled_from(["a", "\n", "é", " ", "ab", "€", ". "]), min_size=1, max_size=2))
    watch, stream = StopWatch(codec, stops, before), TextStream(codec, before, stops)
    ids: list[int] = []
    pieces: list[str] = []
    for token in sampled:
        ids.append(token)
        pieces.append(stream.push(token))
        if watch(token, 0.0):
            break
    pieces.append(stream.finish())
    whole = codec.continuation(before, ids)
    stop = first_stop(whole, stops)
    assert "".join(pieces) == (whole if stop < 0 else whole[:stop])


def test_a_stream_goes_on_after_a_run_of_bytes_as_soon_as_it_is_complete() -> None:
    codec = fallback_codec()
    e, acute, b = (codec.tokenizer.backend_tokenizer.token_to_id(one) for one in ("<0xC3>", "<0xA9>", "b"))
    stream = TextStream(codec)
    assert [stream.push(token) for token in (e, acute, b, b)] == ["", "", "éb", "b"]


def test_a_space_is_kept_after_a_character_that_stays_broken() -> None:
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.BPE(vocab={"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "▁a": 3}, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    codec = Codec(type("Holder", (), {"backend_tokenizer": backend})())
    assert codec.continuation([3, 1], [3]) == " a"
    assert [codec.bytes_of(token, codec.decode([token])) for token in (1, 2, 3)] == [b"\xc3", b"\xa9", b"a"]
