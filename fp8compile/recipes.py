"""Ready recipes, by name; keyword arguments for what may vary.

The ways to give scales to the three GEMMs of a linear layer:

    tensorwise           one scale a tensor: the fastest GEMM; one outlier coarsens the whole tensor
    rowwise              one scale a row or column: keeps outliers apart; each direction is cast for itself
    rowwise_bf16_wgrad   as rowwise, with grad_weight in high precision: the safest, two of three GEMMs in FP8
    blockwise            one scale for 128 values along the sum, of weights for 128 x 128: keeps outliers within blocks
    mxfp8                a power of two for 32 values along the sum: the tensor cores of Blackwell undo it
    nvfp4                four-bit codes, an e4m3 scale for 16 of them and one of the tensor: half the bytes again
    delayed              as tensorwise, by the amaxes of the steps before: no tensor is read twice; its state is kept
"""

from __future__ import annotations

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
    **rule: Any,
) -> Recipe:
    """Current scaling everywhere: blocks of x_MK and dy_MN, of w_NK, and of both where the sum runs the other way."""
    gradient = {"format": grad_format, "rounding": grad_rounding, **rule}
    return Recipe(
        input=CurrentScaling(format=format, block=x, **rule),
        weight=CurrentScaling(format=format, block=weight, **rule),
        grad_output=CurrentScaling(block=x, **gradient),
        weight_for_grad_input=CurrentScaling(format=format, block=weight_turned, **rule),
        grad_output_for_grad_weight=CurrentScaling(block=x_turned, **gradient),
        input_for_grad_weight=CurrentScaling(format=format, block=x_turned, **rule),
        emulate=emulate,
    )


def tensorwise(
    *,
    format: str = "e4m3",
    grad_format: str = "e5m2",
    grad_rounding: str = "nearest",
    scale: str = "fp32",
    eps: float = 0.0,
) -> Recipe:
    """One scale for each tensor; all three GEMMs in FP8.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients, whose range is wider.
        grad_rounding: Rounding of gradients to codes, ``"nearest"`` or ``"stochastic"``.
        scale: Scale rule, see ``CurrentScaling``.
        eps: Floor under the amax.

    Source: Micikevicius et al. 2022, arXiv:2209.05433: e4m3 forward, e5m2 for gradients.
    """
    blocks = (TENSOR, TENSOR, TENSOR, TENSOR)
    return _of_blocks(
        *blocks, format=format, grad_format=grad_format, grad_rounding=grad_rounding, scale=scale, eps=eps
    )


def rowwise(
    *,
    format: str = "e4m3",
    grad_format: str = "e4m3",
    grad_rounding: str = "nearest",
    scale: str = "fp32",
    eps: float = 0.0,
) -> Recipe:
    """A scale for each row of a GEMM's left operand and each column of its right one; all three GEMMs in FP8.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients; with a scale a row, e4m3 has range enough.
        grad_rounding: Rounding of gradients to codes, ``"nearest"`` or ``"stochastic"``.
        scale: Scale rule, see ``CurrentScaling``.
        eps: Floor under the amax.
    """
    blocks = (ROW, ROW, COLUMN, COLUMN)
    return _of_blocks(
        *blocks, format=format, grad_format=grad_format, grad_rounding=grad_rounding, scale=scale, eps=eps
    )


def rowwise_bf16_wgrad(
    *,
    format: str = "e4m3",
    grad_format: str = "e4m3",
    grad_rounding: str = "nearest",
    scale: str = "fp32",
    eps: float = 0.0,
) -> Recipe:
    """The same as ``rowwise`` for output and grad_input; grad_weight stays in the dtype of its operands.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients.
        grad_rounding: Rounding of gradients to codes, ``"nearest"`` or ``"stochastic"``.
        scale: Scale rule, see ``CurrentScaling``.
        eps: Floor under the amax.
    """
    rule: dict[str, Any] = {"scale": scale, "eps": eps}
    value = CurrentScaling(format=format, block=ROW, **rule)
    return Recipe(
        input=value,
        weight=value,
        grad_output=CurrentScaling(format=grad_format, block=ROW, rounding=grad_rounding, **rule),
        weight_for_grad_input=CurrentScaling(format=format, block=COLUMN, **rule),
    )


def blockwise(
    *,
    format: str = "e4m3",
    grad_format: str = "e4m3",
    grad_rounding: str = "nearest",
    scale: str = "fp32",
    eps: float = 0.0,
) -> Recipe:
    """A scale for 128 values of inputs and gradients, for 128 x 128 of weights; all three GEMMs in FP8.

    Blocks lie along the dim that a GEMM sums over: 1 x 128 in x_MK and dy_MN, 128 x 128 in w_NK. grad_weight sums over
    tokens, so its blocks are 128 x 1.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients.
        grad_rounding: Rounding of gradients to codes, ``"nearest"`` or ``"stochastic"``.
        scale: ``"fp32"``, or ``"pow2"`` for powers of two.
        eps: Floor under the amax.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3, arXiv:2412.19437.
    """
    blocks = (LINE, TILE, TILE, PILLAR)
    return _of_blocks(
        *blocks, format=format, grad_format=grad_format, grad_rounding=grad_rounding, scale=scale, eps=eps
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
) -> Recipe:
    """MXFP8: a scale for 32 values along the sum, a power of two stored as one byte; all three GEMMs in FP8.

    Forward and backward sum over different sides of a weight, and so multiply two sets of its codes. With one scale
    for 32 x 32 values of a weight both multiply the same codes, which are half the bytes.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients.
        grad_rounding: Rounding of gradients to codes, ``"nearest"`` or ``"stochastic"``.
        scale: ``"e8m0_rceil"`` rounds a scale up, so that nothing saturates; ``"e8m0_floor"`` is the rule in the
            specification of the format.
        eps: Floor under the amax.
        weight_block: (1, 32), or (32, 32) for one set of codes.
        emulate: Whether a GPU without MX (before compute capability 10.0) multiplies the exact values in float64,
            slowly, instead of raising.

    Raises:
        ValueError: The scale is no E8M0 one, or ``weight_block`` is another.

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
    emulate: bool = False,
) -> Recipe:
    """NVFP4: four-bit codes, an e4m3 scale for 16 values along the sum and a float32 scale of the tensor.

    Weights have one scale for 16 x 16 values, so that forward and backward multiply the same codes. Those are half a
    byte an element, so compiled code keeps them (``keep_weight_codes``) and the backward reads no weight. Both
    operands of grad_weight are transformed along tokens before they are quantized, so that an outlier does not take
    the bits of its neighbours; their outer scale is that of the transformed tensor. Each expert has the codes and
    scales that its tokens and its weight have alone.

    Args:
        weight_block: (16, 16), or (1, 16) for a scale for each 16 values along the sum.
        grad_rounding: Rounding of gradients to codes, ``"stochastic"``, ``"nearest"``, or ``"stochastic_hardware"``:
            the instruction that a B200 has for it, faster and with other bits, see ``fp8compile.TwoLevelScaling``.
        seed: Seed of stochastic rounding.
        hadamard: Sixteen signs of the transform of grad_weight's operands, TransformerEngine's by default; () for no
            transform.
        backward: ``"nvfp4"``; ``"bf16"`` for both gradients in the dtype of their operands; or ``"dequantized"`` for
            that too, but with the values of the forward's codes in place of x and the weight.
        scale: The rule of both scales, ``"transformer_engine"`` or ``"torchao"``.
        emulate: Whether a GPU multiplies the exact values in float64, slowly, instead of raising.

    Raises:
        ValueError: An argument has no allowed value.

    Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.
    """
    if weight_block not in (NV_TILE, NV_LINE):
        raise ValueError(f"nvfp4: weight_block is {weight_block!r}; it is (16, 16) or (1, 16).")
    if backward not in ("nvfp4", "bf16", "dequantized"):
        raise ValueError(f"nvfp4: backward is {backward!r}; it is 'nvfp4', 'bf16' or 'dequantized'.")
    # by constructors: Dynamo traces no `replace`, for a recipe that is made in the compiled function
    line, weight = TwoLevelScaling(scale=scale), TwoLevelScaling(block=weight_block, scale=scale)
    pillar: dict[str, Any] = {"block": NV_PILLAR, "packed": "columns", "scale": scale}
    gradient: dict[str, Any] = {"rounding": grad_rounding, "seed": seed}
    gradients = {
        "grad_output": TwoLevelScaling(scale=scale, **gradient),
        "weight_for_grad_input": weight if weight_block == NV_TILE else TwoLevelScaling(**pillar),
        "grad_output_for_grad_weight": TwoLevelScaling(**pillar, **gradient, hadamard=hadamard),
        "input_for_grad_weight": TwoLevelScaling(**pillar, hadamard=hadamard),
    }
    taken: dict[str, Any] = gradients if backward == "nvfp4" else {}
    keeps = backward == "nvfp4" and weight_block == NV_TILE  # which both products of the weight read
    return Recipe(
        input=line,
        weight=weight,
        emulate=emulate,
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
    """One scale for each tensor, from the amaxes of earlier steps; all three GEMMs in FP8.

    Each layer keeps a state, see ``fp8compile.DelayedState``; ``fp8compile.Linear`` keeps it in buffers.

    Args:
        format: Format of inputs and weights.
        grad_format: Format of gradients, whose range is wider.
        history: How many amaxes are remembered.
        algorithm: ``"max"`` or ``"most_recent"``, see ``fp8compile.DelayedScaling``.
        margin: Powers of two that stay free above the amax.
        keep_weight_codes: Whether codes of weights are kept from the forward to the backward, a byte an element, see
            ``fp8compile.Recipe``. If not, they are made again.

    Source: as ``fp8compile.DelayedScaling``; the defaults are TransformerEngine's, format ``HYBRID``.
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
    """One quantizer for all operands; rows and columns are exchanged if a GEMM needs that.

    Args:
        quantizer: Quantizer of the output's operands, x_MK and w_NK.

    Raises:
        TypeError: The argument is no quantizer.
        ValueError: No GEMM multiplies such blocks; the message names the blocks that one does.
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
    """Names of the ready recipes.

    ``fp8compile.library.quantizers`` has what installed packages add to them.
    """
    return tuple(READY)


@constant_when_traced
def installed() -> tuple[str, ...]:
    """Names that installed packages add to the ready ones, sorted; none of them is imported.

    Raises:
        ValueError: A name means two things.
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


def by_name(name: str, **arguments: object) -> Recipe:
    """A recipe by its name: a ready one, or what an installed package offers (see ``fp8compile.library``).

    Args:
        name: The name.
        arguments: Keyword arguments of the ready recipe's function; none for a recipe of another package.

    Raises:
        ValueError: No such recipe; the message names the closest. Or what a package offers makes none.
        ImportError: The package that offers it fails; the message names it.
        TypeError: The package offers something else, or arguments are given that it can't take.
    """
    if isinstance(name, str) and name in READY:
        return READY[name](**arguments)
    if isinstance(name, str) and name in installed():
        return _installed_recipe(name, arguments)
    raise ValueError(_no_such_recipe(name))


# where a recipe has what its function was called with
ARGUMENTS = {
    "format": "weight.format",
    "grad_format": "grad_output.format",
    "grad_rounding": "grad_output.rounding",
    "scale": "weight.scale",
    "eps": "weight.eps",
    "emulate": "emulate",
    "history": "weight.history",
    "algorithm": "weight.algorithm",
    "margin": "weight.margin",
    "keep_weight_codes": "keep_weight_codes",
    "weight_block": "weight.block",
    "seed": "grad_output.seed",
    "hadamard": "input_for_grad_weight.hadamard",
}


def _call(name: str, recipe: Recipe) -> str | None:
    """How a ready recipe's function is called to give a recipe, without its defaults; None if it can't."""
    function = READY[name]
    defaults = {each.name: each.default for each in inspect.signature(function).parameters.values()}
    weight: Any = recipe.weight  # of whichever class
    try:
        if "backward" in defaults and recipe.grad_output is None:
            arguments = {
                "weight_block": weight.block,
                "scale": weight.scale,
                "backward": "dequantized" if recipe.dequantized_gradients else "bf16",
                "emulate": recipe.emulate,
            }
        else:
            arguments = {each: attrgetter(ARGUMENTS[each])(recipe) for each in defaults if each in ARGUMENTS}
        made = function(**arguments)
    except (AttributeError, TypeError, ValueError):  # a quantizer without that field, or with one that it refuses
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
        except ValueError:  # a quantizer that makes none
            continue
    return None


def describe(recipe: Recipe) -> str:
    """What a recipe is called, for people.

    Args:
        recipe: Any.

    Returns:
        ``"rowwise"`` for a ready recipe, ``"rowwise(scale='pow2')"`` for one with other arguments; the name that an
        installed package gives it, if that package is imported; ``"custom"`` for any other.
    """
    return _ready_name(recipe) or _installed_name(recipe) or "custom"
