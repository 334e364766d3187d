"""The operands of a grouped layer's products: codes and scales of rows, of each group's matrix, and along tokens.

    rows       x_RK, dy_RN     blocks within a row; tensorwise, a scale for the rows of each group
    matrices   w_eNK           a scale grid for each group's matrix
    tokens     x_RK, dy_RN     blocks along the tokens of each group; codes are transposed, see `ops/groups/layout.py`

Each group has the codes and scales that a layer without groups gives its rows and its matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from torch import Tensor
from torch.nn.functional import pad

from fp8compile.ops.gemms.grouped.kernel import GroupedOperand
from fp8compile.ops.groups.group_amax import group_amax
from fp8compile.ops.groups.group_cast import group_cast
from fp8compile.ops.groups.group_quantize import group_quantize
from fp8compile.ops.groups.group_quantize_both import group_quantize_both, is_group_pair
from fp8compile.ops.groups.grouped_mm import grouped_mm
from fp8compile.ops.groups.layout import group_of_rows
from fp8compile.ops.groups.scaled_grouped_mm import multiply_groups
from fp8compile.ops.layer.local_shards import LocalShard
from fp8compile.ops.layer.operands import STEPS, Operands, Phase
from fp8compile.ops.layer.quantize_shard import quantize_shard
from fp8compile.quantizers import GEMMS, Gemm, Quantizer, Recipe
from fp8compile.target import target_of

__all__ = ["GroupedOperands", "check_recipe_of_groups"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS


def _check_slot(slot: str, quantizer: Quantizer, allowed: bool, blocks: str) -> None:
    if not allowed:
        raise ValueError(
            f"grouped_linear: {slot} has block {quantizer.block}, and groups of tokens begin anywhere: it is {blocks}."
        )


def check_recipe_of_groups(recipe: Recipe) -> None:
    """Raise a ValueError if a recipe can't quantize groups of tokens each for itself."""
    if recipe.history():
        raise ValueError(
            "grouped_linear: the recipe has delayed scaling, which remembers one amax a tensor: groups would share a "
            "scale, and one without tokens has no amax. Take a recipe with current scaling."
        )
    if recipe.keep_weight_codes:
        raise ValueError(
            "grouped_linear: the recipe has keep_weight_codes, and codes of grouped weights are made in each pass. "
            "Leave it out."
        )
    for gemm in GEMMS:
        if (pair := recipe.quantizers(gemm)) is None:
            continue
        for slot, quantizer in zip((gemm.a, gemm.b), pair, strict=True):
            if getattr(quantizer, "rounding", "nearest") != "nearest":
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


def _of_each_matrix(weight: Tensor, multiple: int) -> Tensor:
    """(E, N, K) as a matrix (E * N', K), N' the next multiple of ``multiple``, so that no block has rows of two."""
    missing = -weight.shape[1] % multiple
    weight = pad(weight, (0, 0, 0, missing)) if missing else weight
    return weight.reshape(-1, weight.shape[2])


@dataclass(frozen=True)
class GroupedOperands:
    """What quantizes and multiplies the operands of one product of a grouped layer.

    Attributes:
        recipe: Quantizers by slot, each over one group's matrix.
        offsets: Ends of the groups among the rows, (E,) int32.
        phase: Who takes the steps, see `fp8compile.ops.layer.operands`.
    """

    recipe: Recipe
    offsets: Tensor
    phase: Phase = Phase.EAGER

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """y_RN = x_RK @ w_eNK^T, zeros behind the last group."""
        if self.recipe.quantizers(OUTPUT) is None:
            return grouped_mm(x, weight, self.offsets, self.recipe.gemm_config(OUTPUT))
        codes = Operands(self.recipe, self.phase).laid_out(self._rows(x, OUTPUT), OUTPUT.a)
        return self._multiply(codes, self._matrices(weight, OUTPUT), x, OUTPUT)

    def grad_input(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """dx_RK = dy_RN @ w_eNK, zeros behind the last group."""
        if self.recipe.quantizers(GRAD_INPUT) is None:
            turned = weight.transpose(-2, -1)
            return grouped_mm(grad_output, turned, self.offsets, self.recipe.gemm_config(GRAD_INPUT))
        matrices = self._matrices(weight, GRAD_INPUT)
        turned = GroupedOperand(
            codes=matrices.codes.transpose(-2, -1),
            scale=matrices.scale.transpose(-2, -1),
            quantizer=matrices.quantizer.transposed(),
        )
        return self._multiply(self._rows(grad_output, GRAD_INPUT), turned, grad_output, GRAD_INPUT)

    def grad_weight(self, grad_output: Tensor, x: Tensor) -> Tensor:
        """dw_eNK = dy_RN^T @ x_RK over the rows of each group; zeros for a group without."""
        if self.recipe.quantizers(GRAD_WEIGHT) is None:
            return grouped_mm(grad_output, x, self.offsets, self.recipe.gemm_config(GRAD_WEIGHT))
        left, right = self._tokens(grad_output, GRAD_WEIGHT.a), self._tokens(x, GRAD_WEIGHT.b)
        return self._multiply(left, right, grad_output, GRAD_WEIGHT)

    def _multiply(self, a: GroupedOperand, b: GroupedOperand, like: Tensor, gemm: Gemm) -> Tensor:
        return multiply_groups(a, b, self.offsets, like.dtype, self.recipe.gemm_config(gemm))

    def _rows(self, x: Tensor, gemm: Gemm) -> GroupedOperand:
        quantizer, steps = getattr(self.recipe, gemm.a), STEPS[self.phase]
        if (along_tokens := self._read_once(x, gemm)) is not None:
            codes, scale, _, _ = group_quantize_both(x, self.offsets, quantizer, along_tokens)
            return GroupedOperand(codes=codes, scale=scale, quantizer=quantizer)
        if quantizer.block[0] == 1:
            found = quantize_shard(LocalShard(x), quantizer, steps)
            return GroupedOperand(codes=found.local, scale=found.scale, quantizer=quantizer)
        amaxes = group_amax(x, self.offsets, quantizer)
        multiplier, scale = steps.scale(amaxes, quantizer)
        group = group_of_rows(self.offsets, x.shape[0]).clamp(max=amaxes.shape[0] - 1)
        codes = steps.cast(x, multiplier[group], replace(quantizer, block=(1, -1)))
        return GroupedOperand(codes=codes, scale=scale[group], quantizer=quantizer)

    def _matrices(self, weight: Tensor, gemm: Gemm) -> GroupedOperand:
        quantizer, (groups, n, _) = getattr(self.recipe, gemm.b), weight.shape
        pair = [each for each in (self.recipe.weight, self.recipe.weight_for_grad_input) if each is not None]
        has_whole_columns = any(each.block[0] == -1 for each in pair)
        matrix = _of_each_matrix(weight, lcm(*(each.block[0] for each in pair if each.block[0] > 0)))
        if has_whole_columns:
            rows = matrix.shape[0] // groups
            own = replace(quantizer, block=(rows, quantizer.block[1])) if quantizer.block[0] == -1 else quantizer
            found = quantize_shard(LocalShard(matrix), own, STEPS[self.phase])
        else:
            recipe = replace(self.recipe, **{GRAD_WEIGHT.a: None, GRAD_WEIGHT.b: None})
            found = Operands(recipe, self.phase).of(LocalShard(matrix), gemm.b)
        blocks = quantizer.scale_shape(weight.shape[1:])[0]
        return GroupedOperand(
            codes=found.local.view(groups, -1, matrix.shape[1])[:, :n],
            scale=found.scale.view(groups, -1, found.scale.shape[1])[:, :blocks],
            quantizer=quantizer,
        )

    def _read_once(self, x: Tensor, gemm: Gemm) -> Quantizer | None:
        """The quantizer along tokens, if one kernel makes its codes and those of rows: one call serves both products.

        The forward makes both of x, and the backward keeps codes of a byte in place of x.
        """
        is_compiled = self.phase in (Phase.FORWARD, Phase.BACKWARD) and target_of(x.device).type == "cuda"
        along_tokens = self.recipe.input_for_grad_weight if gemm is OUTPUT else self.recipe.grad_output_for_grad_weight
        pair = getattr(self.recipe, gemm.a), along_tokens
        return along_tokens if is_compiled and is_group_pair(*pair) else None

    def _tokens(self, x: Tensor, slot: str) -> GroupedOperand:
        quantizer = getattr(self.recipe, slot)
        gemm = GRAD_INPUT if slot == GRAD_WEIGHT.a else OUTPUT
        if self._read_once(x, gemm) is not None:
            _, _, codes, scale = group_quantize_both(x, self.offsets, getattr(self.recipe, gemm.a), quantizer)
            return GroupedOperand(codes=codes, scale=scale, quantizer=quantizer)
        if quantizer.block[0] != -1:
            codes, scale = group_quantize(x, self.offsets, quantizer)
            return GroupedOperand(codes=codes, scale=scale, quantizer=quantizer)
        multiplier, scale = STEPS[self.phase].scale(group_amax(x, self.offsets, quantizer), quantizer)
        codes = group_cast(x, self.offsets, multiplier, quantizer)
        return GroupedOperand(codes=codes, scale=scale, quantizer=quantizer)
