"""A loaded model: its engine, its chat template and tokenizer, its stop tokens, and its grammars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.chat import ChatTemplate, ChatWriter, Codec
from verifiers.engine.constraints import Constraints
from verifiers.engine.files.smollm2 import public_name

if TYPE_CHECKING:
    from verifiers.engine.engine import Engine
    from verifiers.engine.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyModel:
    """What `LocalModel` has once it is loaded."""

    engine: Engine
    writer: ChatWriter
    stop_ids: frozenset[int]
    vocabulary: int
    constraints: Constraints

    @property
    def codec(self) -> Codec:
        return self.writer.codec

    @property
    def template(self) -> ChatTemplate:
        return self.writer.template


def load(
    source: Any,
    tokenizer: Any = None,
    *,
    name: str,
    sizes: Mapping[str, int],
    device: Any = None,
    dtype: Any = None,
    stop_ids: frozenset[int] = frozenset(),
) -> ReadyModel:
    """Load a model by name, or take a module or an engine; ``sizes``: rows, length, cache_tokens, max_waiting.

    Raises ValueError or OSError, with what is missing, if a model is not found or does not fit into memory.
    """
    from verifiers.engine.engine import Engine
    from verifiers.engine.files import models

    if isinstance(source, Engine):
        model = source.model
        tokenizer = models.get_tokenizer(model) if tokenizer is None else tokenizer
    else:
        tokenizer = getattr(source, "tokenizer", None) if tokenizer is None else tokenizer
        check_fits = partial(_plan, sizes)
        model, tokenizer = models.load(source, tokenizer, device=device, dtype=dtype, before_weights=check_fits)
    writer = ChatWriter(tokenizer, model=name)
    stop_ids |= stop_ids_of(model, tokenizer, writer.template, writer.codec)
    engine = source if isinstance(source, Engine) else _engine(model, sizes, stop_ids)
    vocabulary, ends = engine.vocabulary, stop_ids | engine.stop_ids
    constraints = Constraints(writer.codec, vocabulary=vocabulary, stop_ids=ends)
    return ReadyModel(engine=engine, writer=writer, stop_ids=ends, vocabulary=vocabulary, constraints=constraints)


def _plan(sizes: Mapping[str, int], config: Any, dtype: Any, device: Any, *, weights_loaded: bool = False) -> Plan:
    """The sizes of the engine; ``WillNotFitError`` if the memory is too small for those asked for."""
    from verifiers.engine.plan import plan

    asked = {name: sizes.get(name) for name in ("rows", "length", "cache_tokens")}
    return plan(config, **asked, dtype=dtype, device=device, weights_loaded=weights_loaded)


def _engine(model: Any, sizes: Mapping[str, int], stop_ids: frozenset[int]) -> Engine:
    from verifiers.engine.engine import Engine
    from verifiers.kernels.devices import current

    parameter = next(model.parameters())
    planned = _plan(sizes, model.config, parameter.dtype, parameter.device, weights_loaded=True)
    with current(parameter.device):  # of the thread that loads it
        return Engine(model, **{**sizes, **asdict(planned)}, stop_ids=sorted(stop_ids))


def name_of(model: Any) -> str:
    """The name of a model: as it was asked for, or as its configuration or class says."""
    if isinstance(model, (str, Path)):
        return public_name(str(model))
    inner = getattr(model, "model", model) if hasattr(model, "submit") else model
    named = getattr(getattr(inner, "config", None), "_name_or_path", None)
    return public_name(str(named)) if named else type(inner).__name__


def stop_ids_of(model: Any, tokenizer: Any, template: ChatTemplate, codec: Codec) -> frozenset[int]:
    """The tokens that end a reply, by the tokenizer, the generation config, and the chat template."""
    generation = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = [getattr(tokenizer, "eos_token_id", None), template.end_of_turn(codec)]
    found += generation if isinstance(generation, (list, tuple)) else [generation]
    return frozenset(int(token) for token in found if token is not None)
