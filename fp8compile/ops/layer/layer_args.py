"""LayerArgs: the arguments that all ops of a layer share, after their operands.

offs        WHICH tokens: the ends of groups of rows, such as those of experts; None for one matrix
known       WHAT is known of the weight: a list of tensors (`Known`); empty if nothing is
sizes       sizes of the shards on all ranks, symbolic; empty unless the sharding needs them
sharding    WHERE the weight is stored (`LayerSharding`), `UNSHARDED` if all tensors are full
recipe      quantizers of the operands
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fp8compile import _compat
from fp8compile.layout.four_bit_packing import packed_dim, with_a_code_a_byte
from fp8compile.layout.quantized import STACK, WHOLE, Plain, Quantized, TensorLayout
from fp8compile.ops.layer.check_recipe_of_groups import check_cut_of_groups, check_recipe_of_groups
from fp8compile.ops.layer.known import Known
from fp8compile.ops.layer.layer_sharding import LayerSharding, OverFsdp, OverGroup
from fp8compile.ops.layer.make_weight_codes import quantizer_of_codes
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Operands, Phase
from fp8compile.quantizers import Gemm, Recipe
from fp8compile.quantizers.blocks import as_matrix

__all__ = ["LayerArgs", "check_layer", "part_of_tokens"]

NOTHING = Known()


class LayerArgs(NamedTuple):
    """Which tokens, what is known of the weight, where it is stored, and the recipe; see the head of this file."""

    offs: Tensor | None
    known: Known  # of the GEMM that the op computes
    known_later: Known | None  # of grad_input, if an op that computes an output has two sets
    sizes: Sequence[int]
    sharding: LayerSharding
    recipe: Recipe

    @classmethod
    def of(
        cls,
        offs: Tensor | None,
        known: Sequence[Tensor | None],
        sizes: Sequence[int],
        sharding: LayerSharding,
        recipe: Recipe,
    ) -> LayerArgs:
        """Read an op's last arguments; their annotations are the schemas of all ops."""
        later = Known(*Known.last_set(known)) if len(known) > len(Known._fields) else None
        own = Known.first_set(known) if known else NOTHING
        return cls(offs, own, later, sizes, _compat.unwrapped(sharding), recipe)

    def operands(self, phase: Phase, weight: Tensor | None = None, role: str = "", /, **given: Any) -> Operands:
        """Return the `Operands` of one GEMM.

        If the GEMM reads the weight, ``weight`` is the weight, and ``role`` is its field in the recipe. Other keyword
        arguments are fields of `Operands`.
        """
        # operands of groups have a code a byte; how given codes are packed is told by the recipe as the user gave it
        recipe, known = self.recipe if self.offs is None else with_a_code_a_byte(self.recipe), self.known
        if known.codes is not None and weight is not None:
            assert "weight" not in given, "FP8 data of the weight is given twice: by `known`, and by a QuantizedTensor"
            quantizer = quantizer_of_codes(known.codes, weight, role, self.recipe)
            own: Any = {"codes": known.codes, "scale": known.scale, "outer_scale": known.outer_scale}
            given["weight"] = Quantized(**own, quantizer=quantizer, layout=STACK if weight.ndim == 3 else WHOLE)
        given = {"multiplier": known.multiplier} | given  # delayed scaling's forward gives its own
        given["fsdp_shards"] = self.sharding.fsdp_shards()
        return Operands(recipe, phase, weight_amax=known.amax, outer_amax=known.outer_amax, **given)


def part_of_tokens(tokens: Tensor, layout: TensorLayout) -> Plain:
    """Return the tokens as an operand of a GEMM: flattened to a matrix, unless ranks shard one of their dims."""
    return Plain(tokens if layout.cuts else as_matrix(tokens), layout)


def _why_no_history(sharding: LayerSharding) -> str:
    if isinstance(sharding, OverGroup):
        return (
            "linear: delayed scaling is not supported by a function of shards, because only layers keep its state. "
            "Use a recipe with current scaling, or a fp8compile.Linear on DTensors."
        )
    if isinstance(sharding, OverFsdp):
        return "linear: this op does not support delayed scaling of FSDP's shards. Use delayed_linear."
    return (
        "linear: the recipe uses delayed scaling, whose scales come from previous steps, but no state was passed. "
        "Create one per layer with fp8compile.DelayedState.initial(recipe), and pass it as state=; or use "
        "fp8compile.Linear or fp8compile.convert, which keep it in buffers."
    )


def _check_codes(name: str, read: Gemm, sharding: LayerSharding, recipe: Recipe) -> None:
    if isinstance(sharding, OverGroup) and sharding.ranks > 1:
        why = (
            "the weight is sharded over a process group, and a shard's data does not say which "
            "blocks other ranks share. Omit the data; or, without `offs`, pass DTensors, whose weight may be quantized"
        )
    elif isinstance(sharding, OverFsdp) and len(sharding.shards.sizes) > 1:
        why = "FSDP shards the weight, and the op gathers what it quantizes itself. Omit the data, or gather it"
    elif read is GRAD_WEIGHT or recipe.quantizer_read(read.b) is None:
        why = f"{read.name} does not read it with this recipe. Omit the data, or pass None for its set"
    else:
        return
    raise ValueError(f"{name}: `known` has FP8 data of the weight, but {why}.")


def _check_known(name: str, gemm: Gemm, args: LayerArgs) -> None:
    known, later, offs, recipe = args.known, args.known_later, args.offs, args.recipe
    if later is not None and gemm is not OUTPUT:
        raise ValueError(
            f"{name}: `known` has two sets, which only the output has. Pass one: known[{len(known)}:], of grad_input."
        )
    has_one = gemm is OUTPUT and later is None
    for read, each in ((gemm, known), (GRAD_INPUT, known if has_one else later or Known())):
        if offs is not None and (each.amax is not None or each.outer_amax is not None):
            raise ValueError(
                f"{name}: `known` has an amax of the weight, but with `offs` each matrix of the weight has its own "
                "scales. Omit the amax."
            )
        if each.codes is not None:
            _check_codes(name, read, args.sharding, recipe)
    if has_one and (known.codes is not None or known.amax is not None):
        packs: Any = offs is not None and recipe.weight and packed_dim(recipe.weight)  # each GEMM along its own dim
        if packs or not recipe.shares_weight_codes():
            raise ValueError(
                f"{name}: `known` has one set with FP8 data or amaxes of blocks, but with this recipe output and "
                "grad_input read different FP8 data of the weight. Pass two sets, one for each."
            )


def check_layer(args: LayerArgs, gemm: Gemm, *, has_state: bool = False) -> None:
    """Raise a ValueError if the op that computes ``gemm``, perhaps with state, supports no such arguments together."""
    offs, sharding, recipe = args.offs, args.sharding, args.recipe
    name = "linear" if gemm is OUTPUT else gemm.name
    if _compat.is_stand_in(recipe):  # checked when the op runs, because PyTorch 2.11 traces no method of a recipe
        return
    if offs is not None:
        check_recipe_of_groups(recipe)
    elif gemm is OUTPUT and not has_state and recipe.history():  # gradients read the multipliers in `known`
        raise ValueError(_why_no_history(sharding))
    if args.known is not NOTHING:
        _check_known(name, gemm, args)
    if isinstance(sharding, OverGroup) and offs is not None:
        check_cut_of_groups(recipe, sharding.ranks)
        if sharding.sequence_dim is not None:
            raise ValueError(
                f"{name}: `sequence_dim` is {sharding.sequence_dim}, which is not supported with `offs`, because "
                "groups of rows can begin on any rank. Pass all rows on every rank, and sequence_dim=None."
            )
