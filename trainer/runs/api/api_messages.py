"""The messages of the training API that are protobuf, as the SDK of Tinker 0.38 sends and reads them.

The field numbers are those of `tinker_public.proto` in that SDK. All other messages are JSON.
"""

import sys
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from trainer.errors import UserError
from trainer.metrics import counted

# name: fields as (number, name, kind). A kind is a scalar of protobuf or a message; "*" repeats, "map:" has text keys
MESSAGES = {
    "SparseCsr": [(1, "values", "bytes")],
    "Tensor": [(1, "dense", "bytes"), (2, "sparse_csr", "SparseCsr"), (3, "dtype", "int32"), (4, "shape", "*int64")],
    "EncodedTextChunk": [(1, "tokens", "bytes")],
    "OtherChunk": [],
    "Chunk": [(1, "encoded_text", "EncodedTextChunk"), (2, "image", "OtherChunk"), (3, "dmel", "OtherChunk")],
    "Datum": [(1, "model_input", "*Chunk"), (2, "loss_fn_inputs", "map:Tensor")],
    "LossConfigValue": [(1, "number", "double"), (2, "text", "string")],
    "ForwardBackwardRequest": [
        (1, "model_id", "string"), (2, "seq_id", "int32"), (3, "data", "*Datum"), (4, "loss_fn", "string"),
        (5, "loss_fn_config", "map:double"), (6, "forward_only", "bool"), (7, "loss_fn_config_v2", "map:LossConfigValue"),
    ],
    "BatchedTensor": [(1, "data", "bytes"), (2, "offsets", "bytes"), (3, "dtype", "int32"), (4, "trailing_shape", "*int64")],
    "ArrayRecord": [(1, "type_tag", "string"), (2, "fields", "map:BatchedTensor"), (3, "num_datums", "int64")],
    "ForwardBackwardOutput": [
        (1, "loss_fn_output_type", "string"), (2, "loss_fn_outputs", "*ArrayRecord"), (3, "metrics", "map:double"),
    ],
    "SampledSequence": [(1, "stop_reason", "int32"), (2, "tokens", "bytes"), (3, "logprobs", "bytes")],
    "SampleResponse": [(1, "sequences", "*SampledSequence"), (2, "prompt_logprobs", "bytes")],
}  # fmt: skip
LARGEST, BELOW_1 = sys.float_info.max, 1 - sys.float_info.epsilon
# of AdamW, name: (default, largest)
ADAM = {"learning_rate": (1e-4, LARGEST), "beta1": (0.9, BELOW_1), "beta2": (0.95, BELOW_1), "eps": (1e-12, LARGEST)}
ADAM |= {"weight_decay": (0.0, LARGEST), "grad_clip_norm": (0.0, LARGEST)}
DTYPES = {1: np.float32, 2: np.int64, 3: np.int32}
FLOAT32 = 1
MOST_ROWS = 16384  # of one request, which the requests of other clients wait for
SIZES = {0: 0, 1: 8, 3: 0, 4: 0, 5: 4}  # of a field on the wire, by its kind; 0 is a number of any size
PARTS_OF_ROW = 32  # texts, arrays and messages of a row, in the mean


def _classes() -> dict[str, type]:
    file = descriptor_pb2.FileDescriptorProto(name="api.proto", package="api", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind in fields:
            repeated, kind = kind[0] == "*" or kind.startswith("map:"), kind.removeprefix("*")
            if kind.startswith("map:"):
                entry = message.nested_type.add(name="".join(map(str.capitalize, field.split("_"))) + "Entry")
                entry.options.map_entry = True
                _add(kinds, entry, 1, "key", "string", False)
                _add(kinds, entry, 2, "value", kind[4:], False)
                kind = f"{name}.{entry.name}"
            _add(kinds, message, number, field, kind, repeated)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"api.{name}")) for name in MESSAGES}


def _add(kinds, message, number: int, name: str, kind: str, repeated: bool) -> None:
    label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label)
    if kind[0].isupper():
        field.type, field.type_name = kinds.TYPE_MESSAGE, f".api.{kind}"
    else:
        field.type = getattr(kinds, f"TYPE_{kind.upper()}")


CLASSES = _classes()


def read_batch(body: bytes) -> dict:
    """A request of forward_backward: model_id, seq_id, loss_fn, loss_fn_config, forward_only, and rows.

    A row has input_ids and one array for each input of the loss, all (tokens,). Raises UserError.
    """
    request = CLASSES["ForwardBackwardRequest"]()
    try:
        _check_size(body)
        request.ParseFromString(body)
    except (DecodeError, IndexError):
        raise UserError("forward_backward", "no protobuf message of this request", "the SDK of Tinker, 0.38") from None
    config = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        config[name] = value.text or value.number
    own = {name: getattr(request, name) for name in ("model_id", "seq_id", "loss_fn", "forward_only")}
    return own | {"loss_fn_config": config, "rows": [_row(number, datum) for number, datum in enumerate(request.data)]}


def _check_size(body: bytes) -> None:
    """Count rows, and parts of them, before protobuf makes objects of 100 bytes from fields of 2 bytes.

    Raises UserError for very many, and IndexError for what is no protobuf message.
    Source: protobuf.dev/programming-guides/encoding.
    """
    data = next(number for number, name, _ in MESSAGES["ForwardBackwardRequest"] if name == "data")
    ends, place, rows, parts = [len(body)], 0, 0, 0  # ends: of the request, and of the row in it
    while place < len(body):
        key, place = _varint(body, place)
        if key & 7 == 2:  # a length, and then a text, bytes or a message
            size, place = _varint(body, place)
            if len(ends) == 1 and key >> 3 == data:
                ends.append(place + size)
                rows += 1
            else:
                place, parts = place + size, parts + 1
            if rows > MOST_ROWS or parts > PARTS_OF_ROW * MOST_ROWS:
                raise UserError("data", "too many rows or parts of rows", f"at most {MOST_ROWS} rows in one request")
        elif key & 7 in SIZES:
            place = place + SIZES[key & 7] if key & 7 else _varint(body, place)[1]
        else:
            raise IndexError
        while len(ends) > 1 and place >= ends[-1]:
            ends.pop()


def _varint(body: bytes, place: int) -> tuple[int, int]:
    """(the number, the place after it)."""
    number = 0
    for byte in range(10):
        number |= (body[place + byte] & 127) << 7 * byte
        if body[place + byte] < 128:
            return number, place + byte + 1
    raise IndexError


def _row(number: int, datum) -> dict:
    parts = [np.zeros(0, np.int32)]
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise UserError(f"data[{number}].model_input", "a chunk that is no text", "chunks of tokens")
        parts.append(_array(chunk.encoded_text.tokens, np.int32, f"data[{number}].model_input"))
    row: dict = {"input_ids": np.concatenate(parts)}
    for name, tensor in datum.loss_fn_inputs.items():
        where = f"data[{number}].loss_fn_inputs[{name}]"
        if name in row:
            raise UserError(where, "the name of the tokens", "the inputs of the loss")
        if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
            raise UserError(where, "several values for each token", "one value for each token")
        if tensor.dtype not in DTYPES:
            raise UserError(where, f"dtype {tensor.dtype}", "float32, int64")
        row[name] = _array(tensor.dense, DTYPES[tensor.dtype], where)
    return row


def _array(data: bytes, dtype, where: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise UserError(where, f"{counted(len(data), 'byte')}, which are no {np.dtype(dtype).name} numbers")
    return np.frombuffer(data, dtype)


def batch_output(columns: dict[str, list[np.ndarray]], metrics: dict[str, float]) -> bytes:
    """The answer of forward_backward: for each row, one array (tokens,) of each column."""
    answer = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="TorchLossReturn")
    record = answer.loss_fn_outputs.add(type_tag="TorchLossReturn")
    for name, arrays in columns.items():
        record.num_datums, field = len(arrays), record.fields[name]
        field.data = b"".join(array.astype(np.float32).tobytes() for array in arrays)
        field.offsets = np.cumsum([0, *(4 * len(array) for array in arrays)], dtype=np.int64).tobytes()
        field.dtype = FLOAT32
    for name, value in metrics.items():
        answer.metrics[name] = value
    return answer.SerializeToString()


def sample_output(sequences: list[tuple[list[int], list[float], bool]], prompt: np.ndarray | None) -> bytes:
    """The answer of a request to sample: (tokens, their log-probs, whether a stop ended them), and those of the prompt."""
    answer = CLASSES["SampleResponse"]()
    for tokens, log_probs, finished in sequences:
        one = answer.sequences.add(stop_reason=0 if finished else 1)
        one.tokens, one.logprobs = np.array(tokens, np.int32).tobytes(), np.array(log_probs, np.float32).tobytes()
    if prompt is not None:
        answer.prompt_logprobs = prompt.astype(np.float32).tobytes()
    return answer.SerializeToString()


def number_of(name: str, value: Any, low: float, high: float) -> float:
    """A number of a request. Raises UserError for another type, for nan, and outside of `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise UserError(name, repr(value)[:40], f"{low} to {high}")
    return value


def whole_of(name: str, value: Any, low: int, high: int) -> int:
    """A whole number of a request. Raises UserError as `number_of` does, and for a fraction."""
    if number_of(name, value, low, high) != int(value):
        raise UserError(name, repr(value)[:40], f"whole numbers from {low} to {high}")
    return int(value)


def adam_of(given: dict) -> dict[str, float]:
    """The values of a step of AdamW, with defaults. Raises UserError."""
    if odd := given.keys() - ADAM.keys():
        raise UserError("adam_params", ", ".join(sorted(odd)), ", ".join(ADAM))
    return {name: number_of(name, given.get(name, own), 0, most) for name, (own, most) in ADAM.items()}
