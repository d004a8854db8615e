"""Bodies of training requests → checked data; results → bodies. Protobuf, or JSON for older clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verifiers.errors import RequestRefusedError
from verifiers.integrations.tinker import wire

_DTYPES = {wire.FLOAT32: np.dtype(np.float32), wire.INT64: np.dtype(np.int64), wire.INT32: np.dtype(np.int32)}
_NAMED: dict[str, Any] = {"float32": np.dtype(np.float32), "int64": np.dtype(np.int64)}
MOST_IDS = 1 << 31  # token ids are int32 in protobuf
MOST_CELLS = 1 << 26  # elements of one tensor, after a sparse one is made dense


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive positions of a datum: tokens of a sequence that was sampled here, or (without an id) other tokens."""

    length: int
    sequence_id: str | None = None
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Datum:
    """One training sequence: its tokens, and arrays with the same first axis."""

    ids_T: Any
    inputs: Mapping[str, Any]
    spans: Sequence[Span] = ()

    @property
    def targets(self) -> Any:
        return self.inputs["target_tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRequest:
    """A request for a forward pass, and a backward pass unless ``forward_only``."""

    model_id: str
    data: Sequence[Datum]
    loss_fn: str
    config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    seq_id: int | None = None

    def check(self, *, vocabulary: int, length: int) -> None:
        """Raise for data that the model cannot compute, with the index of the datum."""
        if not self.data:
            raise RequestRefusedError("there is no data to train on")
        for i, one in enumerate(self.data):
            n = len(one.ids_T)
            if not n:
                raise RequestRefusedError(f"datum {i} has no tokens")
            if n > length:
                raise RequestRefusedError(f"datum {i} has {n} tokens, but the context of the model is {length}")
            if "target_tokens" not in one.inputs:
                raise RequestRefusedError(f"datum {i} has no target_tokens")
            if one.targets.ndim not in (1, 2) or not one.targets.size:
                raise RequestRefusedError(f"datum {i}: target_tokens has the shape {one.targets.shape}")
            if odd := one.inputs.keys() ^ self.data[0].inputs.keys():
                raise RequestRefusedError(f"datum 0 and datum {i} must have the same arrays; they differ in {min(odd)}")
            for what, ids in (("model_input", one.ids_T), ("target_tokens", one.targets)):
                if ids.dtype.kind != "i" or (ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary)):
                    raise RequestRefusedError(
                        f"datum {i}: {what} has ids that are not tokens of this model (0 to {vocabulary - 1})"
                    )
            for name, values in one.inputs.items():
                _check_input(i, name, values, one.targets.shape, n)


def _check_input(i: int, name: str, values: Any, shape: tuple[int, ...], n: int) -> None:
    if values.ndim and values.shape[0] != n:
        raise RequestRefusedError(f"datum {i}: {name} has {values.shape[0]} values for {n} tokens of model_input")
    if name == "weights" and values.shape != shape:
        raise RequestRefusedError(f"datum {i}: weights has the shape {values.shape}, but target_tokens {shape}")
    if not bool(np.isfinite(values).all()):
        raise RequestRefusedError(f"datum {i}: {name} has a value that is not finite")


# --- reading ----------------------------------------------------------------------------------------------------------


def read_protobuf(body: bytes) -> TrainingRequest:
    from google.protobuf.message import DecodeError

    asked = wire.message("ForwardBackwardRequest")
    try:
        asked.ParseFromString(body)
    except DecodeError as error:
        raise RequestRefusedError(f"the body is not a ForwardBackwardRequest: {error}") from error
    told = {name: one.text if one.HasField("text") else one.number for name, one in asked.loss_fn_config_v2.items()}
    return TrainingRequest(
        model_id=asked.model_id,
        seq_id=asked.seq_id or None,
        data=[_datum(i, one) for i, one in enumerate(asked.data)],
        loss_fn=asked.loss_fn,
        config={**asked.loss_fn_config, **told},
        forward_only=asked.forward_only,
    )


def _datum(i: int, one: Any) -> Datum:
    if any(not chunk.HasField("encoded_text") for chunk in one.model_input):
        raise RequestRefusedError(f"datum {i} has an image or audio; this server only takes text tokens")
    parts = [_array(chunk.encoded_text.tokens, np.dtype(np.int32), "tokens") for chunk in one.model_input]
    spans = [
        Span(length=span.sampled_tokens.length, sequence_id=span.sampled_tokens.sequence_id,
             offset=span.sampled_tokens.offset) if span.HasField("sampled_tokens")
        else Span(length=span.prompt_tokens.length)
        for span in one.loss_fn_input_spans
    ]  # fmt: skip
    return Datum(
        ids_T=np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64),
        inputs={name: _tensor(name, value) for name, value in one.loss_fn_inputs.items()},
        spans=spans,
    )


def _tensor(name: str, value: Any) -> Any:
    dtype = _DTYPES.get(value.dtype)
    if dtype is None:
        raise RequestRefusedError(f"{name} has the unknown dtype {value.dtype}")
    shape = tuple(value.shape)
    if not value.HasField("sparse_csr"):
        return _shaped(name, _array(value.dense, dtype, name), shape or None)
    csr = value.sparse_csr
    rows, columns = (_array(part, np.dtype(np.int64), name) for part in (csr.crow_indices, csr.col_indices))
    return _dense(name, _array(csr.values, dtype, name), rows, columns, shape)


def _array(raw: bytes, dtype: Any, name: str) -> Any:
    if len(raw) % dtype.itemsize:
        raise RequestRefusedError(f"{name} has {len(raw)} bytes, which is not a multiple of {dtype.itemsize}")
    return np.frombuffer(raw, dtype=dtype)


def _shaped(name: str, flat: Any, shape: tuple[int, ...] | None) -> Any:
    if shape is None:
        return flat
    if math.prod(shape) != flat.size or min(shape, default=0) < 0:
        raise RequestRefusedError(f"{name} has {flat.size} values for the shape {list(shape)}")
    return flat.reshape(shape)


def _dense(name: str, values: Any, rows: Any, columns: Any, shape: tuple[int, ...]) -> Any:
    """A sparse CSR matrix as a dense one."""
    if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > MOST_CELLS:
        raise RequestRefusedError(
            f"{name} is sparse with the shape {list(shape)}: it must have two axes, fewer elements"
        )
    counts = np.diff(rows)
    is_sound = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(values) == len(columns)
    if not is_sound or (counts < 0).any() or (columns.size and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise RequestRefusedError(f"{name} has sparse indices that do not match its shape {list(shape)}")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def read_json(body: Mapping[str, Any], *, forward_only: bool) -> TrainingRequest:
    """Read the request of a client that sends JSON (the SDK before 0.2x)."""
    given = body.get("forward_input" if forward_only else "forward_backward_input")
    if not isinstance(given, Mapping) or not isinstance(given.get("data"), list):
        raise RequestRefusedError("the body has no forward_backward_input with a list of data")
    config, seq_id = given.get("loss_fn_config") or {}, body.get("seq_id")
    if not isinstance(config, Mapping):
        raise RequestRefusedError(f"loss_fn_config must be an object of settings, not {config!r:.80}")
    return TrainingRequest(
        model_id=str(body.get("model_id")),
        seq_id=seq_id if isinstance(seq_id, int) else None,
        data=[_json_datum(i, one) for i, one in enumerate(given["data"])],
        loss_fn=str(given.get("loss_fn")),
        config=config,
        forward_only=forward_only,
    )


def _json_datum(i: int, one: Any) -> Datum:
    try:
        ids = json_tokens(one["model_input"])
        inputs = {name: json_tensor(name, value) for name, value in one["loss_fn_inputs"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise RequestRefusedError(f"datum {i} is invalid: {type(error).__name__}: {error}") from error
    return Datum(ids_T=np.array(ids, np.int64), inputs=inputs)


def json_tokens(model_input: Any) -> list[int]:
    """The tokens of a prompt or a model input in JSON: its text chunks, concatenated."""
    chunks = model_input.get("chunks") if isinstance(model_input, Mapping) else None
    if not isinstance(chunks, list):
        raise RequestRefusedError("a model input must be {'chunks': [{'type': 'encoded_text', 'tokens': […]}]}")
    found: list[int] = []
    for chunk in chunks:
        tokens = chunk.get("tokens") if isinstance(chunk, Mapping) else None
        if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < MOST_IDS for token in tokens):
            raise RequestRefusedError("the model input may only have text tokens")
        found += tokens
    return found


def json_tensor(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping) or not isinstance(value.get("data"), list):
        raise RequestRefusedError(f"{name} must be {{'data': […], 'dtype': …, 'shape': […]}}, not {value!r:.80}")
    dtype = _NAMED.get(str(value.get("dtype", "float32")))
    if dtype is None:
        raise RequestRefusedError(f"{name} has the unknown dtype {value.get('dtype')!r:.80}")
    shape = value.get("shape")
    if shape is not None and not (isinstance(shape, list) and all(type(size) is int for size in shape)):
        raise RequestRefusedError(f"the shape of {name} must be a list of sizes, not {shape!r:.80}")
    try:
        flat = np.array(value["data"], dtype)
        if value.get("sparse_crow_indices") is None:
            return _shaped(name, flat, None if shape is None else tuple(shape))
        rows, columns = (np.array(value.get(key), np.int64) for key in ("sparse_crow_indices", "sparse_col_indices"))
    except (ValueError, OverflowError, TypeError) as error:
        raise RequestRefusedError(f"{name} has a value that is not a number: {error}") from error
    if rows.ndim != 1 or columns.ndim != 1 or not rows.size:
        raise RequestRefusedError(f"{name} has sparse indices that are not lists of numbers")
    return _dense(name, flat, rows, columns, tuple(shape or ()))


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The result of a future, as protobuf if the client accepts it, else as JSON."""

    protobuf: Callable[[], bytes] | None
    json: Callable[[], dict[str, Any]]


def forward_backward_output(logprobs: Sequence[Any], metrics: Mapping[str, float]) -> Written:
    """The logprob of each target of each datum (arrays of one or two axes), and metrics of the request."""
    return Written(
        protobuf=lambda: _output_protobuf(logprobs, metrics),
        json=lambda: {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": [
                {"logprobs": {"data": one.reshape(-1).tolist(), "dtype": "float32", "shape": list(one.shape)}}
                for one in logprobs
            ],
            "metrics": dict(metrics),
        },
    )


def _output_protobuf(logprobs: Sequence[Any], metrics: Mapping[str, float]) -> bytes:
    out = wire.message("ForwardBackwardOutput")
    out.loss_fn_output_type = "ArrayRecord"
    out.metrics.update(metrics)
    start = 0
    while start < len(logprobs):  # one record for each run of data with the same trailing axes
        end, trailing = start, logprobs[start].shape[1:]
        while end < len(logprobs) and logprobs[end].shape[1:] == trailing:
            end += 1
        part = [np.ascontiguousarray(one, np.float32) for one in logprobs[start:end]]
        record = out.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(part))
        field = record.fields["logprobs"]
        field.data, field.dtype = b"".join(one.tobytes() for one in part), wire.FLOAT32
        field.offsets = np.cumsum([0, *(one.nbytes for one in part)]).astype(np.int64).tobytes()
        field.trailing_shape.extend(trailing)
        start = end
    written: bytes = out.SerializeToString()
    return written
