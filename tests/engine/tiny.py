"""A model, a tokenizer and a chat template small enough to be made anew in every test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>"
    "<tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = ["the answer is four", "2 + 2 = 4", "user assistant system", "hello world, hello answer"] * 4


def tokenizer(template: str | None = CHATML, *, vocabulary: int = 320, special: Sequence[str] = ()) -> Any:
    """Byte-level BPE, as SmolLM2's and Qwen's are, over a handful of words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*SPECIAL, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = template
    return made


def model(tokenizer: Any, *, context: int = 512, seed: int = 0, layers: int = 2) -> Any:
    """A random Llama of a few thousand parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def brief_model(tokenizer: Any, *, context: int = 512, seed: int = 0) -> Any:
    """As `model`, but fond of what ends things: quotes, brackets, and the reply.

    One number of every embedding is the same and large, so that the head can give each token a bias: a random model
    closes the strings and lists of a schema only after hundreds of tokens.
    """
    import torch

    made = model(tokenizer, context=context, seed=seed)
    ends = [tokenizer.convert_tokens_to_ids(one) for one in ('"', "}", "]", "<|im_end|>")]
    with torch.no_grad():
        made.model.embed_tokens.weight[:, 0] = 4.0
        made.lm_head.weight[:, 0] = 0.0
        made.lm_head.weight[ends, 0] = 2.0
    return made


class Scripted:
    """Makes a model say a text: its logits are those of the next token of the script, wherever it is asked to go on.

    The script goes by position after the prompt, so one script serves one prompt length: ``say`` sets it.
    """

    def __init__(self, model: Any) -> None:
        self.ids: list[int] = []
        self.start = 0
        self._handle = model.register_forward_hook(self._speak, with_kwargs=True)

    def say(self, ids: Sequence[int], *, after: int) -> None:
        self.ids, self.start = list(ids), after

    def _speak(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        positions = kwargs["position_ids"].flatten().tolist()
        logits = output.logits
        for row in range(logits.numel() // logits.shape[-1]):
            # The row's position: prefill keeps the last token of each prompt, decoding has one token a row.
            at = positions[row] if len(positions) == logits.numel() // logits.shape[-1] else positions[-1]
            step = at - (self.start - 1)
            if 0 <= step < len(self.ids):
                flat = logits.view(-1, logits.shape[-1])
                flat[row] = -30.0
                flat[row, self.ids[step]] = 30.0
        return output
