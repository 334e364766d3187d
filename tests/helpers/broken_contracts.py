"""Quantizers that each break one contract, in a module that a fresh process can import."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fp8compile as f8

frozen = dataclass(frozen=True, repr=False)


class Rowwise(f8.CurrentScaling, abstract=True):
    """What they have in common: a scale a row."""


@frozen
class ByIdentity(Rowwise):
    block: tuple[int, int] = (1, -1)

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return 7


@frozen
class AllEqual(Rowwise):
    block: tuple[int, int] = (1, -1)

    def __eq__(self, other):
        return type(other) is type(self)

    def __hash__(self):
        return 7


@frozen
class Remembers(Rowwise):
    block: tuple[int, int] = (1, -1)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "calls", 0)


@frozen
class WrongText(Rowwise):
    block: tuple[int, int] = (1, -1)

    def __fx_repr__(self):
        return "WrongText(block=(-1, 1))", {"WrongText": WrongText}


@frozen
class Saltless(Rowwise):
    block: tuple[int, int] = (1, -1)

    def __fx_repr__(self):
        return f"Saltless(block={self.block})", {"Saltless": Saltless}


@frozen
class Float64Multiplier(Rowwise):
    block: tuple[int, int] = (1, -1)

    def multiplier(self, amax: Tensor) -> Tensor:
        return super().multiplier(amax).double()


@frozen
class NeverTurns(Rowwise):
    block: tuple[int, int] = (1, -1)

    def transposed(self):
        return replace(self)


@frozen
class WrongScale(Rowwise):
    block: tuple[int, int] = (1, -1)

    def scale_of(self, multiplier: Tensor) -> Tensor:
        return super().scale_of(multiplier) * 2


@frozen
class InfiniteForZeros(Rowwise):
    block: tuple[int, int] = (1, -1)

    def multiplier(self, amax: Tensor) -> Tensor:
        return torch.where(amax.isfinite(), 448 / amax, torch.nan)


@frozen
class HidesNan(Rowwise):
    block: tuple[int, int] = (1, -1)

    def multiplier(self, amax: Tensor) -> Tensor:
        return super().multiplier(amax.nan_to_num(1.0, posinf=1.0))


@frozen
class ZeroIsOne(Rowwise):
    """Stores the value zero as the code of one: what is padded with zero bytes would count."""

    block: tuple[int, int] = (1, -1)

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        return super().cast(x, multiplier) ^ 0x38

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return super().dequantize(codes ^ 0x38, scale, dtype)


@frozen
class ClaimsFloat8(ZeroIsOne):
    """Says of codes of its own that a GEMM reads them."""

    def gemm_format(self):
        return f8.library.E4M3


@frozen
class InPlace(Rowwise):
    block: tuple[int, int] = (1, -1)

    def amax(self, x: Tensor) -> Tensor:
        return super().amax(x.clamp_(-1, 1))


@frozen
class OtherWhenTraced(Rowwise):
    block: tuple[int, int] = (1, -1)

    def multiplier(self, amax: Tensor) -> Tensor:
        multiplier = super().multiplier(amax)
        return multiplier if type(amax) is Tensor else multiplier / 2


@frozen
class LooksAtSizes(Rowwise):
    block: tuple[int, int] = (1, -1)

    def codes_shape(self, shape):
        return tuple(shape) if shape[0] > 30 else (*shape,)

    def values_shape(self, codes_shape):
        return tuple(codes_shape)

    def transposed(self):
        return super().transposed()

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        return super().cast(x, multiplier)

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return super().dequantize(codes, scale, dtype)


@frozen
class LooksElsewhere(Rowwise):
    block: tuple[int, int] = (1, -1)

    def amax(self, x: Tensor) -> Tensor:
        largest = x.abs().amax() if x.numel() else x.new_zeros(())
        return torch.maximum(super().amax(x), largest.float())


BROKEN = {
    "equal_after_copy_and_pickle": ByIdentity,
    "different_fields_differ": AllEqual,
    "immutable": Remembers,
    "text_in_graphs_rebuilds_it": WrongText,
    "text_in_a_fresh_process": Saltless,
    "layout_is_what_it_says": Float64Multiplier,
    "transposed_is_of_the_transposed_matrix": NeverTurns,
    "scale_undoes_the_multiplier": WrongScale,
    "empty_block_gives_zeros": InfiniteForZeros,
    "what_is_not_finite_shows": HidesNan,
    "code_zero_is_zero": ZeroIsOne,
    "products_are_those_of_dequantize": ClaimsFloat8,
    "gemms_read_what_dequantize_gives": ClaimsFloat8,
    "nothing_but_the_arguments_decides": InPlace,
    "compiled_gives_the_bits_of_eager": OtherWhenTraced,
    "one_graph_for_every_size": LooksAtSizes,
    "equal_one_runs_the_same_graph": ByIdentity,
    "passes_opcheck": InPlace,
    "sharded_gives_the_bits_of_whole": LooksElsewhere,
}
