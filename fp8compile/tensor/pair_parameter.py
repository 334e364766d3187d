"""QuantizedPairParameter: a weight that is trained as two sets of codes, and nothing in high precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from fp8compile import _compat, ops
from fp8compile.layout.cuts import DimSharding, chunk_sizes
from fp8compile.layout.shapes import scale_shapes
from fp8compile.quantizers import GEMMS, Gemm, Quantizer
from fp8compile.tensor.attributes import moved
from fp8compile.tensor.fsdp import (
    as_pair_travels,
    codes_by,
    cut_dim,
    levels_of,
    scale_of_all_ranks,
    share_scales_of_shard,
)
from fp8compile.tensor.gathered_pair import (
    Meaning,
    OwnCodes,
    OwnScale,
    fill,
    made_of,
    room_for,
    sent_of,
    without_codes,
)
from fp8compile.tensor.gathers import BOTH, Gathers
from fp8compile.tensor.optimizer_steps import Pending, check_outside_of_graph_of_step
from fp8compile.tensor.pair import QuantizedPair, Turns, no_meaning
from fp8compile.tensor.parameter import (
    MAKERS,
    NO_CAT,
    NO_MESSAGE,
    QuantizedParameter,
    as_leaf,
    plain_like,
)
from fp8compile.tensor.quantized import HANDLERS, LAYERS, VIEWS
from fp8compile.tensor.saved import load_pair
from fp8compile.tensor.write_ops import READS, UPDATES, compute, copy

__all__ = ["QuantizedPairParameter", "is_quantized_parameter"]

aten = torch.ops.aten
INSTEAD_OF_CUTTING = (
    "leave this weight out of quantized_parameters by the filter of fp8compile.convert, and have FSDP2 gather its "
    "codes by fp8compile.parallel.fsdp_float8_all_gather, which may cut blocks."
)
PAIR = OUTPUT, GRAD_INPUT = GEMMS[:2]


def is_quantized_parameter(tensor: object) -> bool:
    """Whether a tensor is made of codes that optimizers write to, of one set or of two."""
    return isinstance(tensor, (QuantizedParameter, QuantizedPairParameter))


def _bytes_of_own_scales(own: QuantizedParameter, dim: int) -> int:
    """Bytes of the scales that other ranks don't have."""
    return sum(scale.nbytes for scale, block in levels_of(own, dim) if block is not None)


@_compat.keeps_parts_after_forward
class QuantizedPairParameter(QuantizedPair):
    """A `QuantizedPair` that optimizers write to: two `QuantizedParameter`s of one weight, always written together.

    Its values are those that the codes for the output stand for: an optimizer without masters starts from them, and
    both sets are made of what it computes.
    """

    gathers: Gathers

    def __init__(
        self, for_output: QuantizedParameter, for_grad_input: QuantizedParameter, turns: Turns | None = None
    ) -> None:
        super().__init__(for_output, for_grad_input, turns)
        for each in self.sets():
            each.instead_of_cutting = INSTEAD_OF_CUTTING
        self.gathers = Gathers(BOTH, checkpointed=False)

    @staticmethod
    def of(x: Tensor, quantizer: Quantizer, for_grad_input: Quantizer) -> QuantizedPairParameter:
        """Quantize a tensor twice, of any dtype that ``fp8compile.quantize`` takes."""
        return QuantizedPairParameter(*(QuantizedParameter.of(x, each) for each in (quantizer, for_grad_input)))

    @property
    def written(self) -> bool:
        """Whether values were written to it, as a `QuantizedParameter` has it."""
        return self._for_output.written

    @written.setter
    def written(self, value: bool) -> None:
        for each in self.sets():
            each.written = value

    @property
    def pending(self) -> Pending | None:
        """What it is during an optimizer's step, if one runs: the same for both sets."""
        return self._for_output.pending

    @pending.setter
    def pending(self, value: Pending | None) -> None:
        for each in self.sets():
            each.pending = value

    @property
    def initial(self) -> Tensor | None:
        """The values that both sets were made of, where they are kept."""
        return self._for_output.initial

    @initial.setter
    def initial(self, values: Tensor | None) -> None:
        self._for_output.initial = values

    def keep(self, values: Tensor) -> None:
        """Remember values, or those that codes stand for, as what its codes were made of, if that is kept."""
        self._for_output.keep(values._for_output if isinstance(values, QuantizedPair) else values)

    def check_writable(self, what: object) -> None:
        """Raise unless new values can be written to this tensor alone."""
        for each in self.sets():
            each.check_writable(what)

    def share_scale(self, group: Any, shard_dim: int, total: int) -> None:
        """Name the ranks whose shards are parts of one tensor with these, the dim that was cut, and its size."""
        for each in self.sets():
            each.share_scale(group, shard_dim, total)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values that the codes for the output stand for; gradients pass straight through."""
        return ops.straight_through(self._for_output.detach()._values(dtype or self.dtype), self, self.quantizer)

    @property
    def values(self) -> Tensor:
        """Its values in an optimizer's step, for a compiled one."""
        return self.pending.given()

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        place = None if self.pending is None else self.pending.place
        return ["for_output", "for_grad_input", *([] if place is None else ["values"])], (place,)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict, metadata: tuple, outer_size: Any, outer_stride: Any
    ) -> QuantizedPairParameter:
        found = QuantizedPairParameter(inner["for_output"], inner["for_grad_input"])
        if metadata[0] is not None:
            found.pending = Pending(metadata[0], values=inner["values"], of_pair=True)
        return found

    def __deepcopy__(self, memo: dict) -> QuantizedPairParameter:
        found = as_leaf(self.clone().detach(), self.requires_grad, isinstance(self, torch.nn.Parameter))
        memo[id(self)] = found
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return load_pair, (self.sets(), (self.requires_grad, isinstance(self, torch.nn.Parameter)))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in LAYERS:
            check_outside_of_graph_of_step(args, func)
            return LAYERS[func](func, *args)
        with _compat.counting_versions():
            if func is aten.copy_.default:
                return copy(*args)
            if func in UPDATES or func in READS:
                return compute(func, args, kwargs)
            if func is aten.cat.default:
                raise TypeError(NO_CAT)
            if func.namespace == "c10d":
                raise TypeError(f"{func} {NO_MESSAGE}")
            return cls._viewed(func, args, kwargs)

    @classmethod
    def _viewed(cls, func: Any, args: tuple, kwargs: dict) -> Any:
        if func not in HANDLERS and func not in MAKERS:
            if func._can_decompose():
                return func.decompose(*args, **kwargs)
            raise TypeError(no_meaning(func))
        pair, others = args[0], args[1:]
        if MAKERS.get(func) is plain_like:
            return func(pair._for_output, *others, **kwargs)
        first, second = (func(each, *others, **kwargs) for each in pair.sets())
        if isinstance(first, (list, tuple)):
            result = [pair._like(*each) for each in zip(first, second, strict=True)]
        else:
            result = pair._like(first, second)
        result = return_and_correct_aliasing(func, args, kwargs, result) if func in VIEWS else result
        return moved(func, pair, result)

    def _like(self, first: QuantizedParameter, second: QuantizedParameter) -> QuantizedPairParameter:
        found = QuantizedPairParameter(first, second)
        found.gathers = self.gathers
        return found

    # ------------------------------------------------------------------ what FSDP2 asks

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """This rank's codes for the pass that asks, or for both, and what the gathered ones mean."""
        dim = cut_dim(self, outer_size)
        if dim and self.ndim == 2:
            raise ValueError(
                "quantized_parameters: a weight whose forward and backward multiply different codes is sharded along "
                "dim 1. Leave out shard_placement_fn for it."
            )
        share_scales_of_shard(self, mesh, outer_size, module)
        kind, gemms = self.gathers.now(module, self.gathers.name)
        shards = DimSharding(mesh.get_group(), mesh.get_local_rank(), dim, chunk_sizes(outer_size[dim], mesh.size()))
        # of another dim, FSDP2 lays out all that arrives as it does the weight
        beside = shards.is_even() and mesh.size() > 1 and dim == 0
        quantizers = self.quantizer, self.quantizer_for_grad_input
        quantizers = as_pair_travels(quantizers, shards, outer_size)
        sets = tuple(self._codes(each, shards, quantizers, beside=beside) for each in gemms)
        own = [_bytes_of_own_scales(each, dim) for each in self.sets()]
        room = room_for(own, together=kind == BOTH) if beside else 0
        shapes = tuple(scale_shapes(outer_size, each) for each in quantizers)
        meaning = Meaning(without_codes(sets), mesh.size(), tuple(outer_size), quantizers, shapes)
        return sent_of(sets, shards, room), meaning

    def _codes(
        self, gemm: Gemm, shards: DimSharding, quantizers: tuple[Quantizer, Quantizer], *, beside: bool
    ) -> OwnCodes:
        index = PAIR.index(gemm)
        own = self.sets()[index]
        scales = []
        for scale, block in levels_of(own, shards.dim):
            travels = beside and block is not None
            scales.append(OwnScale(scale if travels else scale_of_all_ranks(scale, block, shards), travels))
        return OwnCodes(gemm, codes_by(own, quantizers[index]), tuple(scales))

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[QuantizedPair, tuple[Tensor, ...]] | None:
        """The whole weight; with ``out``, that of the gather before, whose codes have been written to already."""
        if out is not None:
            fill(_compat.local_itself(out), all_gather_outputs, metadata)
            return None
        wrap = partial(self._for_output.gathered_as, dtype=param_dtype)
        pair, scales = made_of(all_gather_outputs, metadata, self.gathers.turns, wrap)
        fill(pair, all_gather_outputs, metadata)
        return pair, scales
