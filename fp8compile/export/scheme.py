"""Kinds of quantized weights, and the classes Scheme and Format: how a serving format stores them.

    matrix --Scheme.write--> tensors of the file by suffix --Scheme.read--> the values that a server computes with

``read`` follows the arithmetic of the format's readers and shares no code with ``write``. `check` therefore finds an
inverted scale, a transposed matrix, or four-bit codes in the wrong order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8compile.formats import pack
from fp8compile.layout.four_bit_packing import one_a_byte, packed_dim
from fp8compile.layout.quantized import Quantized
from fp8compile.quantizers import CurrentScaling, DelayedScaling, Quantizer, TwoLevelScaling

__all__ = [
    "CODES",
    "KINDS",
    "Format",
    "Scheme",
    "eight_bits",
    "four_bit_values",
    "kind_of",
    "numbers_of",
    "packed_codes",
    "scales_of_rows",
    "spread_scales",
]

CODES = torch.float8_e4m3fn  # the dtype of e4m3 codes in a file
# the values of the sixteen e2m1 codes, by OCP Microscaling Formats 1.0, section 5.3.3
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

KINDS = {
    "tensor": "e4m3, one float32 scale per matrix",
    "static_tensor": "e4m3, one float32 scale per matrix and one for its input, both from delayed scaling",
    "channel": "e4m3, one float32 scale per row of w_NK",
    "block": "e4m3, one float32 scale per 128 x 128 values",
    "block_ue8m0": "e4m3, one power-of-two scale per 128 x 128 values",
    "mx": "e4m3, one E8M0 scale per 32 values of a row",
    "nvfp4": "e2m1, one e4m3 scale per 16 values of a row and one float32 scale per matrix",
}


def _kind_of_current(quantizer: CurrentScaling) -> str | None:
    if quantizer.format != "e4m3":
        return None
    block, scale = quantizer.block, quantizer.scale
    if quantizer.stores_e8m0():
        return "mx" if block in ((1, 32), (32, 32)) else None
    if block == (128, 128):
        return "block_ue8m0" if scale == "pow2" else "block"
    return {(-1, -1): "tensor", (1, -1): "channel"}.get(block)


def kind_of(quantizer: Quantizer) -> str | None:
    """Return the kind of weights that this quantizer makes, a key of `KINDS`; None if no serving format has it."""
    if type(quantizer) is CurrentScaling:
        return _kind_of_current(quantizer)
    if type(quantizer) is DelayedScaling:
        return "static_tensor" if quantizer.format == "e4m3" else None
    if type(quantizer) is TwoLevelScaling and not quantizer.hadamard:
        return "nvfp4" if quantizer.block in ((1, 16), (16, 16)) else None
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Scheme:
    """How a format stores the weights of one kind.

    Attributes:
        kind: The kind, a key of `KINDS`.
        name: The format's own name for the kind.
        suffixes: Suffixes of the names of a layer's tensors: first the codes, then the scales.
        write: Converts a quantized matrix to tensors, by their suffixes.
        read: Converts these tensors to the values of the matrix, (N, K) float32.
        config: Entries for weights of this kind in the format's configuration.
        multiples: Two numbers: N must be divisible by the first, and K must be divisible by the second.
        has_ragged_rows: Whether N need not be divisible, if N / rows of scales can't be mistaken for the block size.
        input_scale: Suffix of the static scale of the input, float32; None if inputs are quantized dynamically.
        served: Sentence for the report on how a server's GEMM differs from training's; empty for equal GEMMs.
        stores_divisor: Whether the file has 1 / outer scale instead of the outer scale.
    """

    kind: str
    name: str
    suffixes: tuple[str, ...]
    write: Callable[[Quantized], dict[str, Tensor]]
    read: Callable[[Mapping[str, Tensor]], Tensor]
    config: Mapping[str, Any] = field(default_factory=dict)
    multiples: tuple[int, int] = (1, 1)
    has_ragged_rows: bool = False
    input_scale: str | None = None
    served: str = ""
    stores_divisor: bool = False

    def names(self) -> tuple[str, ...]:
        """Return the suffixes of all tensors of a layer, with the scale of the input."""
        return (*self.suffixes, self.input_scale) if self.input_scale else self.suffixes


@dataclass(frozen=True, kw_only=True, eq=False)
class Format:
    """A serving format: its name, its schemes, and how it writes configuration files.

    Attributes:
        name: The name that `fp8compile.export.save_pretrained` takes.
        schemes: A scheme for each kind of weights that the format can hold.
        config: Returns ``quantization_config`` of config.json, from the names of layers by scheme and from the names
            of the layers that are not quantized.
        files: Returns the content of further JSON files by name, from the same arguments as ``config``.
        mixes: Whether one model may have several schemes.
        instead: Advice for kinds that the format can't hold, by kind.
        declares: Returns (name, value, allowed values) for each field of a folder's ``quantization_config`` that says
            what its data is, from this configuration and the schemes of the model.
    """

    name: str
    schemes: tuple[Scheme, ...]
    config: Callable[[Mapping[Scheme, Sequence[str]], Sequence[str]], dict[str, Any]]
    files: Callable[[Mapping[Scheme, Sequence[str]], Sequence[str]], dict[str, Any]] = lambda groups, ignored: {}
    mixes: bool = False
    instead: Mapping[str, str] = field(default_factory=dict)
    declares: Callable[[Mapping[str, Any], Sequence[Scheme]], Iterable[tuple[str, Any, tuple[Any, ...]]]]

    def scheme(self, kind: str | None) -> Scheme | None:
        """Return the scheme for a weight of a kind, a result of `kind_of`; None if the format can't hold it."""
        return next((each for each in self.schemes if each.kind == kind), None)

    def refusal(self, kind: str | None) -> str:
        """Return the reason, for an error text, why this format can't store weights of this kind."""
        held = "; ".join(f"{each.name} ({KINDS[each.kind]})" for each in self.schemes)
        advice = f" {self.instead[kind]}" if kind is not None and kind in self.instead else ""
        return f"the format {self.name!r} does not support this quantization; it supports {held}.{advice}"


def eight_bits(
    suffixes: tuple[str, str], scale: Callable[[Quantized], Tensor]
) -> Callable[[Quantized], dict[str, Tensor]]:
    """Make a `Scheme.write` for e4m3 codes and the scales that ``scale`` computes; ``suffixes`` name the two."""
    return lambda matrix: {suffixes[0]: matrix.codes.view(CODES), suffixes[1]: scale(matrix)}


def packed_codes(matrix: Quantized) -> Tensor:
    """Pack e2m1 codes of a matrix (N, K) to (N, K / 2) uint8: two neighbours of a row, first in low bits."""
    if packed_dim(matrix.quantizer) == -1:
        return matrix.codes
    codes, _ = one_a_byte(matrix.codes, matrix.quantizer)
    return pack(codes, -1)


def scales_of_rows(matrix: Quantized) -> Tensor:
    """Return scales (N, blocks per row): the scale of a block of several rows is repeated for each row."""
    rows = matrix.quantizer.block[0]
    return matrix.scale.repeat_interleave(rows, 0)[: matrix.shape[0]] if rows > 1 else matrix.scale


def numbers_of(scale: Tensor) -> Tensor:
    """Convert a file's scales to float32; uint8 scales are E8M0: exponents with bias 127."""
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def spread_scales(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeat each scale of a grid for the elements of its block, to a matrix of ``shape``.

    Raises:
        ValueError: The matrix can't be divided into a grid of equal blocks.
    """
    rows, columns = scale.shape
    if shape[0] % rows or shape[1] % columns:
        raise ValueError(
            f"scales of shape {tuple(scale.shape)} do not divide a matrix of shape {tuple(shape)} into equal blocks; "
            "each dim of the matrix must be a multiple of the same dim of the scales."
        )
    return scale.repeat_interleave(shape[0] // rows, 0).repeat_interleave(shape[1] // columns, 1)


def four_bit_values(packed: Tensor) -> Tensor:
    """Decode packed e2m1 codes, (N, K / 2) bytes with the first code in the low bits, to (N, K) float32."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=packed.device)
    return torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], -1).flatten(-2)
