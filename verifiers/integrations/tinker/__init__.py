"""Tinker: a trainer that uses its SDK, and a server that its SDK can train against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers.integrations.tinker.server import TinkerServer
    from verifiers.integrations.tinker.trainer import TinkerTrainer

__all__ = ["TinkerServer", "TinkerTrainer"]
_HOMES = {"TinkerServer": "server", "TinkerTrainer": "trainer"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
