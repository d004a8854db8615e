"""Names that a configuration may choose among; kept apart so that reading one needs no torch."""

from __future__ import annotations

from typing import Literal, get_args

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo"]
LOSS_TYPES: tuple[str, ...] = get_args(LossType)
SCHEDULES = ("constant", "linear", "cosine")
STRATEGIES = ("no", "steps", "epoch")

# Each method's own clip range, where the configuration says nothing: (below, above).
CLIP: dict[str, tuple[float, float]] = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (0.2, 5.0)}
