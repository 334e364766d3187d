"""Built-in recipes. Each function returns a recipe, which its keyword arguments configure.

The recipes differ in how they scale the operands of a linear layer's three GEMMs:

    tensorwise             one scale per tensor: the fastest GEMM, but one outlier reduces the precision of the tensor
    rowwise                one scale per row or column, which limits the effect of outliers; casts each tensor twice,
                           with row scales and with column scales
    rowwise_bf16_wgrad     rowwise with grad_weight in high precision: the safest, with two of three GEMMs in FP8
    blockwise              one scale per 128 values along the contraction dim, or per 128 x 128 block of a weight
    blockwise_bf16_wgrad   blockwise with grad_weight in high precision, for experts
    mxfp8                  one power-of-two scale per 32 values along the contraction dim, applied by Blackwell's
                           tensor cores
    nvfp4                  four-bit values with one e4m3 scale per 16 values and one scale per tensor: half the bytes
                           of FP8
    delayed                tensorwise, with scales from the amaxes of earlier steps: casts in one pass, but has a state
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

from fp8compile._compat import constant_when_traced
from fp8compile.quantizers import (
    CALL,
    PASS,
    CurrentScaling,
    DelayedScaling,
    Quantizer,
    Recipe,
    TwoLevelScaling,
    accept_lifetime_flags,
    entry_points,
)
from fp8compile.quantizers.hadamard import SIGNS

__all__ = [
    "Recipe",
    "blockwise",
    "blockwise_bf16_wgrad",
    "by_name",
    "delayed",
    "describe",
    "mxfp8",
    "names",
    "nvfp4",
    "of_quantizer",
    "rowwise",
    "rowwise_bf16_wgrad",
    "tensorwise",
    "weight_only",
]

TENSOR, ROW, COLUMN = (-1, -1), (1, -1), (-1, 1)
LINE, TILE, PILLAR = (1, 128), (128, 128), (128, 1)
MX_LINE, MX_TILE, MX_PILLAR = (1, 32), (32, 32), (32, 1)
NV_LINE, NV_TILE, NV_PILLAR = (1, 16), (16, 16), (16, 1)

Block = tuple[int, int]


def _of_blocks(
    blocks: tuple[Block, Block, Block, Block | None],
    format: str,
    grad_format: str,
    grad_rounding: str,
    scale: str,
    eps: float,
    **switches: Any,
) -> Recipe:
    """Make a recipe with current scaling for all operands from ``blocks``: the shapes of values that share a scale.

    GEMMs that sum over an operand's columns have the first block for inputs and output gradients, and the second for
    weights; GEMMs that sum over rows have the fourth and the third. If the fourth is None, grad_weight is in high
    precision. ``switches`` are fields of the recipe; the other arguments are those of `rowwise`.
    """
    x, weight, weight_turned, x_turned = blocks
    value: dict[str, Any] = {"format": format, "scale": scale, "eps": eps}
    gradient: dict[str, Any] = {**value, "format": grad_format, "rounding": grad_rounding}
    return Recipe(
        input=CurrentScaling(block=x, **value),
        weight=CurrentScaling(block=weight, **value),
        grad_output=CurrentScaling(block=x, **gradient),
        weight_for_grad_input=CurrentScaling(block=weight_turned, **value),
        grad_output_for_grad_weight=None if x_turned is None else CurrentScaling(block=x_turned, **gradient),
        input_for_grad_weight=None if x_turned is None else CurrentScaling(block=x_turned, **value),
        **switches,
    )


@accept_lifetime_flags
def tensorwise(
    *,
    format: str = "e4m3",
    grad_format: str = "e5m2",
    grad_rounding: str = "nearest",
    scale: str = "fp32",
    eps: float = 0.0,
    by_mx: bool = False,
    weight_lifetime: str = CALL,
) -> Recipe:
    """Recipe with one scale per tensor; all three GEMMs run in FP8.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients; e5m2 has a wider range than e4m3.
        grad_rounding: Rounding mode for quantizing gradients, ``"nearest"`` or ``"stochastic"``.
        scale: Scale rule; see ``CurrentScaling``.
        eps: Lower bound of the amax; 0 disables it.
        by_mx: Whether a GPU of compute capability 12.0 uses its MX GEMM; see ``Recipe``.
        weight_lifetime: How long quantized weights live; see ``Recipe``.

    Source: Micikevicius et al. 2022, arXiv:2209.05433: e4m3 forward, e5m2 for gradients.
    """
    blocks = (TENSOR, TENSOR, TENSOR, TENSOR)
    return _of_blocks(
        blocks, format, grad_format, grad_rounding, scale, eps, by_mx=by_mx, weight_lifetime=weight_lifetime
    )


@accept_lifetime_flags
def rowwise(
    *,
    format: str = "e4m3",
    grad_format: str = "e4m3",
    grad_rounding: str = "nearest",
    scale: str = "fp32",
    eps: float = 0.0,
    by_mx: bool = False,
    weight_lifetime: str = CALL,
) -> Recipe:
    """Recipe with one scale per row of a GEMM's left operand and per column of its right operand.

    All three GEMMs run in FP8.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients; with one scale per row, e4m3 has enough range.
        grad_rounding: Rounding mode for quantizing gradients, ``"nearest"`` or ``"stochastic"``.
        scale: Scale rule; see ``CurrentScaling``.
        eps: Lower bound of the amax; 0 disables it.
        by_mx: Whether a GPU of compute capability 12.0 uses its MX GEMM; see ``Recipe``.
        weight_lifetime: How long quantized weights live; see ``Recipe``.
    """
    blocks = (ROW, ROW, COLUMN, COLUMN)
    return _of_blocks(
        blocks, format, grad_format, grad_rounding, scale, eps, by_mx=by_mx, weight_lifetime=weight_lifetime
    )


@accept_lifetime_flags
def rowwise_bf16_wgrad(
    *,
    format: str = "e4m3",
    grad_format: str = "e4m3",
    grad_rounding: str = "nearest",
    scale: str = "fp32",
    eps: float = 0.0,
    weight_lifetime: str = CALL,
) -> Recipe:
    """``rowwise`` for output and grad_input, with grad_weight in the dtype of its operands.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients.
        grad_rounding: Rounding mode for quantizing gradients, ``"nearest"`` or ``"stochastic"``.
        scale: Scale rule; see ``CurrentScaling``.
        eps: Lower bound of the amax; 0 disables it.
        weight_lifetime: How long quantized weights live; see ``Recipe``.
    """
    blocks = (ROW, ROW, COLUMN, None)
    return _of_blocks(blocks, format, grad_format, grad_rounding, scale, eps, weight_lifetime=weight_lifetime)


@accept_lifetime_flags
def blockwise(
    *,
    format: str = "e4m3",
    grad_format: str = "e4m3",
    grad_rounding: str = "nearest",
    scale: str = "fp32",
    eps: float = 0.0,
    weight_lifetime: str = CALL,
) -> Recipe:
    """Recipe with one scale per 128 values of inputs and gradients, and per 128 x 128 block of weights.

    All three GEMMs run in FP8. Blocks extend along the contraction dim of a GEMM: they are 1 x 128 in the input and in
    the output's gradient (rows are tokens), but 128 x 1 for grad_weight, which sums over tokens.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients.
        grad_rounding: Rounding mode for quantizing gradients, ``"nearest"`` or ``"stochastic"``.
        scale: ``"fp32"``, or ``"pow2"`` for powers of two.
        eps: Lower bound of the amax; 0 disables it.
        weight_lifetime: How long quantized weights live; see ``Recipe``.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3, arXiv:2412.19437.
    """
    blocks = (LINE, TILE, TILE, PILLAR)
    return _of_blocks(blocks, format, grad_format, grad_rounding, scale, eps, weight_lifetime=weight_lifetime)


@accept_lifetime_flags
def blockwise_bf16_wgrad(
    *,
    format: str = "e4m3",
    grad_format: str = "e4m3",
    grad_rounding: str = "nearest",
    scale: str = "fp32",
    eps: float = 0.0,
    weight_lifetime: str = CALL,
) -> Recipe:
    """``blockwise`` for output and grad_input, with grad_weight in the dtype of its operands.

    Tensors are never quantized along tokens. For experts, this avoids one cast of each activation and gradient, and
    the grouped GEMM whose FP8 kernels are furthest from the peak of a GPU.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients.
        grad_rounding: Rounding mode for quantizing gradients, ``"nearest"`` or ``"stochastic"``.
        scale: ``"fp32"``, or ``"pow2"`` for powers of two.
        eps: Lower bound of the amax; 0 disables it.
        weight_lifetime: How long quantized weights live; see ``Recipe``.
    """
    blocks = (LINE, TILE, TILE, None)
    return _of_blocks(blocks, format, grad_format, grad_rounding, scale, eps, weight_lifetime=weight_lifetime)


@accept_lifetime_flags
def mxfp8(
    *,
    format: str = "e4m3",
    grad_format: str = "e4m3",
    grad_rounding: str = "nearest",
    scale: str = "e8m0_rceil",
    eps: float = 0.0,
    weight_block: tuple[int, int] = MX_LINE,
    emulate: bool = False,
    weight_lifetime: str = CALL,
) -> Recipe:
    """MXFP8 recipe: one power-of-two scale, stored in a byte, per 32 values along the contraction dim.

    All three GEMMs run in FP8. Forward and backward sum over different dims of a weight, so each needs its own
    quantized copy. With one scale per 32 x 32 block of a weight, both use the same copy, which halves the memory.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients.
        grad_rounding: Rounding mode for quantizing gradients, ``"nearest"`` or ``"stochastic"``.
        scale: ``"e8m0_rceil"`` rounds scales up, so that no value saturates. ``"e8m0_floor"`` is the rule in the
            specification of the format.
        eps: Lower bound of the amax; 0 disables it.
        weight_block: Block of a weight that shares a scale: (1, 32), or (32, 32) to use one quantized copy in all
            GEMMs.
        emulate: Whether a GPU without MX GEMMs multiplies the exact values in float64, slowly, instead of raising an
            error.
        weight_lifetime: How long quantized weights live; see ``Recipe``.

    Raises:
        ValueError: ``scale`` or ``weight_block`` has a value that is not allowed.

    Source: OCP Microscaling Formats 1.0, section 6.3 (floor); Mishra et al. 2025, arXiv:2506.08027 (rceil).
    """
    if scale not in ("e8m0_rceil", "e8m0_floor"):
        raise ValueError(f"mxfp8: `scale` is {scale!r}; it must be 'e8m0_rceil' or 'e8m0_floor'.")
    if weight_block not in (MX_LINE, MX_TILE):
        raise ValueError(f"mxfp8: `weight_block` is {weight_block!r}; it must be (1, 32) or (32, 32).")
    blocks = (MX_LINE, weight_block, weight_block[::-1], MX_PILLAR)
    return _of_blocks(
        blocks, format, grad_format, grad_rounding, scale, eps, emulate=emulate, weight_lifetime=weight_lifetime
    )


@accept_lifetime_flags
def nvfp4(
    *,
    weight_block: tuple[int, int] = NV_TILE,
    grad_rounding: str = "stochastic",
    seed: int = 0,
    hadamard: tuple[int, ...] = SIGNS,
    backward: str = "nvfp4",
    scale: str = "transformer_engine",
    outer: str = "quotient",
    emulate: bool = False,
    weight_lifetime: str | None = None,
) -> Recipe:
    """NVFP4 recipe: 4-bit values, one e4m3 scale per 16 values, and one float32 scale per tensor.

    Blocks of 16 values extend along the contraction dim. Weights have one scale per 16 x 16 block, so that forward and
    backward use the same quantized weight, at half a byte per element. Compiled code keeps it for the backward
    (``weight_lifetime="pass"``), which then does not read the high-precision weight. Both operands of grad_weight are
    Hadamard-transformed along tokens before they are quantized, which spreads outliers over their neighbours. Their
    global scales are computed after the transform. Each expert is quantized independently.

    Args:
        weight_block: (16, 16), or (1, 16) for one scale per 16 values along the contraction dim.
        grad_rounding: Rounding mode for quantizing gradients: ``"stochastic"``, ``"nearest"``, or
            ``"stochastic_hardware"``, which uses the rounding instruction of a B200. It is faster, but uses different
            random bits; see ``fp8compile.TwoLevelScaling``.
        seed: Seed of stochastic rounding.
        hadamard: Sixteen signs of the Hadamard transform of the operands of grad_weight; by default those of
            TransformerEngine. () for no transform.
        backward: ``"nvfp4"`` runs the GEMMs of grad_input and grad_weight in FP4. ``"bf16"`` runs them in the dtype of
            their operands. ``"dequantized"`` is like ``"bf16"``, but uses the dequantized operands of the forward
            instead of x and the weight.
        scale: The rule for both scales, ``"transformer_engine"`` or ``"torchao"``.
        outer: Rule for the global scales of weights. ``"reciprocal"`` makes each equal to 1 / (1 / scale), because
            some servers store the reciprocal. This changes only weights whose largest magnitude is below 3.2e-35, and
            requires ``scale="transformer_engine"``. ``"quotient"`` uses the result of ``scale`` unchanged.
        emulate: Whether a GPU without NVFP4 GEMMs multiplies the exact values in float64, slowly, instead of raising
            an error.
        weight_lifetime: How long quantized weights live; see ``Recipe``. By default for a ``"pass"`` if output and
            grad_input use one quantized weight, else for a ``"call"``.

    Raises:
        ValueError: An argument has a value that is not allowed.

    Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.
    """
    if weight_block not in (NV_TILE, NV_LINE):
        raise ValueError(f"nvfp4: `weight_block` is {weight_block!r}; it must be (16, 16) or (1, 16).")
    if backward not in ("nvfp4", "bf16", "dequantized"):
        raise ValueError(f"nvfp4: `backward` is {backward!r}; it must be 'nvfp4', 'bf16' or 'dequantized'.")
    if outer not in ("quotient", "reciprocal") or (outer == "reciprocal" and scale != "transformer_engine"):
        raise ValueError(
            f"nvfp4: `outer` is {outer!r} with scale {scale!r}; it must be 'quotient', or 'reciprocal' with scale "
            "'transformer_engine'."
        )
    of_weight = "reciprocal" if outer == "reciprocal" else scale
    # constructors, because Dynamo can't trace `replace` if a recipe is made in a compiled function
    line, weight = TwoLevelScaling(scale=scale), TwoLevelScaling(block=weight_block, scale=of_weight)
    pillar: dict[str, Any] = {"block": NV_PILLAR, "packed": "columns", "scale": scale}
    gradient: dict[str, Any] = {"rounding": grad_rounding, "seed": seed}
    gradients = {
        "grad_output": TwoLevelScaling(scale=scale, **gradient),
        "weight_for_grad_input": (
            weight if weight_block == NV_TILE else TwoLevelScaling(**{**pillar, "scale": of_weight})
        ),
        "grad_output_for_grad_weight": TwoLevelScaling(**pillar, **gradient, hadamard=hadamard),
        "input_for_grad_weight": TwoLevelScaling(**pillar, hadamard=hadamard),
    }
    taken: dict[str, Any] = gradients if backward == "nvfp4" else {}
    is_shared = backward == "nvfp4" and weight_block == NV_TILE  # both GEMMs of the weight read it
    return Recipe(
        input=line,
        weight=weight,
        emulate=emulate,
        weight_lifetime=(PASS if is_shared else CALL) if weight_lifetime is None else weight_lifetime,
        dequantized_gradients=backward == "dequantized",
        **taken,
    )


@accept_lifetime_flags
def delayed(
    *,
    format: str = "e4m3",
    grad_format: str = "e5m2",
    history: int = 1024,
    algorithm: str = "max",
    margin: int = 0,
    weight_lifetime: str = PASS,
) -> Recipe:
    """Recipe with one scale per tensor, from the amaxes of earlier steps; all three GEMMs run in FP8.

    Each layer has a state (``fp8compile.DelayedState``), which ``fp8compile.Linear`` stores in buffers.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients; e5m2 has a wider range than e4m3.
        history: Length of the amax history of each operand.
        algorithm: ``"max"`` or ``"most_recent"``; see ``fp8compile.DelayedScaling``.
        margin: Headroom in powers of two between the scaled amax and the largest value of the format.
        weight_lifetime: How long quantized weights live; see ``fp8compile.Recipe``. With ``"pass"``, they are kept
            from the forward to the backward, which takes one byte per element; with ``"call"``, the backward
            requantizes weights. ``"step"`` is not supported.

    Source: see ``fp8compile.DelayedScaling``. The defaults are those of TransformerEngine with the format ``HYBRID``.
    """
    value = DelayedScaling(format=format, history=history, algorithm=algorithm, margin=margin)
    gradient = DelayedScaling(format=grad_format, history=history, algorithm=algorithm, margin=margin)
    return Recipe(
        input=value,
        weight=value,
        grad_output=gradient,
        weight_for_grad_input=value,
        grad_output_for_grad_weight=gradient,
        input_for_grad_weight=value,
        weight_lifetime=weight_lifetime,
    )


def of_quantizer(quantizer: Quantizer) -> Recipe:
    """Create a recipe from one quantizer, transposed where a GEMM sums over the rows of an operand.

    Args:
        quantizer: Quantizer for the operands of the output GEMM: the input (tokens, K) and the weight (N, K).

    Raises:
        TypeError: The argument is not a quantizer.
        ValueError: No GEMM supports these blocks (the message lists the supported ones), or the format is e5m2.
    """
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"fp8compile.library.recipe: `quantizer` is {quantizer!r}; it must be a quantizer, such as "
            "fp8compile.CurrentScaling()."
        )
    turned = quantizer.transposed()
    return Recipe(
        input=quantizer,
        weight=quantizer,
        grad_output=quantizer,
        weight_for_grad_input=turned,
        grad_output_for_grad_weight=turned,
        input_for_grad_weight=turned,
    )


def weight_only(quantizer: Quantizer | None = None) -> Recipe:
    """Recipe that quantizes only the weight, to train for serving with four-bit or eight-bit weights.

    The output is x times the dequantized weight in high precision (W4A16, W8A16). Gradients are ``dy @
    dequantized_weight`` for x, and ``dy^T @ x`` for the weight, as if the weight were not rounded (straight-through).

    Args:
        quantizer: Quantizer of the weight (N, K), with current scaling. By default that of NVFP4: four bits with one
            scale per 16 values of a row. Use ``fp8compile.CurrentScaling(...)`` for eight bits.

    Raises:
        TypeError: The argument is not a quantizer.
        ValueError: The quantizer has delayed scaling.
    """
    own = TwoLevelScaling(block=NV_LINE) if quantizer is None else quantizer
    return Recipe(weight=own, dequantized_output=True, dequantized_gradients=True)


READY: dict[str, Callable[..., Recipe]] = {
    "tensorwise": tensorwise,
    "rowwise": rowwise,
    "rowwise_bf16_wgrad": rowwise_bf16_wgrad,
    "blockwise": blockwise,
    "blockwise_bf16_wgrad": blockwise_bf16_wgrad,
    "mxfp8": mxfp8,
    "delayed": delayed,
    "nvfp4": nvfp4,
}


def names() -> tuple[str, ...]:
    """Names of the built-in recipes; `installed` returns the names of recipes from installed packages."""
    return tuple(READY)


@constant_when_traced
def installed() -> tuple[str, ...]:
    """Names of the recipes and quantizers of installed packages, sorted; imports no package.

    Raises:
        ValueError: Two packages use one name for different things, or a package uses the name of a ready recipe.
    """
    found = entry_points.installed()
    for name in found:
        if name in READY:
            raise ValueError(
                f"{entry_points.source(name)} has the same name as fp8compile.recipes.{name}, which by_name "
                "returns. Rename the entry point, or uninstall that package."
            )
    return found


@constant_when_traced
def _no_such_recipe(name: object) -> str:
    known = [*READY, *installed()]
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"there is no recipe named {name!r}; recipes are {', '.join(known)}.{hint}"


@constant_when_traced
def _installed_recipe(name: str, arguments: dict[str, object]) -> Recipe:
    if arguments:
        raise TypeError(
            f"by_name: {name!r} is a recipe of an installed package and accepts no arguments, got "
            f"{', '.join(arguments)}. Create it with that package's own functions."
        )
    value = entry_points.load(name)
    if isinstance(value, Recipe):
        return value
    try:
        return of_quantizer(value)
    except ValueError as error:
        raise ValueError(f"{entry_points.source(name)} is {value!r}, which is not a valid recipe. {error}") from error


def _of_call(text: str) -> tuple[str, dict[str, object]]:
    """Parse ``text``, a call such as ``"rowwise(by_mx=True)"``, to name and keyword arguments; executes nothing.

    Raise a ValueError for any other text.
    """
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        found = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg is not None}
        if len(found) != len(call.keywords):
            raise ValueError
    except (SyntaxError, ValueError):
        raise ValueError(
            f"there is no recipe {text!r}; it must be a name, such as rowwise, or a call with literal keyword "
            "arguments, such as rowwise(scale='pow2')."
        ) from None
    return call.func.id, found


def by_name(name: str, **arguments: object) -> Recipe:
    """Return a recipe by name: a built-in recipe, or a recipe from an installed package.

    Args:
        name: The name, or a call as a string such as ``"rowwise(by_mx=True)"``; `describe` returns either.
            ``fp8compile.library.quantizers`` lists the recipes of packages.
        arguments: Keyword arguments of the built-in recipe's function. Recipes of other packages accept none.

    Raises:
        ValueError: There is no such recipe, an argument has a value that is not allowed, or a package's quantizer
            can't be turned into a recipe.
        ImportError: The package's entry point can't be imported or called; the message names the package.
        TypeError: The package's entry point is neither a quantizer nor a recipe, or the recipe does not accept the
            arguments.
    """
    if isinstance(name, str) and name.endswith(")"):
        name, own = _of_call(name)
        arguments = {**own, **arguments}
    if isinstance(name, str) and name in READY:
        return READY[name](**arguments)
    if isinstance(name, str) and name in installed():
        return _installed_recipe(name, arguments)
    raise ValueError(_no_such_recipe(name))


# for each argument of the functions above, the attribute of a recipe that has its value
ARGUMENTS = {
    "format": "weight.format",
    "grad_format": "grad_output.format",
    "grad_rounding": "grad_output.rounding",
    "scale": "input.scale",
    "eps": "weight.eps",
    "emulate": "emulate",
    "by_mx": "by_mx",
    "history": "weight.history",
    "algorithm": "weight.algorithm",
    "margin": "weight.margin",
    "weight_lifetime": "weight_lifetime",
    "weight_block": "weight.block",
    "seed": "grad_output.seed",
    "hadamard": "input_for_grad_weight.hadamard",
}


def _call(name: str, recipe: Recipe) -> str | None:
    """Return the call ``name(...)``, without default arguments, that makes this recipe; None if there is none."""
    function = READY[name]
    defaults = {each.name: each.default for each in inspect.signature(function).parameters.values()}
    weight: Any = recipe.weight  # any class of quantizers, or None
    try:
        if "backward" in defaults and recipe.grad_output is None:
            arguments = {
                "weight_block": weight.block,
                "scale": attrgetter(ARGUMENTS["scale"])(recipe),
                "backward": "dequantized" if recipe.dequantized_gradients else "bf16",
                "emulate": recipe.emulate,
                "weight_lifetime": recipe.weight_lifetime,
            }
        else:
            arguments = {each: attrgetter(ARGUMENTS[each])(recipe) for each in defaults if each in ARGUMENTS}
        if "outer" in defaults:
            arguments["outer"] = "reciprocal" if weight.scale == "reciprocal" else defaults["outer"]
        if defaults["weight_lifetime"] is None and function(**arguments | {"weight_lifetime": None}) == recipe:
            arguments["weight_lifetime"] = None
        made = function(**arguments)
    except (AttributeError, TypeError, ValueError):  # the recipe lacks an attribute, or the function refuses a value
        return None
    if made != recipe:
        return None
    given = ", ".join(f"{each}={value!r}" for each, value in arguments.items() if value != defaults[each])
    return f"{name}({given})" if given else name


@cache
def _ready_name(recipe: Recipe) -> str | None:
    return min(filter(None, (_call(name, recipe) for name in READY)), key=len, default=None)


def _installed_name(recipe: Recipe) -> str | None:
    for name, value in entry_points.LOADED.items():
        try:
            if recipe == (value if isinstance(value, Recipe) else of_quantizer(value)):
                return name
        except ValueError:  # the quantizer makes no recipe
            continue
    return None


def describe(recipe: Recipe) -> str:
    """Return a readable name of a recipe.

    Args:
        recipe: Any recipe.

    Returns:
        ``"rowwise"`` for a built-in recipe, or ``"rowwise(scale='pow2')"`` with non-default arguments. Otherwise the
        recipe's name in an installed package, if `by_name` has returned it, or ``"custom"``.
    """
    return _ready_name(recipe) or _installed_name(recipe) or "custom"
