"""The types of a layer's arguments, and which of them must agree with one another.

    kernel_size: ints(2, 1)                      # 3 or [3, 3], as torch takes it; each at least 1
    groups_divide_channels(layer)                # yields ("groups", "must divide in_channels ...")

Types are strict (1.0 is no integer, "3" no number) and ranged, so that a wrong argument is refused with a pointer to
it. What depends on the input's shape is not here but in `torchstone.shapes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from torchstone.shapes import each

LIMIT = 2**31
Size = Annotated[int, Field(ge=1, le=LIMIT)]
Index = Annotated[int, Field(ge=-9, le=8)]
Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
UnflattenedSize = Annotated[list[Annotated[int, Field(ge=-1, le=LIMIT)]], Field(min_length=1, max_length=8)]

Faults = Iterator[tuple[str, str]]


def ints(count: int | None, at_least: int, *, null_entries: bool = False, words: tuple[str, ...] = ()) -> Any:
    """torch's int-or-tuple: one integer, or a list of `count` (None: of 1 to 8); `words` pass as they are.

    A list of one becomes its entry: not all of torch's one-dimensional layers take the list.
    """
    one = f"an integer from {at_least} to {LIMIT}"
    many = f"a list of {count or '1 to 8'} of them{' or null' if null_entries else ''}"
    also = "".join(f", or {word!r}" for word in words)

    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= LIMIT

    def check(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            right_length = len(value) == count if count else 1 <= len(value) <= 8
            if right_length and all(fits(item) or (null_entries and item is None) for item in value):
                return value[0] if count == 1 else list(value)
        elif (isinstance(value, str) and value in words) or fits(value):
            return value
        raise ValueError(f"must be {one}, or {many}{also}")

    entry: Any = int | None if null_entries else int
    return Annotated[Any, PlainValidator(check, json_schema_input_type=int | list[entry] | (str if words else int))]


def _factors(value: Any) -> Any:
    numbers = value if isinstance(value, (list, tuple)) else [value]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number <= LIMIT:
            raise ValueError(f"must be a number over 0 and up to {LIMIT}, or a list of 1 to 3 of them")
    if not 1 <= len(numbers) <= 3:
        raise ValueError("must have 1 to 3 entries")
    return value


Factors = Annotated[Any, PlainValidator(_factors, json_schema_input_type=float | list[float])]


def nothing_to_agree(layer: Any) -> Faults:
    yield from ()


def groups_divide_channels(layer: Any) -> Faults:
    for channels in (layer.in_channels, layer.out_channels):
        if channels % layer.groups:
            yield "groups", f"must divide in_channels and out_channels, but {layer.groups} does not divide {channels}"
            return


def convolution_agrees(layer: Any) -> Faults:
    yield from groups_divide_channels(layer)
    if layer.padding == "same" and any(stride != 1 for stride in each(layer.stride, 1)):
        yield "padding", "'same' needs stride 1"


def transposed_convolution_agrees(spatial: int) -> Any:
    def check(layer: Any) -> Faults:
        yield from groups_divide_channels(layer)
        extra, stride, dilation = (each(v, spatial) for v in (layer.output_padding, layer.stride, layer.dilation))
        if any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
            yield "output_padding", "must be smaller than stride or dilation"

    return check


def norm_groups_divide_channels(layer: Any) -> Faults:
    if layer.num_channels % layer.num_groups:
        yield "num_groups", f"must divide num_channels, but {layer.num_groups} does not divide {layer.num_channels}"


def pool_padding_fits(spatial: int) -> Any:
    def check(layer: Any) -> Faults:
        padding, kernel = each(layer.padding, spatial), each(layer.kernel_size, spatial)
        if any(p > k // 2 for p, k in zip(padding, kernel, strict=True)):
            yield "padding", "must be at most half of kernel_size"

    return check


def bounds_are_ordered(layer: Any) -> Faults:
    if layer.min_val >= layer.max_val:
        yield "min_val", "must be smaller than max_val"


def sizes_have_one_unknown(layer: Any) -> Faults:
    if layer.unflattened_size.count(-1) > 1 or 0 in layer.unflattened_size:
        yield "unflattened_size", "must be integers of at least 1, of which one may be -1"


def upsample_agrees(layer: Any) -> Faults:
    if (layer.size is None) == (layer.scale_factor is None):
        yield "size", "exactly one of size and scale_factor must be given"
    if layer.align_corners is not None and layer.mode.startswith("nearest"):
        yield "align_corners", "is only for the modes linear, bilinear, bicubic and trilinear"


def padding_row_exists(layer: Any) -> Faults:
    if layer.padding_idx is not None and not -layer.num_embeddings <= layer.padding_idx < layer.num_embeddings:
        yield "padding_idx", f"must lie within num_embeddings ({layer.num_embeddings})"


def transformer_encoder_agrees(layer: Any) -> Faults:
    if not layer.batch_first:
        yield "batch_first", "must be true: inputs here are (batch, sequence, features)"
    if layer.d_model % layer.nhead:
        yield "nhead", f"must divide d_model, but {layer.nhead} does not divide {layer.d_model}"
