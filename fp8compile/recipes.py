"""Ready recipes: each function returns a recipe, and its keyword arguments adjust the recipe.

The recipes differ in how the operands of a linear layer's three GEMMs get their scales:

    tensorwise           one scale for each tensor: the fastest GEMM; one outlier makes the whole tensor coarser
    rowwise              one scale for each row or column, which limits an outlier's effect; each tensor is cast twice,
                         with scales for its rows and with scales for its columns
    rowwise_bf16_wgrad   rowwise with grad_weight in high precision: the safest, with two of three GEMMs in FP8
    blockwise            one scale for 128 values along the summed dim, or 128 x 128 values of a weight
    mxfp8                one power of two for 32 values along the summed dim, which Blackwell's tensor cores apply
    nvfp4                four-bit codes, an e4m3 scale for 16 codes and a scale for the tensor: half of FP8's bytes
    delayed              tensorwise, with scales from the amaxes of earlier steps: reads no tensor twice, keeps a state
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
from fp8compile.quantizers import CurrentScaling, DelayedScaling, Quantizer, Recipe, TwoLevelScaling, entry_points
from fp8compile.quantizers.hadamard import SIGNS

__all__ = [
    "Recipe",
    "blockwise",
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
    x: Block,
    weight: Block,
    weight_turned: Block,
    x_turned: Block,
    *,
    format: str,
    grad_format: str,
    grad_rounding: str,
    emulate: bool = False,
    by_mx: bool = False,
    cache_weights: bool = False,
    **rule: Any,
) -> Recipe:
    """Make a recipe with current scaling for all operands from their blocks, whose values share a scale.

    GEMMs that sum over an operand's columns have the block ``x`` for inputs and output gradients, and ``weight`` for
    weights; GEMMs that sum over rows have ``x_turned`` and ``weight_turned``. ``rule`` has ``scale`` and ``eps``; the
    other arguments are those of `rowwise` and `mxfp8`.
    """
    gradient = {"format": grad_format, "rounding": grad_rounding, **rule}
    return Recipe(
        input=CurrentScaling(format=format, block=x, **rule),
        weight=CurrentScaling(format=format, block=weight, **rule),
        grad_output=CurrentScaling(block=x, **gradient),
        weight_for_grad_input=CurrentScaling(format=format, block=weight_turned, **rule),
        grad_output_for_grad_weight=CurrentScaling(block=x_turned, **gradient),
        input_for_grad_weight=CurrentScaling(format=format, block=x_turned, **rule),
        emulate=emulate,
        by_mx=by_mx,
        cache_weights=cache_weights,
    )


def tensorwise(
    *,
    format: str = "e4m3",
    grad_format: str = "e5m2",
    grad_rounding: str = "nearest",
    scale: str = "fp32",
    eps: float = 0.0,
    by_mx: bool = False,
    cache_weights: bool = False,
) -> Recipe:
    """Recipe with one scale for each tensor; all three GEMMs in FP8.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients; e5m2 has a wider range than e4m3.
        grad_rounding: Rounding of gradients to codes, ``"nearest"`` or ``"stochastic"``.
        scale: Scale rule, see ``CurrentScaling``.
        eps: Lower bound of the amax; 0 for none.
        by_mx: Whether a GPU of compute capability 12.0 multiplies by its MX GEMM, see ``Recipe``.
        cache_weights: Whether layers keep the codes of weights from one optimizer step to the next, see ``Recipe``.

    Source: Micikevicius et al. 2022, arXiv:2209.05433: e4m3 forward, e5m2 for gradients.
    """
    blocks = (TENSOR, TENSOR, TENSOR, TENSOR)
    return _of_blocks(
        *blocks,
        format=format,
        grad_format=grad_format,
        grad_rounding=grad_rounding,
        scale=scale,
        eps=eps,
        by_mx=by_mx,
        cache_weights=cache_weights,
    )


def rowwise(
    *,
    format: str = "e4m3",
    grad_format: str = "e4m3",
    grad_rounding: str = "nearest",
    scale: str = "fp32",
    eps: float = 0.0,
    by_mx: bool = False,
    cache_weights: bool = False,
) -> Recipe:
    """Recipe with a scale for each row of a GEMM's left operand and each column of its right operand.

    All three GEMMs are in FP8.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients; with a scale for each row, e4m3 has enough range.
        grad_rounding: Rounding of gradients to codes, ``"nearest"`` or ``"stochastic"``.
        scale: Scale rule, see ``CurrentScaling``.
        eps: Lower bound of the amax; 0 for none.
        by_mx: Whether a GPU of compute capability 12.0 multiplies by its MX GEMM, see ``Recipe``.
        cache_weights: Whether layers keep the codes of weights from one optimizer step to the next, see ``Recipe``.
    """
    blocks = (ROW, ROW, COLUMN, COLUMN)
    return _of_blocks(
        *blocks,
        format=format,
        grad_format=grad_format,
        grad_rounding=grad_rounding,
        scale=scale,
        eps=eps,
        by_mx=by_mx,
        cache_weights=cache_weights,
    )


def rowwise_bf16_wgrad(
    *,
    format: str = "e4m3",
    grad_format: str = "e4m3",
    grad_rounding: str = "nearest",
    scale: str = "fp32",
    eps: float = 0.0,
    cache_weights: bool = False,
) -> Recipe:
    """Recipe of ``rowwise`` for output and grad_input; grad_weight stays in its operands' own dtype.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients.
        grad_rounding: Rounding of gradients to codes, ``"nearest"`` or ``"stochastic"``.
        scale: Scale rule, see ``CurrentScaling``.
        eps: Lower bound of the amax; 0 for none.
        cache_weights: Whether layers keep the codes of weights from one optimizer step to the next, see ``Recipe``.
    """
    rule: dict[str, Any] = {"scale": scale, "eps": eps}
    value = CurrentScaling(format=format, block=ROW, **rule)
    return Recipe(
        input=value,
        weight=value,
        grad_output=CurrentScaling(format=grad_format, block=ROW, rounding=grad_rounding, **rule),
        weight_for_grad_input=CurrentScaling(format=format, block=COLUMN, **rule),
        cache_weights=cache_weights,
    )


def blockwise(
    *,
    format: str = "e4m3",
    grad_format: str = "e4m3",
    grad_rounding: str = "nearest",
    scale: str = "fp32",
    eps: float = 0.0,
    cache_weights: bool = False,
) -> Recipe:
    """Recipe with one scale for 128 values of inputs and gradients, and for 128 x 128 values of weights.

    All three GEMMs are in FP8. The 128 values lie along the dim that a GEMM sums over: blocks are 1 x 128 in the input
    and in the output's gradient (rows are tokens), but 128 x 1 for grad_weight, which sums over tokens.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients.
        grad_rounding: Rounding of gradients to codes, ``"nearest"`` or ``"stochastic"``.
        scale: ``"fp32"``, or ``"pow2"`` for powers of two.
        eps: Lower bound of the amax; 0 for none.
        cache_weights: Whether layers keep the codes of weights from one optimizer step to the next, see ``Recipe``.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3, arXiv:2412.19437.
    """
    blocks = (LINE, TILE, TILE, PILLAR)
    return _of_blocks(
        *blocks,
        format=format,
        grad_format=grad_format,
        grad_rounding=grad_rounding,
        scale=scale,
        eps=eps,
        cache_weights=cache_weights,
    )


def mxfp8(
    *,
    format: str = "e4m3",
    grad_format: str = "e4m3",
    grad_rounding: str = "nearest",
    scale: str = "e8m0_rceil",
    eps: float = 0.0,
    weight_block: tuple[int, int] = MX_LINE,
    emulate: bool = False,
    cache_weights: bool = False,
) -> Recipe:
    """Recipe of MXFP8: one scale, a power of two stored in a byte, for 32 values along the summed dim.

    All three GEMMs are in FP8. Forward and backward sum over different dims of a weight, and therefore multiply by
    different codes. With one scale for 32 x 32 values of a weight, both multiply by the same codes, which take
    half the bytes.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients.
        grad_rounding: Rounding of gradients to codes, ``"nearest"`` or ``"stochastic"``.
        scale: ``"e8m0_rceil"`` rounds a scale up, so that nothing saturates; ``"e8m0_floor"`` is the rule in the
            specification of the format.
        eps: Lower bound of the amax; 0 for none.
        weight_block: Values of a weight that share a scale: (1, 32), or (32, 32) for the same codes in all GEMMs.
        emulate: Whether a GPU without MX GEMMs multiplies the exact values in float64, slowly, instead of raising.
        cache_weights: Whether layers keep the codes of weights from one optimizer step to the next, see ``Recipe``.

    Raises:
        ValueError: ``scale`` or ``weight_block`` has a value that is not allowed.

    Source: OCP Microscaling Formats 1.0, section 6.3 (floor); Mishra et al. 2025, arXiv:2506.08027 (rceil).
    """
    if scale not in ("e8m0_rceil", "e8m0_floor"):
        raise ValueError(f"mxfp8: scale is {scale!r}; it is 'e8m0_rceil' or 'e8m0_floor'.")
    if weight_block not in (MX_LINE, MX_TILE):
        raise ValueError(f"mxfp8: weight_block is {weight_block!r}; it is (1, 32) or (32, 32).")
    blocks = (MX_LINE, weight_block, weight_block[::-1], MX_PILLAR)
    return _of_blocks(
        *blocks,
        format=format,
        grad_format=grad_format,
        grad_rounding=grad_rounding,
        emulate=emulate,
        cache_weights=cache_weights,
        scale=scale,
        eps=eps,
    )


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
    cache_weights: bool = False,
) -> Recipe:
    """Recipe of NVFP4: 4-bit codes, an e4m3 scale for 16 values, and a float32 scale for the tensor.

    The 16 values lie along the summed dim. Weights have one scale for 16 x 16 values, so that forward and backward
    multiply the same codes, at half a byte for each element. Compiled code keeps these codes (``keep_weight_codes``),
    so that the backward does not read the weight. Both operands of grad_weight are Hadamard-transformed along tokens
    before they are quantized, which spreads outliers over their neighbours; their float32 scales are those of the
    transformed tensors. Each expert has its own codes and scales, as if its tokens and its weight were alone.

    Args:
        weight_block: (16, 16), or (1, 16) for a scale for each 16 values along the summed dim.
        grad_rounding: Rounding of gradients to codes: ``"stochastic"``, ``"nearest"``, or ``"stochastic_hardware"``,
            which uses the instruction of a B200. The instruction is faster and draws other bits, see
            ``fp8compile.TwoLevelScaling``.
        seed: Seed of stochastic rounding.
        hadamard: Sixteen signs of the transform of grad_weight's operands, TransformerEngine's by default; () for no
            transform.
        backward: ``"nvfp4"`` for GEMMs of grad_input and grad_weight in four bits. ``"bf16"`` for these GEMMs in the
            dtype of their operands. ``"dequantized"`` for the same as ``"bf16"``, but with the values of the forward's
            codes instead of x and the weight.
        scale: The rule for both scales, ``"transformer_engine"`` or ``"torchao"``.
        outer: ``"reciprocal"`` for float32 scales of weights that equal 1 / (1 / scale), because some servers store
            the reciprocal. This changes only weights whose largest magnitude is below 3.2e-35, and needs
            ``scale="transformer_engine"``. ``"quotient"`` leaves the scale as the rule has it.
        emulate: Whether a GPU without NVFP4 GEMMs multiplies the exact values in float64, slowly, instead of raising.
        cache_weights: Whether layers keep the codes of weights from one optimizer step to the next, see ``Recipe``.

    Raises:
        ValueError: An argument has a value that is not allowed.

    Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.
    """
    if weight_block not in (NV_TILE, NV_LINE):
        raise ValueError(f"nvfp4: weight_block is {weight_block!r}; it is (16, 16) or (1, 16).")
    if backward not in ("nvfp4", "bf16", "dequantized"):
        raise ValueError(f"nvfp4: backward is {backward!r}; it is 'nvfp4', 'bf16' or 'dequantized'.")
    if outer not in ("quotient", "reciprocal") or (outer == "reciprocal" and scale != "transformer_engine"):
        raise ValueError(
            f"nvfp4: outer is {outer!r} with scale {scale!r}; it is 'quotient', or 'reciprocal' with scale "
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
    keeps = backward == "nvfp4" and weight_block == NV_TILE  # both products of the weight read them
    return Recipe(
        input=line,
        weight=weight,
        emulate=emulate,
        cache_weights=cache_weights,
        keep_weight_codes=keeps,
        dequantized_gradients=backward == "dequantized",
        **taken,
    )


def delayed(
    *,
    format: str = "e4m3",
    grad_format: str = "e5m2",
    history: int = 1024,
    algorithm: str = "max",
    margin: int = 0,
    keep_weight_codes: bool = True,
) -> Recipe:
    """Recipe with one scale for each tensor, from the amaxes of earlier steps; all three GEMMs in FP8.

    Each layer has a state, see ``fp8compile.DelayedState``; ``fp8compile.Linear`` keeps the state in buffers.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients; e5m2 has a wider range than e4m3.
        history: Number of amaxes that are kept for each operand.
        algorithm: ``"max"`` or ``"most_recent"``, see ``fp8compile.DelayedScaling``.
        margin: Number of powers of two between the largest code and the scaled amax.
        keep_weight_codes: Whether codes of weights are kept from the forward to the backward, which takes one byte for
            each element, see ``fp8compile.Recipe``. If False, the backward quantizes weights again.

    Source: see ``fp8compile.DelayedScaling``; the defaults are TransformerEngine's with the format ``HYBRID``.
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
        keep_weight_codes=keep_weight_codes,
    )


def of_quantizer(quantizer: Quantizer) -> Recipe:
    """Make a recipe from one quantizer, transposed where a GEMM sums over the rows of an operand.

    Args:
        quantizer: Quantizer of the output's operands: the input (tokens, K) and the weight (N, K).

    Raises:
        TypeError: The argument is not a quantizer.
        ValueError: No GEMM multiplies these blocks (the text lists those that a GEMM can), or codes in e5m2.
    """
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"fp8compile.library.recipe: quantizer is {quantizer!r}; it is a quantizer, such as "
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
    """Recipe that quantizes the weight alone, to train for serving with four-bit or eight-bit weights.

    The output multiplies x by the values of the weight's codes in high precision (W4A16, W8A16). Gradients are
    ``dy @ values`` for x, and ``dy^T @ x`` for the weight, as if the weight were not rounded (straight-through).

    Args:
        quantizer: Quantizer of the weight (N, K), with current scaling. By default that of NVFP4, four bits with a
            scale for 16 values of a row; ``fp8compile.CurrentScaling(...)`` for eight bits.

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
    "mxfp8": mxfp8,
    "delayed": delayed,
    "nvfp4": nvfp4,
}


def names() -> tuple[str, ...]:
    """Names of the ready recipes; `installed` returns the names of installed packages' recipes."""
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
                f"{entry_points.source(name)} has the name of fp8compile.recipes.{name}, which by_name gives. Rename "
                "the entry point, or uninstall that package."
            )
    return found


@constant_when_traced
def _no_such_recipe(name: object) -> str:
    known = [*READY, *installed()]
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"no recipe is called {name!r}; there are {', '.join(known)}.{hint}"


@constant_when_traced
def _installed_recipe(name: str, arguments: dict[str, object]) -> Recipe:
    if arguments:
        raise TypeError(
            f"by_name: {name!r} is of an installed package and takes no arguments, given are {', '.join(arguments)}. "
            "Make it with that package's own functions."
        )
    value = entry_points.load(name)
    if isinstance(value, Recipe):
        return value
    try:
        return of_quantizer(value)
    except ValueError as error:
        raise ValueError(f"{entry_points.source(name)} gives {value!r}, which makes no recipe. {error}") from error


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
            f"no recipe is called {text!r}; write a name, or a call with keyword arguments that are literals, such as "
            "rowwise(scale='pow2')."
        ) from None
    return call.func.id, found


def by_name(name: str, **arguments: object) -> Recipe:
    """Make a recipe by its name: a ready recipe, or a recipe of an installed package.

    Args:
        name: The name, or the text of a call such as ``"rowwise(by_mx=True)"``; `describe` returns either.
            ``fp8compile.library.quantizers`` lists the recipes of packages.
        arguments: Keyword arguments of the ready recipe's function; none for a recipe of another package.

    Raises:
        ValueError: There is no such recipe, an argument has a value that is not allowed, or a package's quantizer
            makes no recipe.
        ImportError: The package's entry point can't be imported or called; the text names the package.
        TypeError: The package's entry point is neither a quantizer nor a recipe, or the recipe does not take the
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
    "keep_weight_codes": "keep_weight_codes",
    "cache_weights": "cache_weights",
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
                "cache_weights": recipe.cache_weights,
            }
        else:
            arguments = {each: attrgetter(ARGUMENTS[each])(recipe) for each in defaults if each in ARGUMENTS}
        if "outer" in defaults:
            arguments["outer"] = "reciprocal" if weight.scale == "reciprocal" else defaults["outer"]
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
    for name, value in entry_points.imported():
        try:
            if recipe == (value if isinstance(value, Recipe) else of_quantizer(value)):
                return name
        except ValueError:  # the quantizer makes no recipe
            continue
    return None


def describe(recipe: Recipe) -> str:
    """A readable name of a recipe.

    Args:
        recipe: Any recipe.

    Returns:
        ``"rowwise"`` for a ready recipe, or ``"rowwise(scale='pow2')"`` with other arguments than the defaults. Else
        the recipe's name in an installed package, if that package is imported; else ``"custom"``.
    """
    return _ready_name(recipe) or _installed_name(recipe) or "custom"
