"""Decoder layers of the common kind (norm, rotary attention, norm, gated feed-forward) in fewer operations.

A layer is recognised by its parts and proven by its numbers: both ways are run on the same probe, and what they hand to
attention and what they return must agree. Any other layer, and any that somebody has hooked, runs as transformers wrote
it. Parameters and projections are the layer's own, looked up anew at every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiers.engine import kv_cache as slots
from verifiers.engine import projections
from verifiers.engine.bare import Bare
from verifiers.engine.projections import is_plain, is_touched

logger = logging.getLogger("verifiers.engine")

WHOLE = {"model", "lm_head"}
INNER = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
PROBE_SIZE = 1e-2  # small beside what a layer adds to it, so that this is what is compared


@dataclass(frozen=True, slots=True)
class LeanLayer:
    """One layer, and what its own forward passes to attention."""

    layer: Any
    index: int
    head_dim: int
    has_head_norms: bool
    is_silu: bool
    scale: float
    window: int | None
    softcap: float | None

    def forward(self, hidden_states: Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        """As the layer's own; the hidden states it is given are its to overwrite."""
        if position_embeddings is None or position_embeddings[0].shape[-1] != self.head_dim:
            own = partial(type(self.layer).forward, self.layer)
            return own(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
        shape = hidden_states.shape
        return self.run(hidden_states.reshape(-1, shape[-1]), shape[:-1], position_embeddings).view(shape)

    def run(self, hidden: Tensor, shape: Sequence[int], rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states one beside the other, of tokens that are laid out in ``shape`` (rows, tokens of each)."""
        layer = self.layer
        hidden = add_projected(
            hidden, layer.self_attn.o_proj, self._attended(layer.input_layernorm(hidden), shape, rotary)
        )
        fed_forward = self._fed_forward(layer.post_attention_layernorm(hidden))
        return add_projected(hidden, layer.mlp.down_proj, fed_forward)

    def _attended(self, x: Tensor, shape: Sequence[int], rotary: tuple[Tensor, Tensor]) -> Tensor:
        attention = self.layer.self_attn
        shape = (*shape, -1, self.head_dim)
        projected = projections.project(x, (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k, v = (one.view(shape) for one in projected)
        if self.has_head_norms:
            q, k = attention.q_norm(q), attention.k_norm(k)
        out = slots.attend_rotated(
            self.index, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *rotary,
            scale=self.scale, window=self.window, softcap=self.softcap,
        )  # fmt: skip
        return out.transpose(1, 2).reshape(x.shape[0], -1)

    def _fed_forward(self, x: Tensor) -> Tensor:
        mlp = self.layer.mlp
        if not self.is_silu:
            return mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
        return projections.project_gated(x, mlp.gate_proj, mlp.up_proj, _gated)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    if not gate.is_cuda:
        return F.silu(gate).mul_(up)
    from verifiers.engine import kernels

    return kernels.gated(gate, up)


def add_projected(total: Tensor, project: Any, x: Tensor) -> Tensor:
    """Add a projection to ``total``, in place: by the multiplication itself where the projection is a plain one."""
    if not (is_plain(project) and project.bias is None and total.is_contiguous()):
        return total.add_(project(x))
    return total.addmm_(x, project.weight.t())


class Lean:
    """A model whose layers run leanly while this lasts: those that were recognised, unless somebody listens in."""

    def __init__(self, model: Any, configs: Sequence[Any]) -> None:
        # Whoever listens in now would hear the probe: such a model runs as it is.
        modules = [] if any(map(is_touched, model.modules())) else list(model.modules())
        found = [recognise(layer, configs) for layer in modules if _has_parts(layer)]
        self.layers = [one for one in found if one is not None]
        self._watched = [part for one in self.layers for part in (one.layer, one.layer.self_attn, one.layer.mlp)]
        self._in_use: list[LeanLayer] = []
        self._whole = self._recognise_whole(model, configs)
        self.bare = self._recognise_bare(configs)

    def forward(self, ids: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor | None:
        """The logits, if the whole model is of the common kind: None if it has to be asked itself."""
        if self._whole is None or not self._in_use or is_touched(self._whole) or is_touched(self._whole.model):
            return None
        return self._run_whole(self._whole, ids, positions, keep)

    def _run_whole(self, model: Any, ids: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor:
        inner = model.model
        embedded = inner.embed_tokens(ids)
        rotary = inner.rotary_emb(embedded, position_ids=positions)
        hidden = embedded.view(-1, embedded.shape[-1])
        for layer in self.layers:
            hidden = layer.run(hidden, ids.shape, rotary)
        hidden = inner.norm(hidden).view(embedded.shape)
        logits: Tensor = model.lm_head(hidden if isinstance(keep, int) and keep == 0 else hidden[:, keep])
        return logits

    def __enter__(self) -> None:
        if any(map(is_touched, self._watched)):
            return
        self._in_use = self.layers
        for one in self._in_use:
            one.layer.__dict__["forward"] = one.forward

    def __exit__(self, *_: object) -> None:
        for one in self._in_use:
            del one.layer.__dict__["forward"]
        self._in_use = []

    def _recognise_whole(self, model: Any, configs: Sequence[Any]) -> Any:
        """The model, if there is no more to it than an embedding, these layers, a norm and a head."""
        inner = model._modules.get("model")
        if model._modules.keys() != WHOLE or inner is None or inner._modules.keys() != INNER:
            return None
        if [one.layer for one in self.layers] != list(inner.layers) or not self.layers:
            return None
        return model if self._gives_its_numbers(model, configs, partial(self._run_whole, model)) else None

    def _recognise_bare(self, configs: Sequence[Any]) -> Bare | None:
        """The whole model without its modules, where that is known to give its numbers."""
        if self._whole is None:
            return None
        bare = Bare(self._whole, self.layers)
        is_same = bare.is_welcome and self._gives_its_numbers(self._whole, configs, bare.forward)
        return bare if is_same else None

    def _gives_its_numbers(self, model: Any, configs: Sequence[Any], forward: Callable[..., Tensor]) -> bool:
        weight = model.model.embed_tokens.weight
        ids = torch.arange(6, device=weight.device).view(2, 3) % weight.shape[0]
        positions = torch.tensor([[0, 1, 2], [4, 5, 6]], device=weight.device)
        theirs, ours = _Probe(), _Probe()
        try:
            with torch.no_grad(), _resting(model), slots.attending(configs, theirs):
                expected = model(input_ids=ids, position_ids=positions, use_cache=False, return_dict=True).logits
            with torch.no_grad(), _resting(model), slots.attending(configs, ours):
                given = forward(ids, positions, 0)
        except Exception as error:  # foreign code, asked in a way it may not know
            logger.debug("%s runs as it is: %r", type(model).__name__, error)
            return False
        return _agree([*theirs.seen, expected], [*ours.seen, given], rounds=len(self.layers))


# --- recognising ------------------------------------------------------------------------------------------------------


def recognise(layer: Any, configs: Sequence[Any]) -> LeanLayer | None:
    """The lean way of running this layer, if it gives the layer's own numbers."""
    attention = layer.self_attn
    has_head_norms = attention._modules.keys() >= HEAD_NORMS
    weight = layer.input_layernorm.weight
    lean = partial(
        LeanLayer, layer, attention.layer_idx, attention.head_dim, has_head_norms, _is_silu(layer.mlp.act_fn, weight)
    )
    theirs, ours = _Probe(), _Probe()
    hidden, rotary = _probe_input(weight, attention.head_dim)
    try:
        with torch.no_grad(), _resting(layer), slots.attending(configs, theirs):
            expected = type(layer).forward(layer, hidden.clone(), position_embeddings=rotary, attention_mask=None)
        found = lean(**theirs.settings)
        with torch.no_grad(), _resting(layer), slots.attending(configs, ours):
            given = found.forward(hidden.clone(), position_embeddings=rotary)
    except Exception as error:  # foreign code, asked in a way it may not know: then it is not the kind we know
        logger.debug("layer %s runs as it is: %r", attention.layer_idx, error)
        return None
    is_same = theirs.settings == ours.settings and _agree([*theirs.seen, expected], [*ours.seen, given])
    return found if is_same else None


@contextmanager
def _resting(module: Any) -> Iterator[None]:
    """Without dropout for a moment."""
    training = [one for one in module.modules() if one.training]
    for one in training:
        one.training = False
    try:
        yield
    finally:
        for one in training:
            one.training = True


class _Probe:
    """Attention that remembers what it was given, and answers with something of the right shape."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.settings: dict[str, Any] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        self.seen += [q.clone(), k.clone(), v.clone()]
        self.settings = settings
        return q.flip(-1).contiguous()


def _probe_input(like: Tensor, head_dim: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((2, 3, like.shape[0]), generator=generator) * PROBE_SIZE
    angle = torch.rand((2, 3, head_dim), generator=generator) * 6.0
    one, two, three = (x.to(like.device, like.dtype) for x in (hidden, angle.cos(), angle.sin()))
    return one, (two, three)


def _agree(theirs: Sequence[Any], ours: Sequence[Any], rounds: int = 1) -> bool:
    """The same to rounding, which adds up as a random walk over so many rounds."""
    if len(theirs) != len(ours):
        return False
    for one, other in zip(theirs, ours, strict=True):
        if not isinstance(one, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
            return False
        within = (1e-3 if one.dtype is torch.float32 else 3e-2) * rounds**0.5
        size, apart = one.float().abs().max(), (one.float() - other.float()).abs().max()
        if not bool((size > 0) & (apart <= within * size)):  # zeros would prove nothing
            return False
    return True


def _has_parts(layer: Any) -> bool:
    """Exactly the parts that the lean forward knows of: one more would be left out."""
    if layer._modules.keys() != LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    head_dim = getattr(attention, "head_dim", None)
    return (
        attention._modules.keys() - HEAD_NORMS == PROJECTIONS
        and len(attention._modules.keys() & HEAD_NORMS) != 1
        and mlp._modules.keys() == FEED_FORWARD
        and isinstance(getattr(attention, "layer_idx", None), int)
        and isinstance(head_dim, int)
        and head_dim % 2 == 0
        and isinstance(getattr(layer.input_layernorm, "weight", None), Tensor)
    )


def _is_silu(function: Any, like: Tensor) -> bool:
    x = torch.linspace(-8, 8, 64, device=like.device, dtype=like.dtype)
    with torch.no_grad():
        return bool(torch.equal(function(x), F.silu(x)))
