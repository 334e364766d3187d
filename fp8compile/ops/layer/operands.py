"""The operands of a layer's GEMMs: their codes and scales, in eager mode and in compiled code.

A scale comes from the tensor's amax, from an amax that ranks have exchanged, or from a multiplier (delayed scaling);
or it is given with the codes. The phase decides which steps run:

    phase       runs in                        on a GPU
    EAGER       a kernel, step by step
    INFERENCE   compiled code, no gradients    codes of an input are stored once for all layers that read it
    FORWARD     compiled code of the output    also: one read of a weight gives its codes and the backward's amaxes
    BACKWARD    compiled code of a gradient    makes codes by the forward's amaxes; reads grad_output once for 2 GEMMs
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from math import lcm
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.formats import repack
from fp8compile.layout.four_bit_packing import packed_dim
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout
from fp8compile.ops.cast import cast
from fp8compile.ops.gemms.grouped.scaled_grouped_mm import multiply_groups
from fp8compile.ops.gemms.scaled_mm import multiply_operands
from fp8compile.ops.gemms.selection import PADDED_TO, multiply
from fp8compile.ops.inductor_hints import after, store
from fp8compile.ops.layer.fsdp_gather_high_precision import gathered
from fp8compile.ops.layer.fsdp_rows import Rows, rows_cut
from fp8compile.ops.layer.gather_operands import gather
from fp8compile.ops.layer.one_read import ALONG_ROWS, ALONG_TOKENS, quantize_in_one_read
from fp8compile.ops.layer.quantize_groups import as_values_of_rows, is_four_bits_on_gpu, quantize_groups
from fp8compile.ops.layer.quantize_over_ranks import (
    dequantized,
    has_one_scale,
    in_whole_blocks,
    is_cut_within,
    quantize_part,
)
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS, Steps
from fp8compile.ops.rounding_barrier import optimization_barrier, rounded
from fp8compile.ops.traced_steps import OPS_OF_STEPS
from fp8compile.quantizers import GEMMS, TENSORS, DelayedScaling, Gemm, Quantizer, Recipe, TwoLevelScaling
from fp8compile.target import target_of

__all__ = ["Operands", "Phase", "as_read", "as_summed", "packed_along"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS
ROW = {role: row for row, roles in enumerate(TENSORS.values()) for role in roles}  # role -> row of a layer's state
WEIGHT_ROLES = (OUTPUT.b, GRAD_INPUT.b)
GRADIENT_ROLES = TENSORS["grad_output"]


class Phase(Enum):
    """Where a layer's steps run: in eager mode, or in a compiled graph's inference, forward or backward."""

    EAGER = auto()
    INFERENCE = auto()
    FORWARD = auto()
    BACKWARD = auto()

    @staticmethod
    def compiled(gemm: Gemm) -> Phase:
        """Return the phase of a GEMM that is being traced: for the output FORWARD or INFERENCE, else BACKWARD."""
        if gemm is not OUTPUT:
            return Phase.BACKWARD
        return Phase.FORWARD if torch.is_grad_enabled() else Phase.INFERENCE

    @staticmethod
    def of(gemm: Gemm, tensor: Tensor) -> Phase:
        """Return EAGER, or the phase that `compiled` returns if ``tensor`` is being traced."""
        return Phase.compiled(gemm) if _compat.is_traced(tensor) else Phase.EAGER


def as_read(tensor: Tensor, phase: Phase) -> Tensor:
    """Round a traced tensor to its dtype, so that fused code reads the value that eager mode would have stored."""
    return tensor if phase is Phase.EAGER else rounded(tensor).to(tensor.dtype)


def _cast_again(
    x: Tensor, multiplier: Tensor, quantizer: Quantizer, rows: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
    codes: Tensor = cast(x, multiplier, quantizer, rows, columns, True)  # noqa: FBT003
    return codes


STEPS = {
    Phase.EAGER: PYTHON_OF_STEPS,
    Phase.INFERENCE: OPS_OF_STEPS,
    Phase.FORWARD: OPS_OF_STEPS,
    Phase.BACKWARD: replace(OPS_OF_STEPS, cast=_cast_again),
}


def _cast_in_backward(x: Tensor, multiplier: Tensor, quantizer: Quantizer, *where: Tensor) -> Tensor:
    """Cast a weight in the backward, with a mark that stops the partitioner from keeping the forward's codes.

    The partitioner recomputes codes of parameters by itself, because parameters cost nothing to keep. It would keep
    codes of tensors inside a DTensor, whose cost PyTorch 2.13 counts wrongly, of stacked weights, and in separately
    compiled blocks, where parameters count as activations. Other casts are not marked, because a mark changes other
    choices of the partitioner.
    """
    codes = _cast_again(x, multiplier, quantizer, *where)
    inductor.make_in_backward(codes)
    return codes


WEIGHT_IN_BACKWARD = replace(STEPS[Phase.BACKWARD], cast=_cast_in_backward)


@dataclass(frozen=True)
class Operands:
    """Quantizes and multiplies the operands of one GEMM of a layer.

    Attributes:
        recipe: Quantizers for the operands. With groups of rows, those with one level of scales must not pack codes.
        phase: Where the steps run: in eager mode, or in which kind of compiled code.
        multiplier: Multipliers (1 / scale) of input, weight and grad_output, (3,) float32, for delayed scaling.
        waits_for: Amaxes of input and weight, () each. Scales get an artificial dependency on them, so that the
            partitioner computes the amaxes in the forward, fused with the casts.
        weight: The weight's codes, if they were made before the GEMM.
        weight_in_turns: Whether the weight's codes for the output and for grad_input share one memory, in turns; the
            compiler must then leave each GEMM in its pass, forward or backward.
        weight_amax: Amaxes of the whole weight's blocks for this GEMM, if known.
        outer_amax: The amax, (1,) float32, for the whole weight's single scale, if several weights share this scale.
        fsdp_shards: The rows, or matrices, of the weight that each FSDP rank has, whose codes are gathered before
            the GEMM; None without FSDP.
    """

    recipe: Recipe
    phase: Phase = Phase.EAGER
    multiplier: Tensor | None = None
    waits_for: tuple[Tensor, ...] = ()
    weight: Quantized | None = None
    weight_in_turns: bool = False
    weight_amax: Tensor | None = None
    outer_amax: Tensor | None = None
    fsdp_shards: Rows | None = None

    # ------------------------------------------------------------------ operands

    def of(self, part: Plain, role: str) -> Quantized:
        """Return the codes and scales of an operand: ``weight`` if given, else ``part`` is quantized.

        ``part`` is this rank's shard; ``role`` is the recipe's field of the operand, such as ``"weight"``. A weight
        that is quantized here under FSDP has its codes gathered from all ranks.
        """
        if role not in WEIGHT_ROLES:
            read: Any = self.recipe.quantizer_read(role)  # a product in high precision asks for no codes
            if self.phase is Phase.EAGER:
                return self._quantized(part, read, role)
            with inductor.annotate_block(self._block_in_kernels(part, read)):
                return self._quantized(part, read, role)
        return self.weight if self.weight is not None else self._of_weight(part, role)

    def _block_in_kernels(self, part: Plain, read: Quantizer) -> tuple[int, int] | None:
        """Return the block to record in a graph, by which `SavedAsCodes` saves the operand; None to record none."""
        other: Any = self.recipe.quantizer_read(GRAD_WEIGHT.b)
        if isinstance(other, TwoLevelScaling) and other.transform() and part.layout.offs is None:
            return other.block
        return None if read.block[1] == 1 else read.block

    def _of_weight(self, part: Plain, role: str) -> Quantized:
        quantizer: Any = self.recipe.quantizer_read(role)  # a product in high precision asks for no codes
        rows = part.local.shape[-2]
        part = self._weight_to_quantize(part)
        if self.fsdp_shards is not None:
            own = self._quantized(part, quantizer, role)
            own = _without_padding(own, rows) if part.layout.batch else own  # padding is never sent
            if self.phase is not Phase.EAGER and 0 in self.fsdp_shards.sizes:
                # On a rank without rows the scales are constants, and the compiler of that rank alone would merge the
                # messages of two layers.
                own = replace(own, scale=after(own.scale, own.codes))
            return _gathered_rows(own, in_backward=role == GRAD_INPUT.b)
        if self._reads_once(part) and self.recipe.keeps_weight_for_backward() and _is_aligned(part.local):
            found = self._kept(part, quantizer, role)
        else:
            found = self._quantized(part, quantizer, role)
        return _without_padding(found, rows) if part.layout.batch else found

    def _weight_to_quantize(self, part: Plain) -> Plain:
        """Add FSDP's sharding to a weight's layout, and pad stacked matrices to whole blocks."""
        if self.fsdp_shards is not None:
            part = part.with_cuts((*part.cuts, rows_cut(self.fsdp_shards)))
        if part.layout.batch and not is_cut_within(part):
            part = replace(part, local=in_whole_blocks(part.local, self._rows_of_blocks()))
        return part

    def own(self, part: Plain, role: str) -> tuple[Plain, Quantized]:
        """Return this rank's values of an operand and their codes, before ranks gather codes; for `statistics`."""
        part = self._weight_to_quantize(part) if role in WEIGHT_ROLES else part
        return part, self._quantized(part, getattr(self.recipe, role), role)

    def _rows_of_blocks(self) -> int:
        pair = (self.recipe.weight, self.recipe.weight_for_grad_input)
        return lcm(*(each.block[0] for each in pair if each is not None and each.block[0] > 0))

    def in_high_precision(self, part: Plain, role: str, dtype: torch.dtype) -> Plain:
        """Return the operand ``part`` for a GEMM in high precision; a weight that FSDP shards is gathered.

        If the recipe dequantizes its field ``role``, the result has the values of the codes, in ``dtype``.
        """
        if self.recipe.is_dequantized(role):
            return dequantized(self.of(part, role), dtype)
        if role == GRAD_WEIGHT.b and self.phase is Phase.BACKWARD:
            return replace(part, local=optimization_barrier(part.local))
        if self.fsdp_shards is None or role not in WEIGHT_ROLES:
            return part
        return replace(part, local=gathered(part.local, self.fsdp_shards, in_backward=role == GRAD_INPUT.b))

    def laid_out(self, operand: Quantized, role: str) -> Quantized:
        """Return the operand with codes stored once in memory, in the GEMM's order, for all GEMMs that read them.

        Not for eager mode. Only an input is stored so, on a GPU; other operands are returned unchanged. Layers that
        share an input, such as q, k and v, share its codes. ``role`` is the recipe's field of the operand.
        """
        if not _on_gpu(operand.codes) or not _is_aligned(operand.codes):
            return operand
        if isinstance(operand.quantizer, DelayedScaling) and self.multiplier is not None:
            return operand
        if _compat.async_tp():
            return operand  # PyTorch's pass finds a product only if nothing but reshapes lies between it and a message
        if role == OUTPUT.a:
            return replace(operand, codes=store(operand.codes))
        if role == GRAD_WEIGHT.b and operand.layout.offs is None:
            return replace(operand, codes=store(operand.codes.t().contiguous()).t())
        return operand

    def multiply(self, left: Quantized, right: Quantized, out_dtype: torch.dtype, gemm: Gemm) -> Tensor:
        """Multiply two operands, which ``gemm`` may transpose; with groups, compute a product for each group."""
        config = self.recipe.gemm_config(gemm)
        if left.layout.offs is None:
            run = multiply if self.phase is Phase.EAGER else multiply_operands
            return run(*gemm.oriented(left, right), out_dtype, config)
        # grouped products take matrices (E, n, k) and both sides of tokens along their features
        right = right if gemm.b_transposed or gemm.a_transposed else right.t()
        return multiply_groups(left, right, left.layout.offs, out_dtype, config)

    # ------------------------------------------------------------------ steps

    def _steps(self, part: Plain, role: str) -> Steps:
        if self.phase is not Phase.BACKWARD:
            return STEPS[self.phase]
        if role == GRAD_INPUT.b and (part.cuts or part.layout.batch or _compat.is_traced_as_subgraph()):
            return WEIGHT_IN_BACKWARD
        # the backward reuses codes that the forward gathered from other ranks, so they are not sent again
        gathers = role == GRAD_WEIGHT.b and any(cut and cut.dim != part.ndim - 1 for cut in part.cuts)
        # if the backward reads dequantized values, it reads the forward's codes, which are kept in place of the input
        is_forwards = role == GRAD_WEIGHT.b and self.recipe.is_dequantized(role)
        return STEPS[Phase.FORWARD if gathers or is_forwards else Phase.BACKWARD]

    def _quantized(self, part: Plain, quantizer: Quantizer, role: str) -> Quantized:
        if part.layout.offs is not None:
            return self._groups(part, role)
        if self.multiplier is not None and isinstance(quantizer, DelayedScaling):
            return self._by_multiplier(part, quantizer, role)
        if self.weight_amax is not None and role in WEIGHT_ROLES:
            return quantize_part(part, quantizer, self._steps(part, role), whole_amax=self.weight_amax)
        if self.outer_amax is not None and role in WEIGHT_ROLES and has_one_scale(quantizer):
            return quantize_part(part, quantizer, self._steps(part, role), outer_amax=self.outer_amax)
        if part.layout.batch and quantizer.has_outer_scale():
            quantizer = as_summed(part, quantizer, role)
            if self.phase is Phase.FORWARD:
                return _codes_of_stack(part.local, part.layout, quantizer)
        elif self._reads_once(part) and self._shares_read(role):
            return quantize_in_one_read(part, role, self.recipe, self._steps(part, role))
        steps = self._steps(part, role)
        if not part.layout.cuts and not part.layout.batch:
            return steps.quantize(part, quantizer)
        return quantize_part(part, quantizer, steps)

    def _reads_once(self, part: Plain) -> bool:
        """Whether kernels may read a part once for two GEMMs: in compiled code on a GPU, with gradients."""
        return self.phase in (Phase.FORWARD, Phase.BACKWARD) and _on_gpu(part.local)

    def _shares_read(self, role: str) -> bool:
        """Whether one kernel may read a tensor for two GEMMs; False if one of the GEMMs reads dequantized codes."""
        recipe = self.recipe
        return not recipe.is_dequantized(role) and (not recipe.dequantized_output or role in GRADIENT_ROLES)

    def _groups(self, part: Plain, role: str) -> Quantized:
        recipe = self.recipe
        is_forwards = recipe.is_dequantized(role)  # reads the codes that the forward multiplied, along rows
        rows = OUTPUT.a if is_forwards else ALONG_ROWS.get(role, role)
        found = quantize_groups(
            part,
            getattr(recipe, rows),
            getattr(recipe, ALONG_TOKENS[rows]),
            self._steps(part, role),
            along_tokens=role in ALONG_ROWS and not is_forwards,
            reads_once=self._reads_once(part),
            is_input=role == GRAD_WEIGHT.b,
        )
        return as_values_of_rows(found, part.local.shape[-1]) if is_forwards else found

    def _by_multiplier(self, part: Plain, quantizer: DelayedScaling, role: str) -> Quantized:
        multipliers: Any = self.multiplier
        own = multipliers[ROW[role]].view(quantizer.scale_shape(part.local.shape))
        scale = quantizer.scale_of(own)
        if self.waits_for:
            scale = after(scale, self.waits_for[ROW[role]])
        codes = self._steps(part, role).cast(part.local, own, quantizer)
        return Quantized(codes=codes, scale=scale, quantizer=quantizer, layout=part.layout)

    def _kept(self, part: Plain, quantizer: Quantizer, role: str) -> Quantized:
        """Return a weight's codes for ``role``: the forward's, or for grad_input a transposed copy, stored once."""
        forward = replace(self, phase=Phase.FORWARD)._quantized(part, quantizer, OUTPUT.b)
        other = _packed_along_columns(forward)
        copy = _transposed_contiguous(other.codes)  # it is stored, so no partitioner computes it again
        if role == GRAD_INPUT.b:
            return replace(other, codes=copy.transpose(-2, -1))
        # without this dependency the partitioner makes a DTensor's copy in the backward: 1.6 % more bytes
        # (benchmarks.placements)
        return replace(forward, scale=after(forward.scale, copy))


@inductor.once_a_graph
def _codes_of_stack(local: Tensor, layout: TensorLayout, quantizer: Quantizer) -> Quantized:
    """Quantize stacked weights with two levels of scales, as the forward does.

    Forward and backward share one call, because the partitioner would not merge the scales of two calls.
    """
    return quantize_part(Plain(local, layout), quantizer, STEPS[Phase.FORWARD])


# forward and backward both call it, and the graph keeps one call
@inductor.once_a_graph
def _transposed_contiguous(codes: Tensor) -> Tensor:
    return store(codes.transpose(-2, -1).contiguous())


def _on_gpu(tensor: Tensor) -> bool:
    return target_of(tensor.device).type == "cuda"


def _is_aligned(codes: Tensor) -> bool:
    """Whether a GEMM reads these codes without a padded copy, for all values of symbolic sizes."""
    return all(_compat.statically_true(size % PADDED_TO == 0) for size in codes.shape[-2:])


def as_summed(stack: Plain, quantizer: Any, role: str) -> Quantizer:
    """Return ``quantizer`` with codes packed along the dim that the GEMM of ``role`` sums, or with one code a byte.

    Only four-bit codes on a GPU are packed, if ranks don't shard the matrices.
    """
    if is_cut_within(stack) or not is_four_bits_on_gpu(stack.local, quantizer):
        return quantizer.unpacked()
    return replace(quantizer, packed=packed_along(role))


def packed_along(role: str) -> str:
    """Return along what four-bit codes of a stacked weight are packed: the dim that the GEMM of ``role`` sums."""
    return "columns" if role == GRAD_INPUT.b else "rows"


def _packed_along_columns(codes: Quantized) -> Quantized:
    """Repack a weight's codes along columns, the dim that grad_input sums; unpacked codes are returned unchanged."""
    quantizer = codes.quantizer
    if type(quantizer) is not TwoLevelScaling or quantizer.packed != "rows":
        return codes
    return replace(codes, codes=_repacked(codes.codes), quantizer=replace(quantizer, packed="columns"))


# forward and backward both call it; PyTorch 2.15 would not merge two calls, and the codes would be made twice
@inductor.once_a_graph
def _repacked(codes: Tensor) -> Tensor:
    *stack, rows, pairs = codes.shape
    if not stack:
        return repack(codes)
    return repack(codes.flatten(0, -2)).view(*stack, rows // 2, pairs * 2)


def _without_padding(stack: Quantized, rows: int) -> Quantized:
    """Cut each of stacked weights to ``rows`` rows; leave codes that are packed along columns padded."""
    if stack.codes.shape[1] == rows or packed_dim(stack.quantizer) == -2:
        return stack
    blocks = stack.quantizer.scale_shape((rows, stack.codes.shape[2]))[0]
    return replace(stack, codes=stack.codes[:, :rows], scale=stack.scale[:, :blocks])


def _gathered_rows(codes: Quantized, *, in_backward: bool) -> Quantized:
    """All-gather a weight's codes over FSDP's ranks; the last of ``codes.cuts`` is FSDP's sharding."""
    if codes.cuts[-1] is not None:
        with inductor.recomputed(in_backward=True) if in_backward else inductor.left_in_forward():
            codes = gather(codes, len(codes.cuts) - 1)
    return codes.with_cuts(codes.cuts[:-1])
