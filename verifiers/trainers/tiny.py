"""A tiny random Llama with a character tokenizer, small enough to train on a CPU in seconds."""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Mapping
from typing import Any

import torch

ROLES = ("system", "user", "assistant", "tool")
PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
SPECIAL = (PAD, END, UNKNOWN, *(f"<|{role}|>" for role in ROLES))
# A message takes one token for its role and one for its end, so that a chat is hardly longer than its text.
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{{ message['content'] or '' }}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
DEFAULT_CHARACTERS = string.printable[:-3]  # without vertical tabs and the like


def tiny_model(
    characters: str | None = None,
    *,
    texts: Iterable[Any] = (),
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    context: int = 256,
    seed: int = 0,
) -> tuple[Any, Any]:
    """A random Llama whose tokens are single characters, and its tokenizer with a chat template.

    Its vocabulary has the given ``characters`` and those of ``texts`` (strings, messages, or rows of an environment);
    without either, printable ASCII. The seed determines its weights; the global random state is not changed.

    >>> model, tokenizer = tiny_model("abc", hidden_size=32)
    >>> tokenizer.decode(tokenizer.encode("cab"))
    'cab'
    >>> tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], add_generation_prompt=True, tokenize=False)
    '<|user|>ab<|end|><|assistant|>'
    """
    for name, value in {"hidden_size": hidden_size, "layers": layers, "heads": heads, "context": context}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value!r}")
    if hidden_size % (2 * heads):
        raise ValueError(f"hidden_size={hidden_size} must be a multiple of 2 × heads={heads}")
    known = set(characters or "")
    for text in texts:
        known |= _characters(text)
    tokenizer = _tokenizer(sorted(known or set(DEFAULT_CHARACTERS)), context)
    return _model(tokenizer, hidden_size, layers, heads, context, seed), tokenizer


def _characters(value: Any) -> set[str]:
    """Every character of a text, or of all texts in a message or a row."""
    if isinstance(value, str):
        return set(value)
    if isinstance(value, Mapping):
        return set().union(*map(_characters, value.values()))
    if isinstance(value, (list, tuple)):
        return set().union(*map(_characters, value))
    return set(str(value)) if isinstance(value, (int, float)) else set()


def _tokenizer(characters: list[str], context: int) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _model(tokenizer: Any, hidden_size: int, layers: int, heads: int, context: int, seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        # The defaults suit large models and long contexts; with these values a small model learns positions far sooner.
        initializer_range=hidden_size**-0.5,
        rope_parameters={"rope_type": "default", "rope_theta": max(context / (2 * math.pi), 10.0)},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()
