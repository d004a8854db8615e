"""Local inference with exact tokens: a model in this process as a client, and as an OpenAI-compatible server.

Importing this package does not import torch. The names below are imported on first access.
"""

from __future__ import annotations

import importlib
from typing import Any
from weakref import WeakValueDictionary

from verifiers.clients.protocol import Client

_HOME = {
    "Engine": "engine",
    "EngineFullError": "engine",
    "Generated": "sequence",
    "LocalModel": "local_model",
    "LocalServer": "server.server",
    "Sampling": "sequence",
    "get_model": "files.models",
    "get_model_and_tokenizer": "files.models",
    "get_tokenizer": "files.models",
    "serve": "server.server",
}

__all__ = sorted([*_HOME, "as_client"])

# By id of the module. A LocalModel keeps its module alive, so an id in here cannot have been reused.
_clients: WeakValueDictionary[int, Any] = WeakValueDictionary()


def as_client(value: Any, model: str | None = None) -> Client:
    """A client over a model in this process: a module of transformers (or peft), an `Engine`, or a `LocalModel`.

    The same module returns the same client while that client is in use, so one module has one engine.
    """
    from verifiers.engine.local_model import LocalModel

    if isinstance(value, LocalModel):
        return value
    if not hasattr(value, "submit") and not (hasattr(value, "parameters") and hasattr(value, "config")):
        raise TypeError(f"a {type(value).__name__} is not a model; pass a transformers model, Engine or LocalModel")
    client = _clients.get(id(value))
    if client is None:
        client = _clients[id(value)] = LocalModel(value, name=model)
    found: Client = client
    return found


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'verifiers.engine' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"verifiers.engine.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "transformers", "numpy"):
            raise
        raise ImportError(f"verifiers.engine.{name} needs {error.name}: pip install 'verifiers[local]'") from error
    globals()[name] = value
    return value
