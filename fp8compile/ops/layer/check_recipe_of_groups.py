"""Check that a recipe can quantize each group of tokens by itself, as `grouped_linear` and other layers need."""

from __future__ import annotations

from functools import lru_cache

from fp8compile.quantizers import GEMMS, Gemm, Quantizer, Recipe

__all__ = ["check_cut_of_groups", "check_recipe_of_groups"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS


def _check_role(role: str, quantizer: Quantizer, allowed: bool, blocks: str) -> None:
    if not allowed:
        raise ValueError(
            f"grouped_linear: {role} has block {quantizer.block}, but groups of tokens can start at any row, so "
            f"it must be {blocks}."
        )


@lru_cache(maxsize=256)  # every call of an eager layer checks its recipe
def check_recipe_of_groups(recipe: Recipe) -> None:
    """Raise a ValueError if the recipe can't quantize each group of tokens independently of other groups."""
    if recipe.history():
        raise ValueError(
            "grouped_linear: delayed scaling is not supported, because it keeps one amax per tensor: groups would "
            "share a scale, and a group without tokens has no amax. Use a recipe with current scaling."
        )
    for gemm in GEMMS:
        for role in (gemm.a, gemm.b):
            if (quantizer := getattr(recipe, role)) is not None:
                _check_quantizer_of_groups(gemm, role, quantizer)


def _check_quantizer_of_groups(gemm: Gemm, role: str, quantizer: Quantizer) -> None:
    if quantizer.unpacked() is None:
        raise ValueError(
            f"grouped_linear: {role} stores several values per byte ({quantizer!r}), but groups can start at any "
            "row. Let its unpacked() return a quantizer that stores the same values one per byte."
        )
    # with two levels of scales, noise depends on an element's place in its own group
    if getattr(quantizer, "rounding", "nearest") != "nearest" and not quantizer.has_outer_scale():
        raise ValueError(
            f"grouped_linear: {role} uses stochastic rounding, whose noise depends on the position of an element "
            "and so on other groups. Use rounding='nearest'."
        )
    rows, columns = quantizer.block
    if gemm is GRAD_WEIGHT:
        is_allowed = (columns == 1 and rows != 1) or quantizer.block == (-1, -1)
        _check_role(role, quantizer, is_allowed, "(-1, -1), (-1, 1) or (n, 1)")
    elif role in (OUTPUT.a, GRAD_INPUT.a):
        is_allowed = rows == 1 or quantizer.block == (-1, -1)
        _check_role(role, quantizer, is_allowed, "(-1, -1), (1, -1) or (1, n)")


def check_cut_of_groups(recipe: Recipe, ranks: int) -> None:
    """Raise a ValueError if the recipe has outer scales and several ranks share each expert's matrix."""
    if ranks == 1:
        return
    given = [getattr(recipe, role) for gemm in GEMMS for role in (gemm.a, gemm.b)]
    if any(quantizer is not None and quantizer.has_outer_scale() for quantizer in given):
        raise ValueError(
            "grouped_linear: the matrix of each expert is sharded over ranks, but the recipe has two levels of "
            "scales, whose global scale would span several ranks. Use expert parallelism, or a recipe with one "
            "level of scales, such as fp8compile.recipes.mxfp8()."
        )
