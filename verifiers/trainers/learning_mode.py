"""A model as it is sampled becomes one that gradients are computed of, with dropout or, for ratios of 1, without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def learning_mode(
    model: Any, *, lock: AbstractContextManager[Any], drops: bool, recomputes: bool = False
) -> Iterator[None]:
    """While this lasts a model learns; afterwards it is as the sampler wants it. The lock is held to change it.

    The sampler knows no dropout, so with it (``drops``) the new policy's logprobs are not those of the old one even
    before the first update. Modules that compute their activations again in the backward pass (``recomputes``: gradient
    checkpointing) do so in training mode only: they are put into it with every dropout of their own at 0.
    """
    before: list[tuple[Any, str, Any]] = []
    with lock:
        model.train(drops)
        if recomputes and not drops:
            model.training = True
            for module in model.modules():
                if getattr(module, "gradient_checkpointing", False):
                    before += _without_dropout(module)
                    module.training = True
    try:
        yield
    finally:
        with lock:
            for module, name, value in before:
                setattr(module, name, value)
            model.eval()


def _without_dropout(module: Any) -> list[tuple[Any, str, Any]]:
    """Put the dropout of a module's own at 0; what it was."""
    found = [
        (module, name, value) for name, value in vars(module).items() if "drop" in name and isinstance(value, float)
    ]
    for _, name, _ in found:
        setattr(module, name, 0.0)
    return found
