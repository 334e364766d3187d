"""Every layer by where its tensors lie: kinds of weights, sources of scales, levels of scales, and optimisations.

A cell has the bits, the kept bytes and the graph of the layer whose tensors are whole, or is refused by an error that
`LISTED` has with its reason. A placement is here by a row of `CALLS`; the test fails for a layer without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from measured_layers import Measured, alone, measured
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import fp8compile as f8
from fp8compile.layout.quantized import STACK, WHOLE, Plain, Quantized
from fp8compile.ops.amax import amax
from fp8compile.ops.layer import layer_ops
from fp8compile.ops.layer.fsdp_rows import Rows
from fp8compile.ops.layer.make_weight_codes import sets_of_weight
from fp8compile.ops.layer.quantize_over_ranks import quantize_part
from fp8compile.quantizers import GEMMS, Quantizer, Recipe
from fp8compile.testing.bits import difference

__all__ = ["CALLS", "CELLS", "KINDS", "LISTED", "OPTIMISATIONS", "PLACES", "Cell", "has_graph", "outcome"]

TOKENS, IN, OUT, EXPERTS = 160, 64, 96, 3
ENDS = (64, 64, 144)  # one expert without tokens, and rows behind the last one
HISTORY = 4


class Cell(NamedTuple):
    """One question.

    Attributes:
        place: Where the tensors lie.
        kind: A matrix, or experts' matrices.
        source: What the weight's scale comes from.
        levels: Levels of scales.
        optimisation: What is asked for.
    """

    place: str
    kind: str
    source: str
    levels: str
    optimisation: str


PLACES = ("whole", "shared scale", "known codes", "group", "group of two", "FSDP", "DTensor")
KINDS = ("dense", "grouped")
SOURCES = ("own amax", "multiplier", "given amax", "given codes", "given pair")
LEVELS = ("one", "two")
OPTIMISATIONS = (
    "all gradients",
    "frozen weight",
    "input without gradient",
    "kept weight codes",
    "dequantized gradients",
    "weight's codes alone",
)

# ---------------------------------------------------------------------------------- recipes


def _delayed_in_two_levels() -> Recipe:
    """The nearest to a multiplier in two levels."""
    return replace(f8.recipes.nvfp4(), weight=f8.DelayedScaling(history=HISTORY), keep_weight_codes=False)


RECIPES: dict[tuple[str, str], Callable[[], Recipe]] = {
    ("own amax", "one"): f8.recipes.blockwise,
    ("own amax", "two"): f8.recipes.nvfp4,
    ("multiplier", "one"): lambda: f8.recipes.delayed(history=HISTORY),
    ("multiplier", "two"): _delayed_in_two_levels,
    ("given pair", "one"): f8.recipes.rowwise,
    ("given pair", "two"): lambda: f8.recipes.nvfp4(weight_block=(1, 16)),
}


def recipe_of(cell: Cell) -> Recipe:
    """The recipe that a cell asks for."""
    source = cell.source if (cell.source, cell.levels) in RECIPES else "own amax"
    recipe = replace(RECIPES[source, cell.levels](), keep_weight_codes=False)
    if cell.optimisation == "kept weight codes":
        return replace(recipe, keep_weight_codes=True)
    if cell.optimisation == "dequantized gradients":
        slots = dict.fromkeys(slot for gemm in GEMMS[1:] for slot in (gemm.a, gemm.b))
        return replace(recipe, **slots, dequantized_gradients=True)
    if cell.optimisation == "weight's codes alone":  # of one-sided products: W4A16, W8A16
        slots = dict.fromkeys(slot for gemm in GEMMS[1:] for slot in (gemm.a, gemm.b))
        return replace(recipe, **slots, input=None, dequantized_output=True, dequantized_gradients=True)
    return recipe


# ---------------------------------------------------------------------------------- tensors


def _codes(weight: Tensor, recipe: Recipe, *, is_pair: bool) -> Tensor:
    quantizers = [recipe.weight]
    if is_pair:
        quantizers.append(recipe.weight_for_grad_input or recipe.weight.transposed())
    layout = STACK if weight.ndim == 3 else WHOLE
    sets = [Quantized(**vars(quantize_part(Plain(weight, layout), each))) for each in quantizers]
    return f8.QuantizedTensor.of_sets(sets, weight.dtype, batch=layout.batch)


@cache
def _tensors(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, grad_output and ends."""
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, IN), (OUT, IN) if kind == "dense" else (EXPERTS, OUT, IN), (TOKENS, OUT)
    found = [
        torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp() for shape in shapes
    ]
    return *(each.bfloat16() for each in found), torch.tensor(ENDS, dtype=torch.int32)


# ---------------------------------------------------------------------------------- calls


class Given(NamedTuple):
    """What a call gets beside its leaves.

    Attributes:
        recipe: Of the layer.
        amaxes: Of the whole weight for both products, or None; or tensors of its known codes.
        ends: Of the groups.
        quantizers: Of known codes, for both products.
    """

    recipe: Recipe
    amaxes: Sequence[Tensor | None]
    ends: Tensor
    quantizers: Sequence[Quantizer] = ()


Call = Callable[[Tensor, Tensor, Given], Tensor]


def _state() -> tuple[Tensor, Tensor]:
    return torch.zeros(3, HISTORY), torch.tensor([30.0, 40.0, 500.0])


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def _placed(local: Tensor, placement: Placement) -> DTensor:
    return DTensor.from_local(local, _mesh(), [placement], run_check=False)


def _dtensors(x: Tensor, weight: Tensor) -> tuple[DTensor, DTensor]:
    return _placed(x, Replicate()), _placed(weight, Shard(0))


def _dtensor_linear(x: Tensor, weight: Tensor, given: Given) -> Tensor:
    return layer_ops.linear(*_dtensors(x, weight), None, given.recipe).to_local()


def _dtensor_delayed(x: Tensor, weight: Tensor, given: Given) -> Tensor:
    state = [_placed(each, Replicate()) for each in _state()]
    return layer_ops.delayed_linear(*_dtensors(x, weight), None, *state, None, given.recipe)[0].to_local()


def _dtensor_grouped(x: Tensor, weight: Tensor, given: Given) -> Tensor:
    return f8.grouped_linear(*_dtensors(x, weight), given.ends, recipe=given.recipe).to_local()


def _known(given: Given) -> tuple[Any, ...]:
    """The fields of known codes."""
    tensors: Any = [None if each.numel() == 0 else each for each in given.amaxes]  # without a second level of scales
    first, second = given.quantizers
    return *tensors[:3], first, *tensors[3:], second


def _fsdp_delayed(x: Tensor, weight: Tensor, given: Given) -> Tensor:
    tokens = torch.zeros(3), torch.zeros(1)
    how = None, None, _state()[1], Rows.alone(OUT, "bfloat16"), given.recipe
    return layer_ops.fsdp_delayed_linear(x, weight, None, *tokens, *how)[0]


# by where, what and whether there is a state: the layer, None of what has none, and how it is called
CALLS: dict[tuple[str, str, bool], tuple[layer_ops.Layer | None, Call]] = {
    ("whole", "dense", False): (layer_ops.LINEAR, lambda x, w, given: layer_ops.linear(x, w, None, given.recipe)),
    ("whole", "dense", True): (
        layer_ops.DELAYED,
        lambda x, w, given: layer_ops.delayed_linear(x, w, None, *_state(), None, given.recipe)[0],
    ),
    ("shared scale", "dense", False): (
        layer_ops.SHARED_SCALE,
        lambda x, w, given: layer_ops.shared_scale_linear(x, w, None, given.amaxes[0], given.recipe),
    ),
    ("known codes", "dense", False): (
        layer_ops.KNOWN_CODES,
        lambda x, w, given: layer_ops.known_codes_linear(x, w, None, *_known(given), given.recipe),
    ),
    ("known codes", "grouped", False): (
        layer_ops.KNOWN_CODES_GROUPED,
        lambda x, w, given: layer_ops.known_codes_grouped_linear(x, w, given.ends, None, *_known(given), given.recipe),
    ),
    ("whole", "grouped", False): (
        layer_ops.GROUPED,
        lambda x, w, given: layer_ops.grouped_linear(x, w, given.ends, None, given.recipe),
    ),
    ("group", "dense", False): (
        layer_ops.SHARDED,
        lambda x, w, given: layer_ops.sharded_linear(x, w, None, 0, [OUT], None, [0], 0, "", given.recipe),
    ),
    ("group", "grouped", False): (
        layer_ops.SHARDED_GROUPED,
        lambda x, w, given: layer_ops.sharded_grouped_linear(x, w, given.ends, None, 1, [OUT], 0, "", given.recipe),
    ),
    ("group of two", "grouped", False): (  # what it refuses, it refuses before it sends anything
        layer_ops.SHARDED_GROUPED,
        lambda x, w, given: layer_ops.sharded_grouped_linear(
            x, w, given.ends, None, 1, [OUT, OUT], 0, "", given.recipe
        ),
    ),
    ("FSDP", "dense", False): (
        layer_ops.FSDP,
        lambda x, w, given: layer_ops.fsdp_linear(
            x, w, None, *given.amaxes, Rows.alone(OUT, "bfloat16"), given.recipe
        ),
    ),
    ("FSDP", "dense", True): (layer_ops.FSDP_DELAYED, _fsdp_delayed),
    ("FSDP", "grouped", False): (
        layer_ops.FSDP_GROUPED,
        lambda x, w, given: layer_ops.fsdp_grouped_linear(
            x, w, given.ends, None, Rows.alone(EXPERTS, "bfloat16"), given.recipe
        ),
    ),
    ("DTensor", "dense", False): (None, _dtensor_linear),
    ("DTensor", "dense", True): (None, _dtensor_delayed),
    ("DTensor", "grouped", False): (None, _dtensor_grouped),
}


def takes_amax(place: str, kind: str) -> bool:
    """Whether the ranks of a placement may know the weight's amax: then it is an argument."""
    layer, _ = CALLS.get((place, kind, False), (None, None))
    return layer is not None and bool({"amax", "outer_amax"} & set(layer.placement.__match_args__))


GIVEN = ("given codes", "given pair")
CELLS = [
    cell
    for cell in (Cell(*each) for each in product(PLACES, KINDS, SOURCES, LEVELS, OPTIMISATIONS))
    if (cell.source != "given amax" or takes_amax(cell.place, cell.kind))
    # without a given amax the layer is the one whose tensors are whole
    and (cell.place != "shared scale" or cell[1:3] == ("dense", "given amax"))
    and (cell.place != "known codes" or cell.source in GIVEN)
    # a layer makes one set of them then, which is "given codes"
    and (cell[0:3:2] != ("known codes", "given pair") or cell.optimisation in ("frozen weight", "kept weight codes"))
    and (cell.place != "group of two" or cell[1:4] == ("grouped", "own amax", "two"))
    # codes have no gradient, so a weight that is given as codes is a frozen one
    and not (cell.source in GIVEN and cell.optimisation in ("all gradients", "input without gradient"))
]

# ---------------------------------------------------------------------------------- what is refused


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Cells that are refused, or for which an optimisation is not done.

    Attributes:
        reason: Why.
        text: A part of the error; None: they run, and are as without the optimisation.
        is_meaning: Whether the reason is what the words mean, and not that nobody has done it.
        place: These alone; empty: all. Likewise the others.
        kind: As place.
        source: As place.
        levels: As place.
        optimisation: As place.
    """

    reason: str
    text: str | None = None
    is_meaning: bool = True
    place: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    optimisation: tuple[str, ...] = ()

    def has(self, cell: Cell) -> bool:
        """Whether a cell is one of them."""
        return all(not getattr(self, name) or value in getattr(self, name) for name, value in cell._asdict().items())


LISTED = (
    Listed(
        reason="a multiplier is one number a tensor, and of two levels each block has its own",
        text="Recipe: no GEMM computes output",
        source=("multiplier",),
        levels=("two",),
    ),
    Listed(
        reason="an expert without tokens has no amax of the step before",
        text="the recipe has delayed scaling",
        kind=("grouped",),
        source=("multiplier",),
    ),
    Listed(
        reason="a function has no place for a state; a layer on DTensors has",
        text="whose state is kept by layers",
        place=("group",),
        source=("multiplier",),
    ),
    Listed(
        reason="what the forward keeps would be other codes than grad_input takes",
        text="Recipe: keep_weight_codes",
        source=("given pair",),
        optimisation=("kept weight codes",),
    ),
    Listed(
        reason="gradients read the values of the forward's codes: a second set serves nobody",
        text="weight has codes of",
        source=("given pair",),
        optimisation=("dequantized gradients", "weight's codes alone"),
    ),
    Listed(
        reason="ends of groups are those of one rank's rows, and no dim of a DTensor",
        text="x is a DTensor; groups are those of one rank",
        place=("DTensor",),
        kind=("grouped",),
    ),
    Listed(
        reason="FSDP frees weights between forward and backward, and kept codes of all of them would stay",
        place=("FSDP",),
        source=("own amax", "multiplier", "given amax"),
        optimisation=("kept weight codes",),
    ),
    Listed(
        reason="delayed scaling has no recipe whose gradients stay in high precision behind it",
        text="Recipe: dequantized_gradients",
        is_meaning=False,
        source=("multiplier",),
        optimisation=("dequantized gradients",),
    ),
    Listed(
        reason="delayed scaling has no recipe whose output stays in high precision",
        text="Recipe: dequantized_output",
        is_meaning=False,
        source=("multiplier",),
        optimisation=("weight's codes alone",),
    ),
    Listed(
        reason="ranks that share an expert's matrix do not reduce its outer amax, and noise is that of a rank's place",
        text="ranks share each expert's matrix",
        is_meaning=False,
        place=("group of two",),
    ),
    Listed(
        reason="the ops of a group and of FSDP in the graph take values; DTensors and stock FSDP2 take codes",
        text="nothing dequantizes in silence",
        is_meaning=False,
        place=("group", "FSDP"),
        source=GIVEN,
    ),
)


# ---------------------------------------------------------------------------------- what is measured


def _measure(cell: Cell, *, graph: bool, is_plain: bool = False) -> Measured:
    """Run a cell, or what it is to be like: by its recipe, on whole tensors of values."""
    recipe, (x, weight, grad, ends) = recipe_of(cell), _tensors(cell.kind)
    place, amaxes = "whole" if is_plain else cell.place, []
    if cell.source == "given amax" and not is_plain:
        slots = recipe.weight, recipe.quantizer_read("weight_for_grad_input")
        is_shared = cell.place == "shared scale"
        amaxes = [weight.float().abs().amax().view(1)] if is_shared else [amax(weight, each) for each in slots]
    quantizers: tuple[Quantizer, ...] = ()
    if place == "known codes":
        sets = sets_of_weight(weight, recipe)
        quantizers = tuple(each.quantizer for each in sets)
        parts = (part for each in sets for part in (each.codes, each.scale, each.outer_scale))
        amaxes = [torch.empty(0) if part is None else part for part in parts]
    if cell.source in GIVEN and not is_plain and place != "known codes":
        weight = _codes(weight, recipe, is_pair=cell.source == "given pair")
    else:
        weight = weight.clone().requires_grad_(cell.source not in GIVEN and cell.optimisation != "frozen weight")
    x = x.clone().requires_grad_(cell.optimisation != "input without gradient")
    has_state = cell.source == "multiplier"
    _, call = CALLS.get((place, cell.kind, has_state)) or CALLS[place, cell.kind, False]

    def run(x: Tensor, weight: Tensor, ends: Tensor, *amaxes: Tensor) -> Tensor:
        return call(x, weight, Given(recipe, amaxes or (None, None), ends, quantizers))

    gpu = "b200" if cell.levels == "two" else "h200"
    with alone() if place == "DTensor" else nullcontext():
        return measured(run, (x, weight, ends, *amaxes), grad, gpu if graph else None)


@cache
def _plain(cell: Cell, *, graph: bool) -> Measured:
    return _measure(cell, graph=graph, is_plain=True)


def _like_plain(cell: Cell) -> Cell:
    """One of all cells that are to be alike."""
    return cell._replace(place="whole", source=cell.source.replace("given amax", "own amax"))


def has_graph(cell: Cell) -> bool:
    """Whether the graph of a cell is looked at: those of DTensors are, where there are several ranks."""
    return cell.place != "DTensor" and not any(each.has(cell) and each.text for each in LISTED)


def _differing(found: Measured, plain: Measured, cell: Cell) -> dict[str, str]:
    """What is not as it is of whole tensors, in words, by kind."""
    wrong = {}
    names = ("y", "gradient", "gradient of the weight")
    bits = zip(names, found.bits, plain.bits, strict=False)
    if words := [f"{name}: {said}" for name, a, b in bits if (said := difference(a, b)) is not None]:
        wrong["bits"] = ", ".join(words)
    if found.kept != plain.kept:
        wrong["kept"] = f"{found.kept} bytes kept, not {plain.kept}"
    # an op that casts by an amax which is known is several nodes, one that finds it too may be one
    if found.nodes.total() > plain.nodes.total() and cell.source != "given amax":
        wrong["nodes"] = f"{found.nodes.total()} nodes, not {plain.nodes.total()}"
    own, others = found.quantizing(), plain.quantizing()
    if own - others or (own != others and not cell.source.startswith("given")):
        wrong["nodes"] = f"quantized by {dict(own)}, not by {dict(others)}"
    return wrong


def outcome(cell: Cell, *, graph: bool = True) -> tuple[str, bool]:
    """What a cell is, in words, and whether it is as it has to be.

    Args:
        cell: Which.
        graph: Whether its graph for a GPU is looked at, too; the words are the same.
    """
    listed = [(number, each) for number, each in enumerate(LISTED, 1) if each.has(cell)]
    errors = [(number, each) for number, each in listed if each.text is not None]
    graph = graph and has_graph(cell)
    try:
        found = _measure(cell, graph=graph)
    except (TypeError, ValueError) as error:
        number = next((number for number, each in errors if each.text.lower() in str(error).lower()), None)
        return (f"**{error}**", False) if number is None else (f"refused ({number})", True)
    if errors:
        return f"**it runs, and is listed as refused: {errors[0][1].reason}**", False
    like = cell._replace(optimisation="all gradients") if listed else cell
    wrong = _differing(found, _plain(_like_plain(like), graph=graph), cell)
    if wrong:
        return f"**{'; '.join(wrong.values())}**", False
    return (f"not done ({listed[0][0]})" if listed else "same"), True
