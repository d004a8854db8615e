"""Reverse generated text: sentences for large models, a few letters for very small ones."""

from __future__ import annotations

import random
import zlib

import verifiers as vf

TAGS_PROMPT = "Reverse the text character by character. Put the reversed text into <reversed_text> tags."
PLAIN_PROMPT = "Reverse the text character by character. Reply with the reversed text and nothing else."

KINDS = {
    "article": "the a every one that this our their some another",
    "adjective": "small quiet red patient broken early golden heavy curious empty bright wooden distant gentle rusty "
    "clever narrow salty frozen hidden",
    "noun": "fox harbour lantern baker river window sparrow engine garden island letter market needle orchard painter "
    "kettle sailor tunnel valley whistle bridge candle doctor forest",
    "verb": "finds follows carries remembers paints opens forgets repairs watches leaves borrows counts hears visits "
    "guards crosses sells draws",
    "link": "near behind beyond above under beside after before and without",
}
WORDS = {kind: words.split() for kind, words in KINDS.items()}
ORDER = ("article", "adjective", "noun", "verb", "article", "noun", "link")

MAX_TIMES_LONGER = 10
EVERY_NTH_IS_EVAL = 5
MAX_REDRAWS = 100


def make_sentence(draw: random.Random, n_words: int) -> str:
    """``n_words`` words in an English word order: “the quiet fox finds a lantern near every …”."""
    return " ".join(draw.choice(WORDS[ORDER[i % len(ORDER)]]) for i in range(n_words))


def is_eval_text(text: str) -> bool:
    """Is this text for evaluation or for training? The text itself decides, so none is in both data sets."""
    return zlib.crc32(text.encode()) % EVERY_NTH_IS_EVAL == 0


def make_rows(
    n: int, words: tuple[int, int], length: int | None, alphabet: str, seed: int, *, is_eval: bool
) -> list[vf.Row]:
    """``n`` rows. If there are too few different texts, a text may be in both data sets."""
    draw = random.Random(f"reverse-text {seed} {is_eval}")
    rows = []
    for _ in range(n):
        for _ in range(MAX_REDRAWS):
            text = (
                make_sentence(draw, draw.randint(*words))
                if length is None
                else "".join(draw.choice(alphabet) for _ in range(length))
            )
            if is_eval_text(text) == is_eval:
                break
        rows.append({"question": text, "answer": text[::-1]})
    return rows


def common_length(a: str, b: str) -> int:
    """The length of the longest common subsequence, with one addition of big integers per character of ``b``.

    >>> common_length("reversal", "reveal")
    6
    """
    places: dict[str, int] = {}
    for i, character in enumerate(a):
        places[character] = places.get(character, 0) | 1 << i
    everywhere = (1 << len(a)) - 1
    unmatched = everywhere
    for character in b:
        hits = unmatched & places.get(character, 0)
        unmatched = ((unmatched + hits) | (unmatched - hits)) & everywhere
    return len(a) - unmatched.bit_count()


def similarity(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """Twice the longest common subsequence over the sum of lengths: 1 if equal, 0 for nothing in common."""
    said = (parser.parse_answer(completion) or "").strip()
    if not said or len(said) > MAX_TIMES_LONGER * len(answer):
        return 0.0
    return 2 * common_length(answer, said) / (len(answer) + len(said))


def exact(parser: vf.Parser, completion: vf.Messages, answer: str) -> bool:
    """Is every character right?"""
    return (parser.parse_answer(completion) or "").strip() == answer


def load_environment(
    num_examples: int = 1000,
    num_eval_examples: int = 200,
    min_words: int = 3,
    max_words: int = 10,
    length: int | None = None,
    alphabet: str = "abcdefghijklmnopqrstuvwxyz",
    use_tags: bool = True,
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.SingleTurnEnv:
    """Sentences of ``min_words`` to ``max_words`` words, or strings of ``length`` letters, to reverse."""
    if not 1 <= min_words <= max_words:
        raise ValueError(f"min_words must be from 1 to max_words, got min_words={min_words}, max_words={max_words}")
    if length is not None and length < 1:
        raise ValueError(f"length, the number of letters of a string, must be at least 1, got {length}")
    if not alphabet or any(character.isspace() or character in "<>" for character in alphabet):
        raise ValueError(f"alphabet must be one or more letters, without spaces, '<' and '>', got {alphabet!r}")
    if min(num_examples, num_eval_examples) < 0:
        raise ValueError(f"num_examples={num_examples} and num_eval_examples={num_eval_examples} must not be negative")
    if system_prompt is None:
        system_prompt = TAGS_PROMPT if use_tags else PLAIN_PROMPT
    parser = vf.XMLParser(["reversed_text"], answer_field="reversed_text") if use_tags else vf.Parser()
    words = (min_words, max_words)
    return vf.SingleTurnEnv(
        dataset=make_rows(num_examples, words, length, alphabet, seed, is_eval=False),
        eval_dataset=make_rows(num_eval_examples, words, length, alphabet, seed, is_eval=True),
        system_prompt=system_prompt,
        parser=parser,
        rubric=vf.Rubric([similarity, exact], [1.0, 0.0], parser=parser),
    )
