"""OpenEnv: environments behind a WebSocket, with their actions as tools."""

from __future__ import annotations

from verifiers.integrations.openenv.env import OpenEnv

__all__ = ["OpenEnv"]
