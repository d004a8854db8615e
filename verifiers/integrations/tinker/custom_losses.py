"""A client's traced loss (torch.fx, as plain data) → a function of tensors, of allowed operations only.

Graphs are untrusted input. A node can only name an operation below, so it cannot read files, import modules or access
other attributes. Sizes are limited, so that a graph cannot use up the server's memory or time.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from verifiers.errors import RequestRefusedError

MOST_NODES = 2000
MOST_CELLS = 1 << 26  # elements of all tensors that the loss of one datum creates
LARGEST = 1 << 63  # bound on Python's integers, which are otherwise unlimited
MOST_EXPONENT, MOST_ITEMS = 64, 16
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_NAMES = [
    "abs", "add", "amax", "amin", "argmax", "argmin", "bool", "ceil", "clamp", "clamp_max", "clamp_min", "clip",
    "clone", "contiguous", "cos", "cumsum", "detach", "diff", "div", "eq", "exp", "expand", "expm1", "flatten", "float",
    "floor", "ge", "gt", "isfinite", "isinf", "isnan", "le", "log", "log1p", "log2", "logaddexp", "logical_and",
    "logical_not", "logical_or", "logsumexp", "lt", "masked_fill", "max", "maximum", "mean", "min", "minimum", "mul",
    "nan_to_num", "ne", "neg", "ones_like", "pow", "prod", "reciprocal", "relu", "reshape", "round", "rsqrt", "sigmoid",
    "sign", "sin", "softmax", "log_softmax", "sqrt", "square", "squeeze", "std", "sub", "sum", "tanh", "to", "type_as",
    "unsqueeze", "var", "view", "where", "zeros_like", "true_divide", "long", "int",
]  # fmt: skip
_METHODS = frozenset(name for name in _NAMES if hasattr(torch.Tensor, name)) | {"size", "numel", "dim"}
_OPERATORS = [
    "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "invert", "le", "lt", "matmul", "mod", "mul", "ne",
    "neg", "or_", "pos", "pow", "sub", "truediv",
]  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"torch.{name}": getattr(torch, name) for name in _NAMES if hasattr(torch, name)},
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS},
    **{
        f"torch.nn.functional.{name}": getattr(functional, name)
        for name in ("relu", "softplus", "logsigmoid", "sigmoid", "tanh", "softmax", "log_softmax", "huber_loss",
                     "smooth_l1_loss", "mse_loss", "l1_loss", "gelu", "silu", "elu")
    },
    **{f"math.{name}": getattr(math, name) for name in ("exp", "log", "sqrt", "floor", "ceil")},
    "builtins.getattr": lambda value, name: _attribute(value, name),
}  # fmt: skip
_FUNCTIONS["torch._C._nn.softplus"] = functional.softplus
_FUNCTIONS["torch._C._nn.log_sigmoid"] = functional.logsigmoid
_DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "int64", "int32", "bool")}


def _attribute(value: Any, name: Any) -> Any:
    if name not in ("shape", "dtype", "device", "ndim"):
        raise RequestRefusedError(f"a custom loss may not read {name!r}")
    return getattr(value, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomLoss:
    """A traced loss: its name, its inputs (``logprobs`` first), and its nodes."""

    name: str
    inputs: tuple[tuple[str, int], ...]  # (name, number of axes)
    nodes: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> CustomLoss:
        try:
            inputs = tuple((str(one["name"]), int(one["rank"])) for one in body["inputs"])
            nodes = tuple(body["graph"]["nodes"])
            loss = cls(name=str(body["name"]), inputs=inputs, nodes=nodes)
            for node in nodes:
                _check_node(node)
        except (KeyError, TypeError, ValueError) as error:
            raise RequestRefusedError(f"not a custom loss: {type(error).__name__}: {error}") from error
        placeholders = [node["target"] for node in nodes if node["op"] == "placeholder"]
        if not inputs or inputs[0][0] != "logprobs" or placeholders != [name for name, _ in inputs]:
            raise RequestRefusedError(
                "a custom loss must have logprobs as its first input, and its graph the same inputs"
            )
        if len(nodes) > MOST_NODES:
            raise RequestRefusedError(f"this custom loss has {len(nodes)} nodes; at most {MOST_NODES} are allowed")
        return loss

    def __call__(self, logprobs: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The loss of one datum, a scalar with a gradient, and its metrics."""
        given = {"logprobs": logprobs, **{name: _given(self.name, inputs, name) for name, _ in self.inputs[1:]}}
        for name, rank in self.inputs:
            if given[name].ndim != rank:
                raise RequestRefusedError(f"loss {self.name!r} takes {name} with {rank} axes, not {given[name].ndim}")
        known: dict[str, Any] = {}
        cells = 0
        for node in self.nodes:
            if node["op"] == "output":
                return self._checked(_value(node["args"][0], known))
            if node["op"] == "placeholder":
                known[node["name"]] = given[node["target"]]
                continue
            made = known[node["name"]] = _run(node, known, MOST_CELLS - cells)
            cells += made.numel() if isinstance(made, torch.Tensor) else 0
        raise RequestRefusedError(f"the graph of loss {self.name!r} has no output")

    def _checked(self, found: Any) -> tuple[Any, dict[str, Any]]:
        if not (isinstance(found, (tuple, list)) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise RequestRefusedError(f"loss {self.name!r} does not return a loss and its metrics")
        loss, metrics = found
        if not isinstance(loss, torch.Tensor) or loss.ndim or (torch.is_grad_enabled() and not loss.requires_grad):
            raise RequestRefusedError(f"loss {self.name!r} is not a scalar that depends on logprobs")
        if wrong := [name for name in metrics if not _METRIC.fullmatch(name)]:
            raise RequestRefusedError(f"metric {wrong[0]!r:.80} is not named custom/<name>:sum or custom/<name>:mean")
        return loss, {name: float(torch.as_tensor(value).detach()) for name, value in metrics.items()}


def _given(loss: str, inputs: Mapping[str, Any], name: str) -> Any:
    if name not in inputs:
        raise RequestRefusedError(f"a datum has no {name!r}, which loss {loss!r} needs")
    return inputs[name]


def _check_node(node: Mapping[str, Any]) -> None:
    op, target = node["op"], node["target"]
    is_known = {
        "placeholder": True,
        "output": True,
        "call_function": target in _FUNCTIONS,
        "call_method": target in _METHODS,
    }.get(op, False)
    if not is_known:
        raise RequestRefusedError(f"a custom loss may not use {op} {target!r:.80}; run it in the client instead")


def _run(node: Mapping[str, Any], known: Mapping[str, Any], room: int) -> Any:
    """The value of a node; its tensors may have up to ``room`` elements."""
    target = str(node["target"])
    args = [_value(one, known) for one in node.get("args", ())]
    kwargs = {str(key): _value(one, known) for key, one in node.get("kwargs", {}).items()}
    if target.startswith("operator.") and target != "operator.getitem":
        _check_operands(target, [*args, *kwargs.values()])
    _check_room(target, _cells(target, [*args, *kwargs.values()]), room)
    if node["op"] == "call_function":
        found = _FUNCTIONS[target](*args, **kwargs)
    elif not args or not isinstance(args[0], torch.Tensor):
        raise RequestRefusedError(f"{target} is a method of tensors")
    else:
        found = getattr(args[0], target)(*args[1:], **kwargs)
    if isinstance(found, torch.Tensor):  # an expanded tensor has elements without memory
        _check_room(target, found.numel(), room)
    return found


def _check_operands(target: str, operands: Sequence[Any]) -> None:
    """Allow only tensors, numbers of limited size and short shapes, because Python's own values grow without limit."""
    for one in operands:
        is_number = isinstance(one, (bool, float, torch.Tensor)) or (isinstance(one, int) and abs(one) < LARGEST)
        is_shape = target == "operator.add" and isinstance(one, (tuple, list)) and len(one) <= MOST_ITEMS
        if not is_number and not is_shape:
            raise RequestRefusedError(f"{target} of a custom loss does not accept this {type(one).__name__}")
    if target == "operator.pow" and any(isinstance(one, int) and abs(one) > MOST_EXPONENT for one in operands[1:]):
        raise RequestRefusedError(f"a custom loss may only use exponents up to {MOST_EXPONENT}")


def _cells(target: str, operands: Sequence[Any]) -> int:
    """An upper bound on the elements of an operation's result."""
    tensors = [one for one in operands if isinstance(one, torch.Tensor)]
    if target == "operator.matmul" and len(tensors) == 2:
        return int(math.prod(tensors[0].shape[:-1]) * math.prod(tensors[1].shape[:-2]) * tensors[1].shape[-1])
    try:
        return math.prod(torch.broadcast_shapes(*(one.shape for one in tensors)))
    except RuntimeError:  # the operation itself will raise
        return 0


def _check_room(target: str, cells: int, room: int) -> None:
    if cells > room:
        raise RequestRefusedError(f"the tensors of a custom loss have more than {MOST_CELLS} elements, at {target}")


def _value(encoded: Any, known: Mapping[str, Any]) -> Any:
    if isinstance(encoded, list):
        return [_value(one, known) for one in encoded]
    if not isinstance(encoded, Mapping):
        return encoded
    ((kind, value),) = encoded.items()
    if kind == "ref":
        return known[value]
    return _DECODERS[kind](value, known)


def _several(values: Sequence[Any], known: Mapping[str, Any]) -> list[Any]:
    return [_value(one, known) for one in values]


_DECODERS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "tuple": lambda value, known: tuple(_several(value, known)),
    "dict": lambda value, known: {str(key): _value(one, known) for key, one in value.items()},
    "slice": lambda value, known: slice(*_several(value, known)),
    "ellipsis": lambda value, known: Ellipsis,
    "float": lambda value, known: float(value),
    "dtype": lambda value, known: _DTYPES[value],
    "device": lambda value, known: known["logprobs"].device,
}
