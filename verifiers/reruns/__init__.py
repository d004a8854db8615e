"""Reuses saved runs without sampling from a model: rescores them, or replays them."""

from verifiers.reruns.offline import NoNetworkError, no_network
from verifiers.reruns.play import play
from verifiers.reruns.replay import Replayed, replay
from verifiers.reruns.rescore import Rescored, rescore

__all__ = ["NoNetworkError", "Replayed", "Rescored", "no_network", "play", "replay", "rescore"]
