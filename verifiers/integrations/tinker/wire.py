"""Tinker's protobuf messages ↔ bytes: the field numbers of its public protocol, without its SDK.

Only the fields that the server reads and writes are listed; the parser skips others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

PACKAGE = "tinker_public"
PROTOBUF = "application/x-protobuf"

FLOAT32, INT64, INT32 = 1, 2, 3  # DType
STOP, LENGTH = 0, 1  # StopReason

# message → its fields: name, number, kind. A kind is a scalar or the name of a message, with "[]" in front if it is
# repeated, or "{}" for a map from strings to it. An enum is an int32 on the wire.
_MESSAGES = {
    "Chunk": "encoded_text 1 EncodedTextChunk | image 2 OtherChunk | dmel 3 OtherChunk",
    "EncodedTextChunk": "tokens 1 bytes",
    "OtherChunk": "",
    "SparseCsr": "values 1 bytes | crow_indices 2 bytes | col_indices 3 bytes",
    "Tensor": "dense 1 bytes | sparse_csr 2 SparseCsr | dtype 3 int32 | shape 4 []int64",
    "Span": "sequence_id 1 string | offset 2 int64 | length 3 int64",
    "ProvenanceSpan": "prompt_tokens 1 Span | sampled_tokens 2 Span",
    "Datum": "model_input 1 []Chunk | loss_fn_inputs 2 {}Tensor | loss_fn_input_spans 4 []ProvenanceSpan",
    "LossConfigValue": "number 1 double | text 2 string",
    "ForwardBackwardRequest": (
        "model_id 1 string | seq_id 2 int32 | data 3 []Datum | loss_fn 4 string | loss_fn_config 5 {}double | "
        "forward_only 6 bool | loss_fn_config_v2 7 {}LossConfigValue"
    ),
    "BatchedTensor": "data 1 bytes | offsets 2 bytes | dtype 3 int32 | trailing_shape 4 []int64",
    "ArrayRecord": "type_tag 1 string | fields 2 {}BatchedTensor | num_datums 3 int64",
    "ForwardBackwardOutput": "loss_fn_output_type 1 string | loss_fn_outputs 2 []ArrayRecord | metrics 3 {}double",
    "TopkLogprobs": "token_ids 1 bytes | logprobs 2 bytes | k 3 uint32 | length 4 uint32",
    "SampledSequence": "stop_reason 1 int32 | tokens 2 bytes | logprobs 3 bytes | topk_sampled_logprobs 4 TopkLogprobs",
    "SampleResponse": (
        "sequences 1 []SampledSequence | prompt_logprobs 2 bytes | topk_prompt_logprobs 3 TopkLogprobs | "
        "prompt_cache_hit_tokens 4 int32 | target_prompt_logprobs 5 Tensor"
    ),
}
_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3


def message(name: str) -> Any:
    """A new empty message."""
    return _classes()[name]()


@cache
def _classes() -> dict[str, Any]:
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise ImportError("the Tinker server needs protobuf: pip install 'verifiers[tinker]'") from None
    file = descriptor_pb2.FileDescriptorProto(name="tinker_wire.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        made = file.message_type.add(name=name)
        for field in filter(None, fields.split(" | ")):
            _add_field(made, name, *field.split(" "))
    pool = descriptor_pool.DescriptorPool()  # the SDK in this process registers the same names in its own pool
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES
    }


def _add_field(owner: Any, scope: str, name: str, number: str, kind: str) -> None:
    is_map, is_list = kind.startswith("{}"), kind.startswith("[]")
    kind = kind.removeprefix("{}").removeprefix("[]")
    if is_map:  # on the wire a map is a list of pairs
        entry = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        pair = owner.nested_type.add(name=entry)
        pair.options.map_entry = True
        _add_field(pair, f"{scope}.{entry}", "key", "1", "string")
        _add_field(pair, f"{scope}.{entry}", "value", "2", kind)
        kind = f"{scope}.{entry}"
    field = owner.field.add(name=name, number=int(number), label=_REPEATED if is_map or is_list else _OPTIONAL)
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        if name in ("prompt_logprobs", "logprobs", "number", "text") and owner.name != "TopkLogprobs":
            _mark_optional(owner, field)
    else:
        field.type, field.type_name = _MESSAGE, f".{PACKAGE}.{kind}"


def _mark_optional(owner: Any, field: Any) -> None:
    """Make a field optional, so that its presence is tracked."""
    owner.oneof_decl.add(name=f"_{field.name}")
    field.proto3_optional, field.oneof_index = True, len(owner.oneof_decl) - 1
