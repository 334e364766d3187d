"""The operands of a grouped layer's products: codes and scales of rows, of each group's matrix, and along tokens.

    rows       x_RK, dy_RN     blocks within a row; tensorwise, a scale for the rows of each group
    matrices   w_eNK           a scale grid for each group's matrix
    tokens     x_RK, dy_RN     blocks along the tokens of each group; codes are transposed, see `ops/groups/layout.py`

Each group has the codes and scales that a layer without groups gives its rows and its matrix. Where the matrices are
cut over ranks, along N or along K, a block that has elements on several ranks has their largest amax.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat, inductor
from fp8compile.formats import pack, unpack
from fp8compile.ops.collectives import all_gather, all_reduce_amax
from fp8compile.ops.gemms.grouped.kernel import GroupedOperand
from fp8compile.ops.groups.group_amax import group_amax
from fp8compile.ops.groups.group_cast import group_cast
from fp8compile.ops.groups.group_outer_amaxes import is_two_level_pair
from fp8compile.ops.groups.group_quantize import group_quantize
from fp8compile.ops.groups.group_quantize_both import group_quantize_both, is_group_pair
from fp8compile.ops.groups.group_quantize_rows import group_quantize_rows, is_row_pair
from fp8compile.ops.groups.group_quantize_two_levels import quantize_groups_in_two_levels
from fp8compile.ops.groups.group_two_levels import group_two_levels
from fp8compile.ops.groups.grouped_mm import grouped_mm
from fp8compile.ops.groups.scaled_grouped_mm import multiply_groups
from fp8compile.ops.inductor_hints import after
from fp8compile.ops.layer.fsdp_gather import gathered
from fp8compile.ops.layer.local_shards import LocalShard
from fp8compile.ops.layer.operands import STEPS, Operands, Phase
from fp8compile.ops.layer.packing import are_same_codes, packed_dim, with_a_code_a_byte
from fp8compile.ops.layer.quantize_shard import quantize_shard
from fp8compile.ops.layer.rows import Rows
from fp8compile.ops.layer.rows_of_groups import quantize_rows_of_groups
from fp8compile.ops.layer.shards import DimSharding
from fp8compile.ops.layer.stacks import cast_stack, in_whole_blocks, whole_amax_of_stack
from fp8compile.ops.layer.stacks_two_levels import quantize_stack_in_two_levels, turned_stack
from fp8compile.ops.quantize_both import is_pair, quantize_both
from fp8compile.quantizers import GEMMS, Gemm, Quantizer, Recipe, TwoLevelScaling
from fp8compile.target import target_of

__all__ = ["GroupedOperands", "check_cut_of_groups", "check_recipe_of_groups"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS
ALONG_TOKENS = {OUTPUT.a: GRAD_WEIGHT.b, GRAD_INPUT.a: GRAD_WEIGHT.a}  # the same tensor's slot of the other product
INPUTS = (OUTPUT.a, GRAD_WEIGHT.b)  # slots of the layer's input, whose features are K
ALONG_ROWS = {along_tokens: rows for rows, along_tokens in ALONG_TOKENS.items()}

_both_directions = inductor.once_a_graph(group_quantize_both)
_rows_and_amaxes = inductor.once_a_graph(group_quantize_rows)


def _check_slot(slot: str, quantizer: Quantizer, allowed: bool, blocks: str) -> None:
    if not allowed:
        raise ValueError(
            f"grouped_linear: {slot} has block {quantizer.block}, and groups of tokens begin anywhere: it is {blocks}."
        )


def check_recipe_of_groups(recipe: Recipe) -> None:
    """Raise a ValueError if a recipe can't quantize groups of tokens each for itself."""
    if _compat.is_stand_in(recipe):
        return  # PyTorch 2.11 traces no method of a recipe
    if recipe.history():
        raise ValueError(
            "grouped_linear: the recipe has delayed scaling, which remembers one amax a tensor: groups would share a "
            "scale, and one without tokens has no amax. Take a recipe with current scaling."
        )
    if recipe.dequantized_gradients:
        raise ValueError(
            "grouped_linear: the recipe has dequantized_gradients, and gradients of groups in high precision multiply "
            "x and the weights themselves. Leave it out, as fp8compile.recipes.nvfp4(backward='bf16') does."
        )
    for gemm in GEMMS:
        for slot, quantizer in zip((gemm.a, gemm.b), recipe.quantizers(gemm) or (), strict=False):
            _check_quantizer_of_groups(gemm, slot, quantizer)
    # of two levels a ready recipe has it: those codes are made in each pass too, to the same bits
    if recipe.keep_weight_codes and not recipe.weight.has_outer_scale():
        raise ValueError(
            "grouped_linear: the recipe has keep_weight_codes, and codes of grouped weights are made in each pass. "
            "Leave it out."
        )


def _check_quantizer_of_groups(gemm: Gemm, slot: str, quantizer: Quantizer) -> None:
    if quantizer.unpacked() is None:
        raise ValueError(
            f"grouped_linear: {slot} packs codes of several values in a byte, by {quantizer!r}, and groups begin "
            "anywhere. Let its unpacked() return a quantizer of the same codes, one a byte."
        )
    # of two levels a group is quantized as if it were alone, noise and all
    if getattr(quantizer, "rounding", "nearest") != "nearest" and not quantizer.has_outer_scale():
        raise ValueError(
            f"grouped_linear: {slot} rounds stochastically, by noise of an element's place, which "
            "depends on other groups. Take rounding='nearest'."
        )
    rows, columns = quantizer.block
    if gemm is GRAD_WEIGHT:
        is_allowed = (columns == 1 and rows != 1) or quantizer.block == (-1, -1)
        _check_slot(slot, quantizer, is_allowed, "(-1, -1), (-1, 1) or (n, 1)")
    elif slot in (OUTPUT.a, GRAD_INPUT.a):
        is_allowed = rows == 1 or quantizer.block == (-1, -1)
        _check_slot(slot, quantizer, is_allowed, "(-1, -1), (1, -1) or (1, n)")


def check_cut_of_groups(recipe: Recipe, cut: DimSharding | None) -> None:
    """Raise a ValueError if ranks' parts of the matrices end within blocks that do not reach over all of them."""
    if cut is None or _compat.is_stand_in(recipe):
        return
    if any(quantizer.has_outer_scale() for gemm in GEMMS for quantizer in recipe.quantizers(gemm) or ()):
        raise ValueError(
            "grouped_linear: ranks share each expert's matrix, and the recipe has two levels of scales, whose outer "
            "one would be of several ranks. Spread whole experts over ranks (expert parallel), or take a recipe with "
            "one level, such as fp8compile.recipes.mxfp8()."
        )
    starts = [sum(cut.sizes[:rank]) for rank in range(len(cut.sizes))]
    for gemm in GEMMS:
        for slot, quantizer in zip((gemm.a, gemm.b), recipe.quantizers(gemm) or (), strict=False):
            block = _block_along(cut.dim, gemm, slot, quantizer)
            if block not in (-1, 1) and any(start % block for start in starts):
                name = ("out_features", "in_features")[cut.dim - 1]
                raise ValueError(
                    f"grouped_linear: {slot} has blocks of {block} along {name}, which ranks share as {cut.sizes}: a "
                    f"part ends within a block. Give each rank a multiple of {block}."
                )


def _block_along(dim: int, gemm: Gemm, slot: str, quantizer: Quantizer) -> int:
    """How many elements share a scale along N (1) or K (2) of the stack; 1 of an operand that has no such dim."""
    if slot in (OUTPUT.b, GRAD_INPUT.b):
        return quantizer.block[dim - 1]
    if dim != (2 if slot in INPUTS else 1):
        return 1
    return quantizer.block[1]  # rows of tokens, or tokens in columns: features are columns of both


@dataclass(frozen=True)
class GroupedOperands:
    """What quantizes and multiplies the operands of one product of a grouped layer.

    Attributes:
        recipe: Quantizers by slot, each over one group's matrix; of one level they lay down a code a byte, for groups
            begin anywhere.
        offsets: Ends of the groups among the rows, (E,) int32.
        phase: Who takes the steps, see `fp8compile.ops.layer.operands`.
        weight: The codes of the matrices, if they are quantized already.
        weight_in_turns: Whether their memory has other codes in the backward: each pass then reads them itself.
        rows: Which matrices each rank of FSDP has, whose codes are gathered before the product; None if all.
        cut: How ranks share each matrix: N (dim 1 of the stack) or K (dim 2); None if each rank has whole ones.
    """

    recipe: Recipe
    offsets: Tensor
    phase: Phase = Phase.EAGER
    weight: GroupedOperand | None = None
    weight_in_turns: bool = False
    rows: Rows | None = None
    cut: DimSharding | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", with_a_code_a_byte(self.recipe))

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """y_RN = x_RK @ w_eNK^T, zeros behind the last group."""
        if self.recipe.quantizers(OUTPUT) is None:
            return grouped_mm(x, self._in_high_precision(weight), self.offsets, self.recipe.gemm_config(OUTPUT))
        codes = Operands(self.recipe, self.phase).laid_out(self._rows(x, OUTPUT), OUTPUT.a)
        product = self._multiply(codes, self._matrices(weight, OUTPUT), x, OUTPUT)
        if self.weight_in_turns:
            inductor.never_recompute(product)
        return product

    def grad_input(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """dx_RK = dy_RN @ w_eNK, zeros behind the last group."""
        if self.recipe.quantizers(GRAD_INPUT) is None:
            turned = self._in_high_precision(weight, in_backward=True).transpose(-2, -1)
            return grouped_mm(grad_output, turned, self.offsets, self.recipe.gemm_config(GRAD_INPUT))
        matrices = self._matrices(weight, GRAD_INPUT)
        turned = GroupedOperand(
            codes=matrices.codes.transpose(-2, -1),
            scale=matrices.scale.transpose(-2, -1),
            quantizer=matrices.quantizer.transposed(),
            outer_scale=matrices.outer_scale,
        )
        with inductor.left_in_backward() if self.weight_in_turns else nullcontext():
            return self._multiply(self._rows(grad_output, GRAD_INPUT), turned, grad_output, GRAD_INPUT)

    def grad_weight(self, grad_output: Tensor, x: Tensor) -> Tensor:
        """dw_eNK = dy_RN^T @ x_RK over the rows of each group; zeros for a group without."""
        if self.recipe.quantizers(GRAD_WEIGHT) is None:
            return grouped_mm(grad_output, x, self.offsets, self.recipe.gemm_config(GRAD_WEIGHT))
        left, right = self._tokens(grad_output, GRAD_WEIGHT.a), self._tokens(x, GRAD_WEIGHT.b)
        return self._multiply(left, right, grad_output, GRAD_WEIGHT)

    def _multiply(self, a: GroupedOperand, b: GroupedOperand, like: Tensor, gemm: Gemm) -> Tensor:
        return multiply_groups(a, b, self.offsets, like.dtype, self.recipe.gemm_config(gemm))

    def _is_cut(self, slot: str) -> bool:
        """Whether ranks share the features of the rows that a slot quantizes: K of inputs, N of gradients."""
        return self.cut is not None and self.cut.dim == (2 if slot in INPUTS else 1)

    def _of_all_ranks(self, amaxes: Tensor, *, spans: bool) -> Tensor:
        """Amaxes of blocks that have elements on several ranks."""
        return all_reduce_amax(amaxes, self.cut.group) if spans else amaxes

    def _reads_once(self, x: Tensor) -> bool:
        """Whether kernels that read a tensor once for two purposes may be called: in compiled code for a GPU.

        Both products ask for the same call, of which a graph has one. The forward makes codes of x along tokens, and
        the backward keeps them, a byte an element, in place of x.
        """
        is_compiled = self.phase in (Phase.FORWARD, Phase.BACKWARD)
        return is_compiled and self.cut is None and target_of(x.device).type == "cuda"

    def _rows(self, x: Tensor, gemm: Gemm) -> GroupedOperand:
        quantizer, along_tokens = getattr(self.recipe, gemm.a), getattr(self.recipe, ALONG_TOKENS[gemm.a])
        steps = STEPS[self.phase]
        if quantizer.has_outer_scale():
            return self._in_two_levels(x, gemm.a)
        if self._reads_once(x) and is_group_pair(quantizer, along_tokens):
            codes, scale, _, _ = _both_directions(x, self.offsets, quantizer, along_tokens)
        elif self._reads_once(x) and is_row_pair(quantizer, along_tokens, x.shape[1]):
            codes, scale, _ = _rows_and_amaxes(x, self.offsets, quantizer, along_tokens)
        elif quantizer.block[0] == 1:
            cuts = (replace(self.cut, dim=1),) if self._is_cut(gemm.a) else ()
            found = quantize_shard(LocalShard(x, cuts), quantizer, steps)
            codes, scale = found.local, found.scale
        else:
            of_all_ranks = partial(self._of_all_ranks, spans=self._is_cut(gemm.a))
            codes, scale = quantize_rows_of_groups(x, self.offsets, quantizer, steps, of_all_ranks)
        return GroupedOperand(codes=codes, scale=scale, quantizer=quantizer)

    def _tokens(self, x: Tensor, slot: str) -> GroupedOperand:
        quantizer, of_rows = getattr(self.recipe, slot), getattr(self.recipe, ALONG_ROWS[slot])
        if quantizer.has_outer_scale():
            return self._in_two_levels(x, slot)
        if self._reads_once(x) and is_group_pair(of_rows, quantizer):
            _, _, codes, scale = _both_directions(x, self.offsets, of_rows, quantizer)
        elif quantizer.block[0] != -1:
            codes, scale = group_quantize(x, self.offsets, quantizer)
        else:
            if self._reads_once(x) and is_row_pair(of_rows, quantizer, x.shape[1]):
                _, _, amaxes = _rows_and_amaxes(x, self.offsets, of_rows, quantizer)
            else:
                spans = self._is_cut(slot) and quantizer.block[1] == -1
                amaxes = self._of_all_ranks(group_amax(x, self.offsets, quantizer), spans=spans)
            multiplier, scale = STEPS[self.phase].scale(amaxes, quantizer)
            codes = group_cast(x, self.offsets, multiplier, quantizer)
        return GroupedOperand(codes=codes, scale=scale, quantizer=quantizer)

    def _in_two_levels(self, x: Tensor, slot: str) -> GroupedOperand:
        quantizer, along_tokens = getattr(self.recipe, slot), slot in ALONG_ROWS
        if not _is_four_bits_on_gpu(x, quantizer):
            return _one_a_byte(x, self.offsets, quantizer, along_tokens=along_tokens)
        pair = (ALONG_ROWS[slot], slot) if along_tokens else (slot, ALONG_TOKENS[slot])
        rows, columns = (getattr(self.recipe, each) for each in pair)
        how = quantizer, quantizer, "tokens" if along_tokens else "rows"
        if self._reads_once(x) and is_two_level_pair(rows, columns):
            how = rows, columns, "both"
        found = quantize_groups_in_two_levels(x, self.offsets, *how)
        codes, scale, outer = found[3:] if along_tokens else found[:3]
        packed = replace(quantizer, packed="columns" if along_tokens else "rows")
        return GroupedOperand(codes=codes, scale=scale, quantizer=packed, outer_scale=outer)

    def _in_high_precision(self, weight: Tensor, *, in_backward: bool = False) -> Tensor:
        return weight if self.rows is None else gathered(weight, self.rows, in_backward=in_backward)

    def _matrices(self, weight: Tensor, gemm: Gemm) -> GroupedOperand:
        if self.weight is not None:
            return self.weight
        found = self._quantized(weight, gemm)
        if self.rows is None or len(self.rows.sizes) == 1:
            return found
        # Scales of no experts are constants. Compilers would merge the messages of two layers, on that rank alone.
        scale = found.scale if self.phase is Phase.EAGER else after(found.scale, found.codes)
        with inductor.recomputed(in_backward=True) if gemm is GRAD_INPUT else inductor.left_in_forward():
            where = 0, self.rows.sizes, self.rows.group
            outer = None if found.outer_scale is None else all_gather(found.outer_scale, *where)
            codes = _gathered_codes(found, *where)
            return replace(found, codes=codes, scale=all_gather(scale, *where), outer_scale=outer)

    def _quantized(self, weight: Tensor, gemm: Gemm) -> GroupedOperand:
        quantizer = getattr(self.recipe, gemm.b)
        if self.cut is not None and quantizer.block[self.cut.dim - 1] == -1:
            return self._spanning(weight, quantizer)
        pair = [each for each in (self.recipe.weight, self.recipe.weight_for_grad_input) if each is not None]
        stack = in_whole_blocks(weight, lcm(*(each.block[0] for each in pair if each.block[0] > 0)))
        outer = None
        if _is_four_bits_on_gpu(stack, quantizer):
            return self._in_four_bits(stack, weight.shape[1], gemm)
        if quantizer.has_outer_scale():
            found = _one_a_byte(stack.flatten(0, 1), _ends_of_matrices(stack), quantizer)
            codes, scale, quantizer, outer = found.codes, found.scale, found.quantizer, found.outer_scale
        elif any(each.block[0] == -1 for each in pair):
            codes, scale = self._whole_columns(stack, gemm)
        elif self._quantizes_stacks_once(stack):
            codes, scale, *turned = quantize_both(stack, self.recipe.weight, self.recipe.weight_for_grad_input)
            codes, scale = (codes, scale) if gemm is OUTPUT else turned
        else:
            recipe = replace(self.recipe, **{GRAD_WEIGHT.a: None, GRAD_WEIGHT.b: None})
            found = Operands(recipe, self.phase).of(LocalShard(stack.flatten(0, 1)), gemm.b)
            codes, scale = found.local, found.scale
        blocks, all_blocks = (quantizer.scale_shape(each.shape[1:]) for each in (weight, stack))
        return GroupedOperand(
            codes=codes.view(stack.shape)[:, : weight.shape[1]],
            scale=scale.view(stack.shape[0], *all_blocks)[:, : blocks[0]],
            quantizer=quantizer,
            outer_scale=outer,
        )

    def _in_four_bits(self, stack: Tensor, rows: int, gemm: Gemm) -> GroupedOperand:
        """Matrices of which so many rows are theirs, two codes a byte along the sum of the product.

        With the same codes for both products the forward makes both layouts, and the backward reads no weight.
        """
        first, again = self.recipe.weight, self.recipe.weight_for_grad_input
        keeps = self.rows is None and self.phase in (Phase.FORWARD, Phase.BACKWARD) and are_same_codes(first, again)
        if keeps and stack.shape[2] % 2 == 0:
            found = quantize_stack_in_two_levels(stack, replace(first, packed="rows"), STEPS[Phase.FORWARD])
            turned = turned_stack(found.codes).transpose(-2, -1)
            if gemm is GRAD_INPUT:
                return replace(found, codes=turned, quantizer=replace(first, packed="columns"))
        else:
            packed = replace(getattr(self.recipe, gemm.b), packed="columns" if gemm is GRAD_INPUT else "rows")
            found = quantize_stack_in_two_levels(stack, packed, STEPS[self.phase])
        return replace(found, codes=found.codes[:, :rows]) if gemm is OUTPUT else found

    def _quantizes_stacks_once(self, stack: Tensor) -> bool:
        """Whether the forward makes both products' codes of matrices, as their GEMMs read them, and keeps those."""
        is_pair_of_blocks = is_pair(self.recipe.weight, self.recipe.weight_for_grad_input)
        return is_pair_of_blocks and self.rows is None and self._reads_once(stack) and not inductor.is_fusible(stack)

    def _spanning(self, weight: Tensor, quantizer: Quantizer) -> GroupedOperand:
        """Matrices whose blocks reach over all ranks."""
        part = LocalShard(weight, (self.cut,))
        amaxes = self._of_all_ranks(whole_amax_of_stack(part, quantizer), spans=True)
        multiplier, scale = STEPS[self.phase].scale(amaxes.flatten(0, 1), quantizer)
        codes = cast_stack(part, multiplier.view(amaxes.shape), quantizer)
        return GroupedOperand(codes=codes, scale=scale.view(amaxes.shape), quantizer=quantizer)

    def _whole_columns(self, stack: Tensor, gemm: Gemm) -> tuple[Tensor, Tensor]:
        """Codes and scales of a stack of weights whose blocks may be whole columns, each of its own weight."""
        first, again, rows = self.recipe.weight, self.recipe.weight_for_grad_input, stack.shape[1]
        matrix = stack.flatten(0, 1)
        amaxes = None
        if self._reads_once(matrix) and is_row_pair(first, again, matrix.shape[1]) and not inductor.is_fusible(matrix):
            codes, scale, amaxes = group_quantize_rows(matrix, _ends_of_matrices(stack), first, again)
            if gemm is OUTPUT:
                return codes, scale
        quantizer = getattr(self.recipe, gemm.b)
        block = (rows if quantizer.block[0] == -1 else quantizer.block[0], quantizer.block[1])
        own = replace(quantizer, block=block)
        found = quantize_shard(LocalShard(matrix), own, STEPS[self.phase], local_amax=amaxes)
        return found.local, found.scale


def _ends_of_matrices(stack: Tensor) -> Tensor:
    """Where each matrix of a stack (E, N, K) ends among the rows of all of them."""
    return torch.arange(1, stack.shape[0] + 1, dtype=torch.int32, device=stack.device) * stack.shape[1]


def _is_four_bits_on_gpu(x: Tensor, quantizer: Quantizer) -> bool:
    """Whether codes are made as a GPU's four-bit product reads them."""
    return type(quantizer) is TwoLevelScaling and target_of(x.device).type == "cuda"


def _one_a_byte(x: Tensor, offsets: Tensor, quantizer: Quantizer, *, along_tokens: bool = False) -> GroupedOperand:
    quantizer = quantizer.unpacked()
    codes, scale, outer = group_two_levels(x, offsets, quantizer, along_tokens)
    return GroupedOperand(codes=codes, scale=scale, quantizer=quantizer, outer_scale=outer)


def _gathered_codes(found: GroupedOperand, *where: Any) -> Tensor:
    """Codes of all ranks' matrices; those of four bits travel two to a byte."""
    last = found.codes.ndim - 1
    is_packed = packed_dim(found.quantizer) is not None
    if found.quantizer.code_bits() == 4 and not is_packed and found.codes.shape[last] % 2 == 0:
        return unpack(all_gather(pack(found.codes, last), *where), last)
    return all_gather(found.codes, *where)
