"""Cost of constrained sampling with two libraries: import, compiling a schema, and the mask of one step.

The engine uses llguidance; outlines-core is measured as well if it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

VOCABULARY = 50_000
STEPS = 200
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 200},
        "size": {"enum": ["small", "large"]},
        "votes": {"type": "array", "items": {"type": "integer"}, "minItems": 10, "maxItems": 20},
    },
    "required": ["name", "size", "votes"],
    "additionalProperties": False,
}


def tokenizer() -> Any:
    """A vocabulary of realistic size: bytes, and random words of letters, digits and punctuation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    draw = random.Random(0)
    vocabulary = {char: i for i, char in enumerate(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    letters = 'etaoinshrdlucmfgypwbvkxjqz0123456789Ġ":,{}[]'
    while len(vocabulary) < VOCABULARY:
        vocabulary.setdefault("".join(draw.choices(letters, k=draw.randint(2, 9))), len(vocabulary))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return made


def import_cpu_ms(module: str) -> float:
    """CPU time of importing a module in a fresh process, minus that of an empty one; the best of five."""
    code = f"import time; start = time.process_time(); import {module}; print(time.process_time() - start)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    return min(runs) * 1e3


def timed(work: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    started = time.process_time()
    return work(*args), (time.process_time() - started) * 1e3


def show(compiled: float, masks: list[float]) -> None:
    step, slowest = statistics.median(masks), max(masks)
    print(f"              a schema {compiled:.1f} ms, a step {step:.3f} ms, slowest {slowest:.1f} ms")


def measure_ours(backend: Any) -> None:
    import numpy as np

    from verifiers.chat.codec import Codec
    from verifiers.engine.constraints import Constraints, schema_grammar

    class Wrapped:
        backend_tokenizer = backend

    constraints = Constraints(Codec(Wrapped()), vocabulary=VOCABULARY, stop_ids=frozenset([0]))
    _, ready = timed(lambda: constraints.compile(schema_grammar({"type": "boolean"}, strict=True)))
    constraint, compiled = timed(lambda: constraints.compile(schema_grammar(SCHEMA, strict=True)))
    masks, draw = [], random.Random(1)
    matcher, ids = constraint.start(), []
    for _ in range(STEPS):
        allowed_V, took = timed(matcher.allowed, ids, VOCABULARY)
        masks.append(took)
        tokens = np.flatnonzero(allowed_V)
        if tokens.tolist() == [0]:
            matcher, ids = constraint.start(), []
        else:
            ids.append(int(draw.choice([token for token in tokens if token])))
    print(f"llguidance    import {import_cpu_ms('llguidance'):.0f} ms, vocabulary and first grammar {ready:.0f} ms")
    show(compiled, masks)


def measure_outlines(backend: Any) -> None:
    from outlines_core import Guide, Index, Vocabulary
    from outlines_core.json_schema import build_regex_from_schema

    known = {token: [i] for token, i in backend.get_vocab().items() if token != "<|end|>"}
    vocabulary, ready = timed(lambda: Vocabulary(0, known))
    index, compiled = timed(lambda: Index(build_regex_from_schema(json.dumps(SCHEMA)), vocabulary))
    guide, masks, draw = Guide(index), [], random.Random(1)
    for _ in range(STEPS):
        tokens, took = timed(guide.get_tokens)
        masks.append(took)
        if guide.is_finished():
            guide = Guide(index)
        else:
            guide.advance(draw.choice([token for token in tokens if token]))
    print(f"outlines-core import {import_cpu_ms('outlines_core'):.0f} ms, vocabulary {ready:.0f} ms")
    show(compiled, masks)


def main() -> None:
    backend = tokenizer()
    print(f"CPU time, a vocabulary of {VOCABULARY:,} tokens, {STEPS} steps")
    measure_ours(backend)
    if importlib.util.find_spec("outlines_core") is not None:
        measure_outlines(backend)


if __name__ == "__main__":
    main()
