"""Classic import path (0.1.5): a model and its tokenizer by name."""

from verifiers.engine import get_model, get_model_and_tokenizer, get_tokenizer

__all__ = ["get_model", "get_model_and_tokenizer", "get_tokenizer"]
