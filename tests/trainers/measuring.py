"""A training in a process of its own → the memory that its plan says, and the memory that the process took."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that are made on a device while this lasts: how many there are, and the most at once."""

    def __init__(self, device: str, *besides: Any) -> None:
        super().__init__()
        self._device = device
        there = [one for module in besides for one in (*module.parameters(), *module.buffers())]
        self._known = {getattr(one, "_local_tensor", one).untyped_storage()._cdata for one in there}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                self._note(getattr(one, "_local_tensor", one))
        return made

    def _note(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type != self._device or storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.now -= size


def status(name: str) -> int:
    """A figure of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def model_of(hidden: int, layers: int, vocabulary: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=vocabulary, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def trained(folder: Path, sizes: dict[str, int], lora: bool = False, **settings: Any) -> Any:
    """A supervised training on sequences of one length: what is measured is what is planned."""
    import verifiers as vf
    from tests.engine import tiny

    words = tiny.tokenizer()
    rows = [
        {"prompt": "a", "completion": "b" * (settings["max_seq_length"] - 3)} for _ in range(settings["batch_size"])
    ]
    return vf.SFTTrainer(
        model=model_of(**sizes),
        tokenizer=words,
        dataset=rows,
        config={"max_steps": 2, "show_progress": False, "output_dir": folder, **settings},
        peft_config=vf.lora_defaults() if lora else None,
    )


def vowels(completion: Any) -> float:
    """A reward that differs between long replies: where all are alike nothing is learned."""
    return sum(completion[-1]["content"].count(letter) for letter in "aeiou") / 400


def sampled(folder: Path, sizes: dict[str, int], **settings: Any) -> Any:
    """A training on rollouts, all of them as long as they may be."""
    import verifiers as vf
    from tests.engine import tiny
    from tests.trainers import making

    words = tiny.tokenizer()
    length = settings["max_seq_length"]
    return vf.GRPOTrainer(
        model=model_of(**{**sizes, "vocabulary": len(words)}),
        tokenizer=words,
        env=making.environment(rubric=vf.Rubric([vowels])),
        config=making.config(folder, max_new_tokens=length, sampling_args={"ignore_eos": True}, **settings),
    )


def main(folder: Path, asked: dict[str, Any]) -> None:
    """The first training loads modules, starts threads and compiles kernels for these sizes; it is not measured."""
    make = sampled if asked.pop("grpo", False) else trained
    sizes = {name: asked.pop(name) for name in ("hidden", "layers", "vocabulary")}
    make(folder / "first", {**sizes, "layers": 1}, **{**asked, "max_steps": 1}).train()
    gc.collect()
    before = status("VmRSS")
    trainer = make(folder / "second", sizes, **asked)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    trainer.train()
    memory = trainer.memory
    print(json.dumps({"planned": memory.peak, "measured": status("VmHWM") - before, "plan": str(memory)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
