"""A loaded model: its engine, its chat template and tokenizer, its stop tokens, and its grammars."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.chat import ChatTemplate, ChatWriter, Codec
from verifiers.engine.constraints import Constraints
from verifiers.engine.files.smollm2 import public_name

if TYPE_CHECKING:
    from verifiers.engine.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyModel:
    """A `LocalModel`'s parts once it is loaded."""

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


def name_of(model: Any) -> str:
    """The name of a model: the requested name, or the name in its configuration, or its class."""
    if isinstance(model, (str, Path)):
        return public_name(str(model))
    inner = getattr(model, "model", model) if hasattr(model, "submit") else model
    named = getattr(getattr(inner, "config", None), "_name_or_path", None)
    return public_name(str(named)) if named else type(inner).__name__


def stop_ids_of(model: Any, tokenizer: Any, template: ChatTemplate, codec: Codec) -> frozenset[int]:
    """The tokens that end a reply according to the tokenizer, the generation config and the chat template."""
    generation = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = [getattr(tokenizer, "eos_token_id", None), template.end_of_turn(codec)]
    found += generation if isinstance(generation, (list, tuple)) else [generation]
    return frozenset(int(token) for token in found if token is not None)
