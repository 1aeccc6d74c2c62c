"""The protobuf messages of the Tinker API: tensors to the server, and log-probs and samples from it.

Everything else of the API is JSON. The messages are those of the SDK (tinker 0.38, `tinker_public.proto`)
that the server reads or writes; a test compares them with the SDK's. Protobuf skips other fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError


class Refusal(Exception):  # noqa: N818 - the server is well; it refuses a request
    """The request is not carried out, and changed nothing.

    `status`: the SDK makes 400 BadRequestError, 401 AuthenticationError, 404 NotFoundError and 422
    UnprocessableEntityError of it. An operation that is refused when its turn has come fails with the SDK's
    RequestFailedError of category User, or Server from status 500 on.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


CONTENT_TYPE = "application/x-protobuf"

# message -> field -> (number, type). "*" marks a repeated field, "map:" a map from strings. Enumerations are
# sent as int32.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "*Datum"),
        "loss_fn": (4, "string"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "map:LossConfigValue"),
    },
    "LossConfigValue": {"number": (1, "double"), "text": (2, "string")},
    "Datum": {
        "model_input": (1, "*Chunk"),
        "loss_fn_inputs": (2, "map:Tensor"),
    },
    "Chunk": {"encoded_text": (1, "EncodedTextChunk"), "image": (2, "ImageChunk"), "dmel": (3, "DmelChunk")},
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "ImageChunk": {"data": (1, "bytes")},
    "DmelChunk": {"dmel": (1, "bytes")},
    "Tensor": {
        "dense": (1, "bytes"),
        "sparse_csr": (2, "SparseCsr"),
        "dtype": (3, "int32"),
        "shape": (4, "*int64"),
    },
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "*ArrayRecord"),
        "metrics": (3, "map:double"),
    },
    "ArrayRecord": {
        "type_tag": (1, "string"),
        "fields": (2, "map:BatchedTensor"),
        "num_datums": (3, "int64"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "int32"),
        "trailing_shape": (4, "*int64"),
    },
    "SampleResponse": {"sequences": (1, "*SampledSequence"), "prompt_logprobs": (2, "bytes")},
    "SampledSequence": {"stop_reason": (1, "int32"), "tokens": (2, "bytes"), "logprobs": (3, "bytes")},
}
_FLOAT32, _INT64 = 1, 2  # values of the enumeration DType
_NUMPY: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
_STOP_REASONS = {"stop": 0, "length": 1}


@dataclass(frozen=True)
class Datum:
    """One sequence: the tokens that the model reads, and a column of numbers for each input of the loss."""

    tokens: list[int]
    inputs: dict[str, np.ndarray[Any, Any]]  # one dimension each, float32 or int64


@dataclass(frozen=True)
class ForwardBackward:
    """A request for log-probs and, unless `forward_only`, for the loss's gradient, which is accumulated."""

    model_id: str
    seq_id: int
    loss: str
    config: dict[str, float | str]
    forward_only: bool
    data: list[Datum] = field(default_factory=list)


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Decode a request.

    Raises Refusal for a body that is not a request, and for inputs that the server does not take.
    """
    message = _CLASSES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refusal(f"the body is not a ForwardBackwardRequest of the Tinker API: {error}") from None
    config = {
        name: value.text if value.WhichOneof("value") == "text" else value.number
        for name, value in message.loss_fn_config_v2.items()
    }
    data = [_datum(i, datum) for i, datum in enumerate(message.data)]
    return ForwardBackward(
        message.model_id, message.seq_id, message.loss_fn, config, message.forward_only, data
    )


def _datum(i: int, message: Any) -> Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise Refusal(
                f"data[{i}].model_input has a chunk that is not text: this server takes tokens only"
            )
        tokens += _array(f"data[{i}].model_input", chunk.encoded_text.tokens, np.dtype("<i4")).tolist()
    inputs = {name: _column(i, name, tensor) for name, tensor in message.loss_fn_inputs.items()}
    return Datum(tokens, inputs)


def _column(i: int, name: str, tensor: Any) -> np.ndarray[Any, Any]:
    where, shape = f"data[{i}].loss_fn_inputs[{name!r}]", list(tensor.shape)
    if len(shape) > 1 or tensor.HasField("sparse_csr"):
        raise Refusal(
            f"{where} has shape {shape}: this server takes one number for each position; several targets for "
            "a position are not supported"
        )
    if tensor.dtype not in _NUMPY:
        raise Refusal(f"{where} has a type that is neither float32 nor int64")
    return _array(where, tensor.dense, _NUMPY[tensor.dtype])


def _array(where: str, content: bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if len(content) % dtype.itemsize:
        raise Refusal(f"{where} has {len(content)} bytes, which is not a multiple of {dtype.itemsize}")
    return np.frombuffer(content, dtype)


def write_forward_backward(logprobs: Sequence[np.ndarray[Any, Any]], metrics: Mapping[str, float]) -> bytes:
    """Encode the result of a forward_backward: float32 log-probs of every datum's targets, and metrics."""
    output = _CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    output.metrics.update(metrics)
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    column = record.fields["logprobs"]
    column.dtype = _FLOAT32
    column.data = b"".join(values.astype("<f4").tobytes() for values in logprobs)
    column.offsets = np.cumsum([0, *(4 * len(values) for values in logprobs)], dtype="<i8").tobytes()
    return bytes(output.SerializeToString())


def write_samples(
    sequences: Iterable[tuple[Sequence[int], Sequence[float], str]],
    prompt_logprobs: Sequence[float] | None,
) -> bytes:
    """Encode samples, each (tokens, log-probs, stop reason); `prompt_logprobs`: NaN where there is none."""
    response = _CLASSES["SampleResponse"]()
    for tokens, logprobs, reason in sequences:
        response.sequences.add(
            stop_reason=_STOP_REASONS[reason],
            tokens=np.asarray(tokens, "<i4").tobytes(),
            logprobs=np.asarray(logprobs, "<f4").tobytes(),
        )
    if prompt_logprobs is not None:
        response.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    return bytes(response.SerializeToString())


def _message_classes() -> dict[str, Any]:
    """Make protobuf's classes of MESSAGES."""
    file = descriptor_pb2.FileDescriptorProto(
        name="megatron_gvpo/tinker.proto", package="megatron_gvpo", syntax="proto3"
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            _add_field(message, field_name, number, kind)
    choice = next(m for m in file.message_type if m.name == "LossConfigValue")
    choice.oneof_decl.add(name="value")
    for member in choice.field:
        member.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"megatron_gvpo.{name}"))
        for name in MESSAGES
    }


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    proto = descriptor_pb2.FieldDescriptorProto
    entry = message.field.add(name=name, number=number, label=proto.LABEL_OPTIONAL)
    if kind.startswith("*") or kind.startswith("map:"):
        entry.label = proto.LABEL_REPEATED
    if kind.startswith("map:"):  # protobuf's own form of a map: a repeated message of key and value
        pair = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        pair.options.map_entry = True
        _add_field(pair, "key", 1, "string")
        _add_field(pair, "value", 2, kind.removeprefix("map:"))
        entry.type = proto.TYPE_MESSAGE
        entry.type_name = f".megatron_gvpo.{message.name}.{pair.name}"
        return
    kind = kind.removeprefix("*")
    if kind in MESSAGES:
        entry.type, entry.type_name = proto.TYPE_MESSAGE, f".megatron_gvpo.{kind}"
    else:
        entry.type = proto.Type.Value(f"TYPE_{kind.upper()}")


_CLASSES = _message_classes()
