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
from typing import NamedTuple

import torch
from measured_layers import Measured, alone, measured
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import fp8compile as f8
from fp8compile import ops
from fp8compile.layout.quantized import STACK, WHOLE, Plain, Quantized
from fp8compile.ops.amax import amax
from fp8compile.ops.layer.fsdp_rows import Rows
from fp8compile.ops.layer.known import Known
from fp8compile.ops.layer.layer_sharding import UNSHARDED, LayerSharding, OverFsdp, OverGroup
from fp8compile.ops.layer.make_weight_codes import sets_of_weight
from fp8compile.ops.layer.quantize_over_ranks import quantize_part
from fp8compile.quantizers import GEMMS, Recipe
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
    return replace(f8.recipes.nvfp4(), weight=f8.DelayedScaling(history=HISTORY), weight_lifetime="call")


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
    recipe = replace(RECIPES[source, cell.levels](), weight_lifetime="call")
    if cell.optimisation == "kept weight codes":
        return replace(recipe, weight_lifetime="pass")
    if cell.optimisation == "dequantized gradients":
        roles = dict.fromkeys(role for gemm in GEMMS[1:] for role in (gemm.a, gemm.b))
        return replace(recipe, **roles, dequantized_gradients=True)
    if cell.optimisation == "weight's codes alone":  # of one-sided products: W4A16, W8A16
        roles = dict.fromkeys(role for gemm in GEMMS[1:] for role in (gemm.a, gemm.b))
        return replace(recipe, **roles, input=None, dequantized_output=True, dequantized_gradients=True)
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
        known: What is known of the weight.
        ends: Of the groups.
    """

    recipe: Recipe
    known: Sequence[Tensor | None]
    ends: Tensor


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
    return ops.linear(*_dtensors(x, weight), None, None, given.known, [], UNSHARDED, given.recipe).to_local()


def _dtensor_delayed(x: Tensor, weight: Tensor, given: Given) -> Tensor:
    state = [_placed(each, Replicate()) for each in _state()]
    tail = None, [], [], UNSHARDED, given.recipe
    return ops.delayed_linear(*_dtensors(x, weight), None, None, None, *state, None, *tail)[0].to_local()


def _dtensor_grouped(x: Tensor, weight: Tensor, given: Given) -> Tensor:
    return f8.grouped_linear(*_dtensors(x, weight), given.ends, recipe=given.recipe).to_local()


def _linear(sharding: LayerSharding, sizes: Sequence[int] = (), *, grouped: bool = False) -> Call:
    def call(x: Tensor, weight: Tensor, given: Given) -> Tensor:
        offs = given.ends if grouped else None
        return ops.linear(x, weight, None, offs, given.known, sizes, sharding, given.recipe)

    return call


def _delayed(x: Tensor, weight: Tensor, given: Given) -> Tensor:
    tail = None, [], [], UNSHARDED, given.recipe
    return ops.delayed_linear(x, weight, None, None, None, *_state(), None, *tail)[0]


def _fsdp_delayed(x: Tensor, weight: Tensor, given: Given) -> Tensor:
    state = torch.zeros(3), torch.zeros(1), None, _state()[1], None
    tail = None, [], [], OverFsdp(Rows.alone(OUT, "bfloat16")), given.recipe
    return ops.delayed_linear(x, weight, None, *state, *tail)[0]


ONE = OverGroup(weight_dim=0, ranks=1, rank=0, group="")
# by where, what and whether there is a state: how a layer is called
CALLS: dict[tuple[str, str, bool], Call] = {
    ("whole", "dense", False): _linear(UNSHARDED),
    ("whole", "dense", True): _delayed,
    ("shared scale", "dense", False): _linear(UNSHARDED),
    ("known codes", "dense", False): _linear(UNSHARDED),
    ("known codes", "grouped", False): _linear(UNSHARDED, grouped=True),
    ("whole", "grouped", False): _linear(UNSHARDED, grouped=True),
    ("group", "dense", False): _linear(ONE, [OUT]),
    ("group", "grouped", False): _linear(ONE, [OUT], grouped=True),
    # what it refuses, it refuses before it sends anything
    ("group of two", "grouped", False): _linear(replace(ONE, ranks=2), [OUT, OUT], grouped=True),
    ("FSDP", "dense", False): _linear(OverFsdp(Rows.alone(OUT, "bfloat16"))),
    ("FSDP", "dense", True): _fsdp_delayed,
    ("FSDP", "grouped", False): _linear(OverFsdp(Rows.alone(EXPERTS, "bfloat16")), grouped=True),
    ("DTensor", "dense", False): _dtensor_linear,
    ("DTensor", "dense", True): _dtensor_delayed,
    ("DTensor", "grouped", False): _dtensor_grouped,
}


def takes_amax(place: str, kind: str) -> bool:
    """Whether a layer may be told the amax of its weight; stacked matrices have one each, which nothing computes."""
    return kind == "dense" and (place, kind, False) in CALLS and place != "known codes"


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
        text="Recipe: no GEMM supports the blocks of output",
        source=("multiplier",),
        levels=("two",),
    ),
    Listed(
        reason="an expert without tokens has no amax of the step before",
        text="delayed scaling is not supported, because it keeps one amax per tensor",
        kind=("grouped",),
        source=("multiplier",),
    ),
    Listed(
        reason="a function has no place for a state; a layer on DTensors has",
        text="is not supported by a function of shards",
        place=("group",),
        source=("multiplier",),
    ),
    Listed(
        reason="weight_lifetime='pass' requires the same quantizer for weight and weight_for_grad_input",
        text="Recipe: weight_lifetime",
        source=("given pair",),
        optimisation=("kept weight codes",),
    ),
    Listed(
        reason="gradients read the values of the forward's codes: a second set serves nobody",
        text="weight was quantized ",
        source=("given pair",),
        optimisation=("dequantized gradients", "weight's codes alone"),
    ),
    Listed(
        reason="ends of groups are those of one rank's rows, and no dim of a DTensor",
        text="`x` is a DTensor, but groups are local to a rank",
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
        text="the matrix of each expert is sharded over ranks",
        is_meaning=False,
        place=("group of two",),
    ),
    Listed(
        reason="the ops of a group and of FSDP in the graph take values; DTensors and stock FSDP2 take codes",
        text="tensors are never dequantized implicitly",
        is_meaning=False,
        place=("group", "FSDP"),
        source=GIVEN,
    ),
)


# ---------------------------------------------------------------------------------- what is measured


def _measure(cell: Cell, *, graph: bool, is_plain: bool = False) -> Measured:
    """Run a cell, or what it is to be like: by its recipe, on whole tensors of values."""
    recipe, (x, weight, grad, ends) = recipe_of(cell), _tensors(cell.kind)
    place, known = "whole" if is_plain else cell.place, []
    if cell.source == "given amax" and not is_plain:
        quantizers = recipe.weight, recipe.quantizer_read("weight_for_grad_input")
        known = [part for each in quantizers for part in Known(amax=amax(weight, each))]
        if cell.place == "shared scale":
            known = [*Known(outer_amax=weight.float().abs().amax().view(1))]
    if place == "known codes":
        known = Known.sets(*sets_of_weight(weight, recipe))
    if cell.source in GIVEN and not is_plain and place != "known codes":
        weight = _codes(weight, recipe, is_pair=cell.source == "given pair")
    else:
        weight = weight.clone().requires_grad_(cell.source not in GIVEN and cell.optimisation != "frozen weight")
    x = x.clone().requires_grad_(cell.optimisation != "input without gradient")
    has_state = cell.source == "multiplier"
    call = CALLS.get((place, cell.kind, has_state)) or CALLS[place, cell.kind, False]
    places = [index for index, each in enumerate(known) if each is not None]

    def run(x: Tensor, weight: Tensor, ends: Tensor, *given: Tensor) -> Tensor:
        own = dict(zip(places, given, strict=True))
        return call(x, weight, Given(recipe, [own.get(index) for index in range(len(known))], ends))

    gpu = "b200" if cell.levels == "two" else "h200"
    with alone() if place == "DTensor" else nullcontext():
        return measured(run, (x, weight, ends, *(known[index] for index in places)), grad, gpu if graph else None)


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
