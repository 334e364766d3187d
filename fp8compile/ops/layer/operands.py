"""The operands of a layer's products: codes and scales, wherever a tensor lies and wherever its scale comes from.

    a scale comes from      for
    the tensor's own amax   current scaling; ranks that share a block exchange its amax
    a multiplier            delayed scaling, which knows it before it sees the tensor
    an amax that is given   a weight over ranks, which exchange the amaxes of all layers at once
    codes that are given    a weight that is quantized already, an input of which the forward kept codes

Which steps are taken, and how, depends on who takes them:

    phase       runs in                        on a GPU
    EAGER       a kernel, step by step
    INFERENCE   compiled code, no gradients    codes of an input are stored once for all layers that read it
    FORWARD     compiled code of the output    also: one read of a weight gives its codes and the backward's amaxes
    BACKWARD    compiled code of a gradient    the forward's amaxes, codes of its own; one read of grad_output for both

A tensor that is whole is a part without cuts, so what holds for one placement holds for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.formats import repack
from fp8compile.ops.cast import cast_again
from fp8compile.ops.gemm import PADDED_TO, Operand, multiply
from fp8compile.ops.inductor_hints import after, store
from fp8compile.ops.layer.fsdp_gather import gathered
from fp8compile.ops.layer.local_shards import LocalShard, QuantizedShard
from fp8compile.ops.layer.one_read import by_one_read
from fp8compile.ops.layer.quantize_shard import OPS_OF_STEPS, PYTHON_OF_STEPS, Steps, quantize_shard
from fp8compile.ops.layer.rows import Rows, rows_cut
from fp8compile.ops.scaled_mm import multiply_operands
from fp8compile.quantizers import GEMMS, TENSORS, DelayedScaling, Gemm, Quantizer, Recipe, TwoLevelScaling
from fp8compile.target import target_of

__all__ = ["Operands", "Phase"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS
ROW = {slot: row for row, slots in enumerate(TENSORS.values()) for slot in slots}  # of a layer's state
WEIGHT_SLOTS = (OUTPUT.b, GRAD_INPUT.b)


class Phase(Enum):
    """Who takes the steps, see the head of this file."""

    EAGER = auto()
    INFERENCE = auto()
    FORWARD = auto()
    BACKWARD = auto()

    @staticmethod
    def compiled(gemm: Gemm) -> Phase:
        """The phase of a product in a graph that is being traced."""
        if gemm is not OUTPUT:
            return Phase.BACKWARD
        return Phase.FORWARD if torch.is_grad_enabled() else Phase.INFERENCE

    @staticmethod
    def of(gemm: Gemm, tensor: Tensor) -> Phase:
        """The phase of a product, by one of its tensors: in eager mode it has data."""
        return Phase.compiled(gemm) if _compat.is_traced(tensor) else Phase.EAGER


STEPS = {
    Phase.EAGER: PYTHON_OF_STEPS,
    Phase.INFERENCE: OPS_OF_STEPS,
    Phase.FORWARD: OPS_OF_STEPS,
    Phase.BACKWARD: replace(OPS_OF_STEPS, cast=cast_again),
}


def _cast_in_backward(x: Tensor, multiplier: Tensor, quantizer: Quantizer, *where: Tensor) -> Tensor:
    """Make codes of a weight's shard, or of a weight in a region, in the backward and nowhere else.

    The partitioner knows that parameters cost nothing to keep, and makes their codes again. Of tensors inside of a
    DTensor it doesn't know it (PyTorch 2.13 counts them wrongly), and to a region its parameters are activations: it
    would keep the codes. Elsewhere it is left alone: a mark moves what else it chooses (blockwise: act for its codes).
    """
    codes = cast_again(x, multiplier, quantizer, *where)
    inductor.make_in_backward(codes)
    return codes


WEIGHT_IN_BACKWARD = replace(STEPS[Phase.BACKWARD], cast=_cast_in_backward)


@dataclass(frozen=True)
class Operands:
    """What quantizes and multiplies the operands of one product of a layer.

    Attributes:
        recipe: Quantizers by slot.
        phase: Who takes the steps.
        multiplier: (3,) float32, of input, weight and grad_output, for slots with delayed scaling.
        waits_for: Amaxes of input and weight, () each. Scales by multipliers depend on them artificially, which
            changes no value: the partitioner then computes an amax in the forward, fused with the cast. Otherwise the
            backward reads the tensor once more: 7.10 GB instead of 6.33 for the block of ``benchmarks.kernels``.
        input: The input's codes for grad_weight, if the forward kept them.
        weight: The weight's codes, if it is quantized already.
        weight_in_turns: Whether their memory has the codes for the output in the forward and those for grad_input in
            the backward: then each pass has to read them itself.
        weight_amax: Amaxes of the whole weight for this product, if they are known.
        rows: How FSDP cuts the weight, whose codes are gathered before the product; None for a weight that isn't.
    """

    recipe: Recipe
    phase: Phase = Phase.EAGER
    multiplier: Tensor | None = None
    waits_for: tuple[Tensor, ...] = ()
    input: QuantizedShard | None = None
    weight: QuantizedShard | None = None
    weight_in_turns: bool = False
    weight_amax: Tensor | None = None
    rows: Rows | None = None

    def of(self, part: LocalShard, slot: str) -> QuantizedShard:
        """Quantize a part for a slot of the recipe.

        Args:
            part: A rank's part of the tensor as the layer holds it, or a whole matrix.
            slot: Such as ``"weight_for_grad_input"``.

        Returns:
            Its codes; of a weight under FSDP those of all rows.
        """
        quantizer = self.recipe.quantizer_read(slot)
        if slot == GRAD_WEIGHT.b and self.input is not None:
            return self.input
        if slot not in WEIGHT_SLOTS:
            return self._quantized(part, quantizer, slot)
        if self.weight is not None:
            return self.weight
        if self.rows is not None:
            own = self._quantized(LocalShard(part.local, (*part.cuts, rows_cut(self.rows))), quantizer, slot)
            if self.phase is not Phase.EAGER and 0 in self.rows.sizes:
                # Scales of no rows are constants. Compilers would merge messages of two layers, on that rank alone.
                own = replace(own, scale=after(own.scale, own.local))
            return _gathered_rows(own, in_backward=slot == GRAD_INPUT.b)
        if self.phase in (Phase.FORWARD, Phase.BACKWARD) and _keeps_codes(self.recipe, part):
            return self._kept(part, quantizer, slot)
        return self._quantized(part, quantizer, slot)

    def in_high_precision(self, part: LocalShard, slot: str, dtype: torch.dtype) -> LocalShard:
        """A right operand of a product in high precision: as it is, of a weight all rows that FSDP cuts.

        With ``dequantized_gradients`` it is the values of the codes that the forward multiplied.

        Args:
            part: Of the weight, or of the input for grad_weight.
            slot: Its slot of the recipe.
            dtype: Of the product.
        """
        if self.recipe.is_dequantized(slot):
            return self.of(part, slot).dequantized(dtype)
        if self.rows is None or slot not in WEIGHT_SLOTS:
            return part
        return LocalShard(gathered(part.local, self.rows, in_backward=slot == GRAD_INPUT.b), part.cuts)

    def laid_out(self, operand: Operand, slot: str) -> Operand:
        """An operand as its GEMM reads it, in memory once for all products that read it.

        Layers that share an input, such as q, k and v, share its codes.
        """
        if self.phase is Phase.EAGER or not _on_gpu(operand.codes) or not _is_aligned(operand.codes):
            return operand
        if isinstance(operand.quantizer, DelayedScaling) and self.multiplier is not None:
            return operand
        if _compat.async_tp():
            return operand  # PyTorch's pass looks for reshapes, and nothing else, beside a product
        if slot == OUTPUT.a:
            return replace(operand, codes=store(operand.codes))
        if slot == GRAD_WEIGHT.b:
            return replace(operand, codes=store(operand.codes.t().contiguous()).t())
        return operand

    def multiply(self, left: Operand, right: Operand, out_dtype: torch.dtype, gemm: Gemm) -> Tensor:
        """The product of two operands."""
        run = multiply if self.phase is Phase.EAGER else multiply_operands
        return run(left, right, out_dtype, self.recipe.gemm_config(gemm))

    def _steps(self, part: LocalShard, slot: str) -> Steps:
        if self.phase is not Phase.BACKWARD:
            return STEPS[self.phase]
        if slot == GRAD_INPUT.b and (part.cuts or _compat.is_traced_as_subgraph()):
            return WEIGHT_IN_BACKWARD
        # codes that the forward gathered from other ranks serve the backward too: kept, they are not sent again
        gathers = slot == GRAD_WEIGHT.b and any(cut and cut.dim != part.local.ndim - 1 for cut in part.cuts)
        # those of which the backward reads the values are the forward's, kept in place of the input
        is_forwards = slot == GRAD_WEIGHT.b and self.recipe.is_dequantized(slot)
        return STEPS[Phase.FORWARD if gathers or is_forwards else Phase.BACKWARD]

    def _quantized(self, part: LocalShard, quantizer: Quantizer, slot: str) -> QuantizedShard:
        if self.multiplier is not None and isinstance(quantizer, DelayedScaling):
            return self._by_multiplier(part, quantizer, slot)
        if self.weight_amax is not None and slot in WEIGHT_SLOTS:
            return quantize_shard(part, quantizer, self._steps(part, slot), whole_amax=self.weight_amax)
        is_compiled = self.phase in (Phase.FORWARD, Phase.BACKWARD)
        if is_compiled and _on_gpu(part.local) and not self.recipe.is_dequantized(slot):
            return by_one_read(part, slot, self.recipe, self._steps(part, slot))
        return quantize_shard(part, quantizer, self._steps(part, slot))

    def _by_multiplier(self, part: LocalShard, quantizer: DelayedScaling, slot: str) -> QuantizedShard:
        own = self.multiplier[ROW[slot]].view(quantizer.scale_shape(part.local.shape))
        scale = quantizer.scale_of(own)
        if self.waits_for:
            scale = after(scale, self.waits_for[ROW[slot]])
        return QuantizedShard(self._steps(part, slot).cast(part.local, own, quantizer), scale, quantizer, part.cuts)

    def _kept(self, part: LocalShard, quantizer: Quantizer, slot: str) -> QuantizedShard:
        """Codes of a weight of which the forward makes a copy for grad_input."""
        forward = replace(self, phase=Phase.FORWARD)._quantized(part, quantizer, OUTPUT.b)
        other = _packed_along_columns(forward)
        turned = _turned(other.local)  # stored, which no partitioner computes again
        if slot == GRAD_INPUT.b:
            return replace(other, local=turned.t())
        # else the partitioner makes those of a DTensor in the backward: 1.6 % more bytes (benchmarks.placements)
        return replace(forward, scale=after(forward.scale, turned))


# forward and backward both ask for it, and have one of it
@inductor.once_a_graph
def _turned(codes: Tensor) -> Tensor:
    """Codes as the product reads them that reads them transposed."""
    return store(codes.t().contiguous())


def _on_gpu(tensor: Tensor) -> bool:
    return target_of(tensor.device).type == "cuda"


def _is_aligned(codes: Tensor) -> bool:
    """Whether a GEMM reads these codes as they are, whatever their sizes turn out to be: else it pads a copy."""
    return all(_compat.statically_true(size % PADDED_TO == 0) for size in codes.shape)


def _keeps_codes(recipe: Recipe, weight: LocalShard) -> bool:
    """Whether codes of this weight for grad_input are made in the forward and kept, as the recipe wants it."""
    return recipe.keep_weight_codes and _on_gpu(weight.local) and _is_aligned(weight.local)


def _packed_along_columns(codes: QuantizedShard) -> QuantizedShard:
    """Packed codes of a weight as grad_input sums over them; others as they are."""
    quantizer = codes.quantizer
    if type(quantizer) is not TwoLevelScaling or quantizer.packed != "rows":
        return codes
    return replace(codes, local=repack(codes.local), quantizer=replace(quantizer, packed="columns"))


def _gathered_rows(codes: QuantizedShard, *, in_backward: bool) -> QuantizedShard:
    """Codes of a weight: what the ranks of FSDP have, put together; as other ranks cut it."""
    if codes.cuts[-1] is not None:
        with inductor.recomputed(in_backward=True) if in_backward else inductor.left_in_forward():
            codes = codes.gather(len(codes.cuts) - 1)
    return replace(codes, cuts=codes.cuts[:-1])
