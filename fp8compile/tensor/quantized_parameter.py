"""QuantizedParameter: a weight that is trained as codes and scales, without a copy in high precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import return_and_correct_aliasing

from fp8compile import _compat, ops
from fp8compile.layout.cuts import DimSharding, Sharding, chunk_sizes
from fp8compile.layout.four_bit_packing import one_a_byte, packed_dim, packed_in_rows, two_a_byte
from fp8compile.layout.quantized import STACK, Plain, Quantized, TensorLayout
from fp8compile.layout.shapes import scale_shapes
from fp8compile.ops.layer.quantize_over_ranks import cast_part, positions, quantize_part, scales_of, whole_amax
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.quantizers import GEMMS, Quantizer
from fp8compile.tensor.check_arguments import allow_groups
from fp8compile.tensor.fsdp2_gather_policy import BOTH, GatherPolicy
from fp8compile.tensor.fsdp2_hooks import FullyShardHooks
from fp8compile.tensor.fsdp2_messages import SetToGather
from fp8compile.tensor.optimizer_steps import Pending, check_outside_of_graph_of_step, listen_to_optimizers, settle
from fp8compile.tensor.parameter_attributes import moved
from fp8compile.tensor.quantize import quantize
from fp8compile.tensor.quantized_tensor import INNER, LAYERS, QuantizedTensor
from fp8compile.tensor.shards import cut_dim, share_scales_of_shard

__all__ = [
    "BLANK",
    "EXTENTS",
    "IF_DDP",
    "SHARD",
    "SLICE",
    "WHOLE",
    "QuantizedParameter",
    "as_leaf",
    "is_quantized_parameter",
]

aten: Any = torch.ops.aten
EXTENTS = WHOLE, SLICE, SHARD, BLANK = ("whole", "slice", "shard", "blank")
COPIES = {aten.clone.default, aten._to_copy.default, aten._pin_memory.default}
# PyTorch ops that only a QuantizedParameter supports. The other files of this package fill the table.
WRITES: dict[Any, Callable[..., Any]] = {}
CUT_BY_COLUMNS = (
    "FP8 parameters: a weight that is quantized differently for forward and backward is sharded along dim 1, "
    "which is not supported. Omit shard_placement_fn for it."
)
IF_DDP = (
    "If this is DistributedDataParallel, which broadcasts the values of rank 0: call "
    "fp8compile.parallel.broadcast_parameters(model), and pass init_sync=False to it."
)
NO_MESSAGE = (
    "of a QuantizedParameter is not supported, because its quantized data and its scale would have to be sent. For "
    "tensor parallelism, use fp8compile.parallel.ColwiseParallel and RowwiseParallel, or convert after "
    "parallelize_module; to broadcast all parameters, use fp8compile.parallel.broadcast_parameters(model)."
)


class _Shared:
    """State shared by a QuantizedParameter and its views: initial values, flags, a running step's values."""

    def __init__(self) -> None:
        self.written = False
        self.frozen = False
        self.is_copy = False  # a clone that no optimizer has updated, such as an average of weights
        self.blank = False  # new_zeros made the tensor, and nothing was written to it yet
        # for each set, the tensor parallel ranks that share its scale, if FSDP2 has cut tensor parallel parts again
        self.outer: tuple[ProcessGroup | None, ...] = (None, None)
        self.initial: Tensor | None = None  # 1-D; a view's values have the strides and offset of the view's codes
        self.pending: Pending | None = None  # set while an optimizer's step runs
        self.state: Callable[[], tuple[Tensor, Tensor] | None] = lambda: None  # delayed scaling's, kept by the layer
        self.gathers: GatherPolicy | None = None  # set if there are two sets of codes


def _of_shared(name: str, what: str) -> Any:
    return property(
        lambda self: getattr(self._shared, name), lambda self, value: setattr(self._shared, name, value), doc=what
    )


def _up_to_date(name: str) -> property:
    """Make a property for codes or scales that first quantizes the values of a running optimizer step."""

    def read(self: QuantizedParameter) -> Tensor | None:
        if self._shared.pending is not None:
            settle([self])
        return getattr(self, f"_{name}")

    return property(read, lambda self, value: setattr(self, f"_{name}", value))


class QuantizedParameter(FullyShardHooks, QuantizedTensor):
    """A QuantizedTensor that optimizers write to; a write updates the codes for output and grad_input.

    An in-place op dequantizes the parameter, computes in the parameter's dtype and quantizes the result, with the amax
    over all ranks that share the scale. For a list of parameters (``foreach``), a group of ranks exchanges all amaxes
    in one message. While an optimizer's step runs, ops compute on plain values, which are quantized once at its end
    (`Pending`). These ops work: those of a QuantizedTensor, ``copy_``, ops such as ``zeros_like``, and those in the
    tables ``UPDATES`` and ``READS`` of write_ops.py. Any other op raises.

    Attributes:
        extent: The part of a weight that this tensor is. ``"whole"``: all of it. ``"slice"``: a view that shares a
            scale with elements outside of it, and can't be written alone. ``"blank"``: zeros that ``new_zeros`` made.
            ``"shard"``: a view of a blank tensor, which is how FSDP2 makes shards; the other elements are padding. If
            ranks share a scale, a shard can't be written before it knows these ranks, from the first forward or from
            ``fp8compile.parallel.share_scales``.
    """

    extent: str = WHOLE
    may_cut_blocks = True
    _shared: _Shared
    group: ProcessGroup | None
    shard_dim: int | None
    sizes: tuple[int, ...] | None
    # declared here, so that `attributes_of_others` leaves them out
    _codes: Tensor
    _scale: Tensor
    _outer_scale: Tensor | None
    _codes_for_grad_input: Tensor | None
    _scale_for_grad_input: Tensor | None
    _outer_scale_for_grad_input: Tensor | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._shared = _Shared()
        super().__init__(*args, **kwargs)
        if self.quantizer_for_grad_input is not None:
            self._shared.gathers = GatherPolicy(BOTH, checkpointed=False)
        listen_to_optimizers()

    @staticmethod
    def of(x: Tensor, *quantizers: Quantizer, batch: int = 0, outer_amax: Tensor | None = None) -> QuantizedParameter:
        """Quantize a matrix, or stacked weights of experts if ``batch`` is 1, with one or two quantizers.

        A second quantizer makes separate codes for grad_input. On the meta device the result has shapes only.
        ``outer_amax`` is the amax, (1,) float32, for the one scale of a matrix, if other matrices share the scale.
        """
        sets = [
            _codes_of_stack(x, each) if batch else _codes_of_matrix(x, each.for_shape(x.shape), outer_amax)
            for each in quantizers
        ]
        return QuantizedParameter.of_sets(sets, x.dtype, batch=batch)

    def data_ptr(self) -> int:
        """Raise a RuntimeError, because no memory holds the values.

        PyTorch's method would return 0, so that different parameters would look like the same parameter.
        """
        raise RuntimeError(
            "data_ptr of a QuantizedParameter is not supported, because only quantized data is stored. Use "
            ".codes.data_ptr() instead. Accelerate with FSDP2 calls data_ptr to identify the optimizer's parameters. "
            "If that is the caller, convert the model with fp8compile.integrations.accelerate.convert, or use "
            "F8Callback from fp8compile.integrations.transformers."
        )

    # ------------------------------------------------------------------ what its views have in common

    pending: Pending | None = _of_shared("pending", "Its values during an optimizer's step; None if none runs.")
    frozen: bool = _of_shared("frozen", "Whether ``fp8compile.freeze_weights`` made it; it then takes no values.")
    blank: bool = _of_shared("blank", "Whether ``new_zeros`` made it and nothing was written to it yet.")
    state: Callable[[], tuple[Tensor, Tensor] | None] = _of_shared(
        "state", "Returns the weight's history and multiplier in its layer's state, or None."
    )
    # replaces Tensor.outer, a product that codes do not support
    outer: tuple[ProcessGroup | None, ...] = _of_shared(  # type: ignore[assignment]
        "outer", "For each set, the tensor parallel ranks that share its scale, under FSDP2."
    )
    gathers: GatherPolicy | None = _of_shared(
        "gathers", "What FSDP2 gathers for two sets of quantized data; None for one."
    )

    @property
    def written(self) -> bool:
        """Whether any code except `MasterWeights` has written to this parameter, through any of its views.

        All ranks that share the scale have the same value. FSDP2 copies each shard to a padded tensor; that copy does
        not count as a write.
        """
        return self._shared.written

    @written.setter
    def written(self, value: bool) -> None:
        self._shared.written, self._shared.blank = value, False

    @property
    def is_copy(self) -> bool:
        """Whether this is a clone or a deep copy of a parameter, which no optimizer has updated."""
        return self._shared.is_copy

    @property
    def initial(self) -> Tensor | None:
        """The values from which the codes were made, float32 on the CPU; None if no values are kept.

        With ``keep_initial=True``, ``fp8compile.convert`` keeps these values, until ``fp8compile.MasterWeights`` takes
        them. A write to the parameter replaces the values. Assigning None drops them for all views.
        """
        if self._shared.initial is None:
            return None
        return self._shared.initial.as_strided(self.shape, self.stride(), self.storage_offset())

    @initial.setter
    def initial(self, values: Tensor | None) -> None:
        self._shared.initial = None
        if values is not None:
            device = "meta" if self.codes.is_meta else "cpu"
            per_byte = math.prod(self.quantizer.values_shape((2, 2))) // 4
            size = self.codes.untyped_storage().nbytes() * per_byte
            self._shared.initial = torch.zeros(size, dtype=torch.float32, device=device)
            self.keep(values)

    @torch.no_grad()
    def keep(self, values: Tensor) -> None:
        """Copy ``values``, dequantized if they are codes, to ``initial``, if initial values are kept."""
        if (initial := self.initial) is not None:
            initial.copy_(values.dequantize(torch.float32) if isinstance(values, QuantizedTensor) else values)

    def row(self) -> tuple[Tensor, Tensor]:
        """Return the amax history (L,) of L steps and the multiplier () of this weight, both float32.

        Both are in the layer's state of delayed scaling; a multiplier is 1 / scale.

        Raises:
            RuntimeError: This tensor is not the weight of a layer with delayed scaling.
        """
        if (found := self.state()) is None:
            raise RuntimeError(
                "writing values to a weight with DelayedScaling is only supported for a layer's own parameter, "
                "because the layer stores the scale; this tensor is a copy. Write to the weight of the layer, or "
                "to .dequantize() of the copy."
            )
        return found

    def stored(self) -> tuple[Quantized, ...]:
        """Return the codes and scales in memory, for the output and, if separate, for grad_input.

        Values of a running optimizer step are not quantized first.
        """
        return self._sets_named("_")

    @property
    def values(self) -> Tensor:  # type: ignore[override]  # Tensor.values is of sparse ones
        """The plain values that a compiled optimizer step reads and writes."""
        return self.pending.given()  # type: ignore[union-attr]  # only read while a step runs

    # ------------------------------------------------------------------ which part of a weight it is

    @property
    def has_all_scales(self) -> bool:
        """Whether this shard has all scales along the sharded dim, as it needs if shards cut blocks."""
        return any(own.has_all_scales for own in self.stored())

    @property
    def ends_in_padding(self) -> bool:  # type: ignore[override]
        """Whether ``new_zeros`` made this tensor for FSDP2, so that only padding follows a slice of it."""
        return self.extent == BLANK

    def cuts_by(self, own: Quantized, dim: int, first: int, last: int) -> bool:
        """Whether the slice ``[first:last]`` along ``dim`` begins or ends within a block of codes ``own``.

        It is False if only padding follows the slice.
        """
        block = self.block_along(own, dim)
        if block == -1 or self.extent in (BLANK, SHARD):
            return False
        return bool(first % block or (last % block and last != self.shape[dim]))

    def share_scale(self, group: ProcessGroup, shard_dim: int, total: int) -> None:
        """Store which ranks share this shard's scale, so that each update exchanges amaxes with these ranks.

        Args:
            group: The ranks whose shards make up the weight.
            shard_dim: The dim along which the weight is sharded.
            total: Size of the whole weight along ``shard_dim``.
        """
        allow_groups()
        self.group, self.shard_dim = group, shard_dim
        if self.has_all_scales:
            self.sizes = chunk_sizes(total, group.size())

    def _values(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]  # Tensor._values is of sparse ones
        if self.has_all_scales and self.sizes is None:
            raise RuntimeError(
                "the values of a shard of a QuantizedParameter that splits blocks are not available before its "
                "position is known. Call fp8compile.parallel.share_scales(model) after fully_shard, or run a "
                "forward first."
            )
        return super()._values(dtype)

    def amax_of(self, own: Quantized, values: Tensor) -> Tensor:
        """Return the amaxes of new values on this rank, one for each scale of the codes ``own``."""
        cuts = self.cuts_of(own)
        if not cuts and not self.batch:
            return ops.amax(values, own.quantizer)
        return whole_amax(Plain(values, TensorLayout(cuts, self.batch)), own.quantizer)

    def codes_of(
        self, own: Quantized, values: Tensor, multiplier: Tensor, quantizer: Quantizer, placed: Sharding
    ) -> Tensor:
        """Round new values to codes that can replace the codes ``own``.

        Args:
            own: This parameter's codes for the output or for grad_input.
            values: The new values.
            multiplier: 1 / scale of each block.
            quantizer: The quantizer that rounds, with the same format and block as the quantizer of ``own``.
            placed: How ranks shard the weight. Stochastic rounding of a matrix depends on a value's place in the whole
                weight.
        """
        cuts = self.cuts_of(own)
        if not cuts and not self.batch:
            return ops.cast(values, multiplier, quantizer, *positions(Plain(values, TensorLayout(placed)), quantizer))
        part = Plain(values, TensorLayout(cuts, self.batch))
        return two_a_byte(cast_part(part, multiplier, quantizer), quantizer)

    def check_writable(self, what: object) -> None:
        """Raise a RuntimeError unless the op ``what`` may write to this tensor.

        The op may not write if the parameter is frozen, if elements outside of this tensor share its scale, or if
        other ranks share the scale and this tensor does not know these ranks yet.
        """
        if self.frozen:
            raise RuntimeError(
                f"{what} writes to a weight that was frozen by fp8compile.freeze_weights, which keeps only the "
                "quantized weight. Train the model before freezing it, or train adapters with the frozen model "
                "(fp8compile.integrations.peft)."
            )
        sets = self.stored()
        spans = self.has_all_scales or any(
            -1 in own.quantizer.block or own.quantizer.has_outer_scale() for own in sets
        )
        if self.extent == SLICE:
            raise RuntimeError(
                f"{what} of a part of a QuantizedParameter is not supported, because the rest of the parameter "
                "shares its scale. Write to the full parameter."
            )
        if self.extent == BLANK and spans and self.group is None:
            raise RuntimeError(
                f"{what} of a tensor that new_zeros or new_empty created from a QuantizedParameter is not "
                "supported, because such a tensor can only receive quantized data. To compute a weight, as "
                "torch.nn.init.orthogonal_ does, use a plain tensor and copy it: "
                "weight.copy_(torch.nn.init.orthogonal_(torch.empty(weight.shape))). If fully_shard created it, as "
                "the shard of a rank without elements, call fp8compile.parallel.share_scales(model) first."
            )
        if self.extent == SHARD and spans and self.group is None:
            raise RuntimeError(
                f"{what} of a shard of a QuantizedParameter is not supported before the ranks that share its scale "
                "are known. Call fp8compile.parallel.share_scales(model) after fully_shard, or run a forward first."
            )

    @property
    def instead_of_cutting(self) -> str:  # type: ignore[override]
        """Return the advice in the error about a view that would cut a block."""
        if self.quantizer_for_grad_input is not None:
            return (
                "convert this weight with weight_lifetime='call', and all-gather it in FP8 with "
                "fp8compile.parallel.fsdp_float8_all_gather, which supports split blocks."
            )
        return (
            "convert this weight with weight_lifetime='call'. If this is fully_shard: row shards may split blocks, "
            "column shards may not (omit shard_placement_fn)."
        )

    # ------------------------------------------------------------------ views

    def like(self, sets: Sequence[Quantized]) -> Self:
        """Return a view of this parameter with the same shape and other codes.

        ``sets`` has the codes for the output and, if different, for grad_input.
        """
        return self._shown_by(super().like(sets))

    def _shown_by(self, view: Self) -> Self:
        view.extent, view._shared = SHARD if self.extent == BLANK else self.extent, self._shared
        return view

    def view_of(self, sets: Sequence[Quantized], shard_dim: int | None, *, along_batch: bool = False) -> Self:
        """Return a view of this parameter that has another shape, or only a part of the elements.

        ``sets`` has the view's codes, ``shard_dim`` is its sharded dim or None, and ``along_batch`` says whether the
        view selects whole matrices of stacked weights.
        """
        found, own = self._shown_by(self.of_sets(sets, self.dtype, batch=self.batch)), self.stored()
        if along_batch or self.extent == BLANK or sets[0].codes.numel() == own[0].codes.numel():
            found.group, found.shard_dim, found.sizes = self.group, shard_dim, self.sizes
        elif any(map(_have_scales_in_common, own, sets)):
            found.extent = SLICE
        return found

    # ------------------------------------------------------------------ graphs, copies and files

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        place = None if self.pending is None else self.pending.place
        if any(self.outer) and place is None:
            raise TypeError(
                "a shard of a QuantizedParameter that is also sharded by tensor parallelism can't be an argument of a "
                "compiled graph. Do not compile the function that writes to it, unless it is the step of an optimizer."
            )
        names, metadata = super().__tensor_flatten__()
        if place is not None:  # reading the names without "_" would round the step's values
            own = [f"_{name}" for name in names if name in INNER]
            names = [*own, "values", *names[len(own) :]]
        return names, (*metadata, self.extent, place)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], metadata: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> QuantizedParameter:
        *own, extent, place = metadata
        found = QuantizedParameter._unflattened(inner, tuple(own))
        found.extent = extent
        if place is not None:
            found.pending = Pending(place, values=inner["values"])
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedParameter:
        copied: Any = self.clone()
        found = as_leaf(copied.detach(), self.requires_grad, isinstance(self, torch.nn.Parameter))
        found.gathers = copy.deepcopy(self.gathers)
        memo[id(self)] = found
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.group is not None or any(self.outer) or self.has_all_scales:
            raise TypeError(
                "a QuantizedParameter whose scale is shared over ranks can't be pickled, because a process group "
                "belongs to one process. Save its module's state_dict(), which has the quantized data and the "
                "scale as plain tensors."
            )
        sets, leaf = self.sets(), (self.requires_grad, isinstance(self, torch.nn.Parameter))
        if len(sets) == 1:
            kept = self.extent, self.written, self.initial, self.frozen
            own = sets[0].codes, sets[0].scale, self.quantizer, self.dtype
            load = self.loaders["stack" if self.batch else "matrix"]
            return load, (*own, kept, leaf, *sets[0].scales[1:])
        alone = [QuantizedParameter.of_sets([own], self.dtype, batch=self.batch) for own in sets]
        for each in alone:
            each.extent, each.written, each.frozen = self.extent, self.written, self.frozen
        alone[0]._shared.initial = self._shared.initial
        policy: Any = self.gathers  # there are two sets of codes
        return self.loaders["pair"], (tuple(alone), leaf, (policy.checkpointed, policy.name))

    loaders: dict[str, Callable[..., QuantizedParameter]]  # functions for pickles; `fp8compile.tensor.saved` sets them

    # ------------------------------------------------------------------ what FSDP2 asks

    def sets_to_gather(
        self, mesh: Any, size: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[DimSharding, list[SetToGather]]:
        """Return how ranks shard this parameter, and a `SetToGather` for each set of its codes.

        For the arguments see `FullyShardHooks.sets_to_gather`. Scales that all ranks have are not sent.
        """
        dim = cut_dim(self, size)
        if dim and not self.batch and self.gathers is not None:
            raise ValueError(CUT_BY_COLUMNS)
        share_scales_of_shard(self, mesh, size, module)
        shards = DimSharding(mesh.get_group(), mesh.get_local_rank(), dim, chunk_sizes(size[dim], mesh.size()))
        return shards, [self._to_gather(*each, dim, size) for each in zip(GEMMS, self.sets(), strict=False)]

    def _to_gather(self, gemm: Any, own: Quantized, dim: int, size: tuple[int, ...]) -> SetToGather:
        has_own_blocks = self.block_along(own, dim) != -1 and not own.has_all_scales
        is_own = (has_own_blocks, dim < self.batch)[: len(own.scales)]

        def make(quantizer: Quantizer) -> tuple[Tensor, ...]:
            codes = own.codes if own.quantizer == quantizer else one_a_byte(own.codes, own.quantizer)[0]
            return codes, *own.scales

        return SetToGather(gemm, own.quantizer, is_own, scale_shapes(size, own.quantizer), make)

    # ------------------------------------------------------------------ ops

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as PyTorch calls it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LAYERS:
            check_outside_of_graph_of_step(args, func)
            return super().__torch_dispatch__(func, types, args, kwargs)
        with _compat.counting_versions():  # for codes and scale, which a compiled layer saves for its backward
            if func in WRITES:
                return WRITES[func](func, args, kwargs)
            if func.namespace == "c10d":
                raise TypeError(f"{func} {NO_MESSAGE}")
            if func is aten.view.default and args[0].flattens_blocks(args[1]):
                found = args[0].flat([own.codes.view(-1) for own in args[0].sets()])
                return return_and_correct_aliasing(func, args, kwargs, found)
            try:
                result = super().__torch_dispatch__(func, types, args, kwargs)
            except TypeError as error:
                if func is aten.view.default and len(args[1]) == 1:
                    raise TypeError(f"{error} {IF_DDP}") from None
                raise
            if func in COPIES:
                result.unshared()._shared.is_copy = func is aten.clone.default
            return moved(func, args[0], result)

    def unshared(self) -> Self:
        """Give this copy separate initial values and flags, equal to the original's; return the copy."""
        initial, written = self.initial, self.written
        found = self.alone()
        found.initial, found.written = initial, written
        return found

    def alone(self) -> Self:
        """Stop sharing flags and values with other views, and drop initial values; return this tensor."""
        shared, self._shared = self._shared, _Shared()
        self.outer, self.gathers, self.frozen = shared.outer, shared.gathers, shared.frozen
        return self

    def flattens_blocks(self, size: Sequence[int]) -> bool:
        """Whether a view of shape ``size`` flattens 2-D blocks, so that it can't keep their scales."""
        if len(size) != 1 or self.ndim == 1:
            return False
        has_blocks = any(own.quantizer.block != (-1, -1) for own in self.stored())
        return bool(self.batch) or (self.extent in (SHARD, BLANK) and has_blocks)

    def flat(self, codes: Sequence[Tensor]) -> QuantizedParameter:
        """Make a 1-D view without scales, because a 1-D tensor has no 2-D blocks.

        ``codes`` are the flattened codes. FSDP2 keeps such a view of each shard, but never reads its values. Ops on it
        raise.
        """
        sets = [
            own.showing(
                each,
                own.scale.new_empty(0),
                quantizer=own.quantizer.transposed() if packed_dim(own.quantizer) == -2 else own.quantizer,
                has_scales_of_whole=(False, False),
            )
            for own, each in zip(self.stored(), codes, strict=True)
        ]
        found = QuantizedParameter.of_sets(sets, self.dtype)
        found.extent = SLICE
        return found


for _name in INNER:
    setattr(QuantizedParameter, _name, _up_to_date(_name))


def _codes_of_stack(x: Tensor, quantizer: Quantizer) -> Quantized:
    part, quantizer = Plain(x.detach(), STACK), packed_in_rows(quantizer, x.shape)
    multiplier, scale, outer_scale = scales_of(whole_amax(part, quantizer), quantizer, batch=1)
    codes = cast_part(part, multiplier, quantizer).contiguous()  # not contiguous if blocks were padded
    return Quantized(codes=two_a_byte(codes, quantizer), scale=scale, quantizer=quantizer, outer_scale=outer_scale)


def _codes_of_matrix(x: Tensor, quantizer: Quantizer, outer_amax: Tensor | None) -> Quantized:
    if outer_amax is None:
        return quantize(x, quantizer).sets()[0]
    return quantize_part(Plain(x.detach()), quantizer, PYTHON_OF_STEPS, outer_amax=outer_amax)


def _have_scales_in_common(whole: Quantized, part: Quantized) -> bool:
    return any(one.numel() == other.numel() for one, other in zip(whole.scales, part.scales, strict=True))


def is_quantized_parameter(tensor: object) -> TypeGuard[QuantizedParameter]:
    """Whether a tensor is a QuantizedParameter, a quantized weight that optimizers can write to."""
    return isinstance(tensor, QuantizedParameter)


def as_leaf(found: QuantizedParameter, requires_grad: bool, is_parameter: bool) -> QuantizedParameter:
    """Make the copy ``found`` a leaf of autograd again, in place, and set its ``requires_grad``.

    If ``is_parameter``, it counts as an ``nn.Parameter``.
    """
    found.requires_grad_(requires_grad)
    if is_parameter:
        found._is_param = True
    return found
