"""Build a fast transformers tokenizer from the metadata of a GGUF file, with the same ids as llama.cpp's."""

from __future__ import annotations

from typing import Any

from verifiers.engine.files.gguf import GGUF

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Pre-tokenizers by their llama.cpp names.
_PATTERNS = {"llama-bpe": _LLAMA3, "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")}
_DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact")  # split off each digit, then continue as GPT-2
_KNOWN = ("gpt-2", *_DIGIT_BY_DIGIT, *_PATTERNS)
_CONTROL, _USER_DEFINED = 3, 4  # token types; tokens of other types are produced by merges
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_of(file: GGUF) -> Any:
    """The tokenizer of the model in the file, with its special tokens and chat template. It can be saved."""
    from transformers import PreTrainedTokenizerFast

    tokens = _tokens(file)
    core = _core(file, tokens)
    options: dict[str, Any] = {}
    for option, key in _SPECIALS.items():
        if (number := _special(file, key, tokens)) is not None:
            options[option] = tokens[number]
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template.strip():
        options["chat_template"] = template
    context = file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length")
    if isinstance(context, int):
        options["model_max_length"] = context
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **options)


def _special(file: GGUF, key: str, tokens: list[str]) -> int | None:
    number = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if number is not None and not (isinstance(number, int) and 0 <= number < len(tokens)):
        raise ValueError(f"{file.path}: the {key} token has the id {number!r}, but there are {len(tokens):,} tokens")
    return number


def _list(file: GGUF, key: str, kind: type) -> list[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ValueError(
            f"{file.path} has no tokenizer, or a corrupt one: tokenizer.ggml.{key} is not a list of {kind.__name__}"
        )
    return values


def _tokens(file: GGUF) -> list[str]:
    model = file.metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(
            f"{file.path} has a tokenizer of the type {model!r}; only 'gpt2' (byte-level BPE) is supported as GGUF: "
            "use the model's folder with its tokenizer.json instead"
        )
    tokens = _list(file, "tokens", str)
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"{file.path} is corrupt: its tokenizer lists a token twice")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise ValueError(f"{file.path} is corrupt: {len(tokens):,} tokens, but embeddings for {embedding.shape[0]:,}")
    return tokens


def _core(file: GGUF, tokens: list[str]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    name = str(file.metadata.get("tokenizer.ggml.pre"))
    if name not in _KNOWN:
        raise ValueError(
            f"{file.path} has the pre-tokenizer {name!r}, which is not supported; the supported ones are "
            f"{', '.join(_KNOWN)}"
        )
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = []
    for merge in _list(file, "merges", str):
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise ValueError(f"{file.path} is corrupt: its tokenizer merges {merge!r}, which are not all tokens")
        merges.append((left, right))
    is_llama3 = name == "llama-bpe"
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3))
    core.pre_tokenizer = _pre_tokenizer(name)
    if name == "qwen2":
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    types = _list(file, "token_type", int)
    if len(types) != len(tokens):
        raise ValueError(f"{file.path} is corrupt: {len(types):,} token types for {len(tokens):,} tokens")
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _of(tokens, types, _CONTROL)])
    core.add_tokens([AddedToken(t, normalized=False) for t in _of(tokens, types, _USER_DEFINED)])
    core.post_processor = _post_processor(file, tokens, adds_bos=is_llama3)
    return core


def _of(tokens: list[str], types: list[int], wanted: int) -> list[str]:
    return [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]


def _post_processor(file: GGUF, tokens: list[str], *, adds_bos: bool) -> Any:
    """Byte-level offsets, and the BOS and EOS tokens that are added to every text."""
    from tokenizers import processors

    byte_level = processors.ByteLevel(trim_offsets=True)
    around = {"bos": adds_bos, "eos": False}
    found: dict[str, tuple[str, int]] = {}
    for key, default in around.items():
        number = _special(file, key, tokens)
        if file.metadata.get(f"tokenizer.ggml.add_{key}_token", default) and number is not None:
            found[key] = (tokens[number], number)
    if not found:
        return byte_level
    before, after = ([found[key][0]] if key in found else [] for key in around)
    template = processors.TemplateProcessing(
        single=[*before, "$A:0", *after],
        pair=[*before, "$A:0", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in after)],
        special_tokens=list(found.values()),
    )
    return processors.Sequence([byte_level, template])


def _pre_tokenizer(name: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name not in _PATTERNS)
    if name in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[name]), behavior="isolated")
        return pre_tokenizers.Sequence([split, byte_level])
    if name in _DIGIT_BY_DIGIT:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level
