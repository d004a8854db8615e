"""Saved runs, used again without a model: scored anew, played anew."""

from verifiers.reruns.play import play
from verifiers.reruns.replay import Replayed, replay
from verifiers.reruns.rescore import Rescored, rescore

__all__ = ["Replayed", "Rescored", "play", "replay", "rescore"]
