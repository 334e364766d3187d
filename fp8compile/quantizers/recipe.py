"""Recipe: which quantizer each operand of a linear layer's three GEMMs gets.

    output       y_MN  = x_MK  @ w_NK^T    input, weight
    grad_input   dx_MK = dy_MN @ w_NK      grad_output, weight_for_grad_input
    grad_weight  dw_NK = dy_MN^T @ x_MK    grad_output_for_grad_weight, input_for_grad_weight

M tokens, K in_features, N out_features. A block is that of the operand as the layer holds it (x_MK, w_NK, dy_MN), not
as a GEMM transposes it. A GEMM sums over one dim: it can undo a scale outside that sum, or block by block along it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from fp8compile.formats import E5M2
from fp8compile.quantizers.blocks import Block
from fp8compile.quantizers.constant import Constant
from fp8compile.quantizers.delayed_scaling import DelayedScaling
from fp8compile.quantizers.gemm_config import GemmConfig
from fp8compile.quantizers.quantizer import Quantizer

__all__ = ["GEMMS", "TENSORS", "Gemm", "Recipe", "gemm_kind"]


class Gemm(NamedTuple):
    """One of the three products: its name, and the recipe's fields for its operands (m, k) and (k, n).

    ``a_transposed``, ``b_transposed``: whether the operand enters the product transposed.
    """

    name: str
    a: str
    b: str
    a_transposed: bool = False
    b_transposed: bool = False

    def oriented(self, a: Any, b: Any) -> tuple[Any, Any]:
        """The operands as they enter the product, transposed if needed; they are tensors or have ``t()``."""
        return a.t() if self.a_transposed else a, b.t() if self.b_transposed else b


GEMMS = (
    Gemm(name="output", a="input", b="weight", b_transposed=True),
    Gemm(name="grad_input", a="grad_output", b="weight_for_grad_input"),
    Gemm(name="grad_weight", a="grad_output_for_grad_weight", b="input_for_grad_weight", a_transposed=True),
)

# the three tensors of a layer, each with the slots in which it is an operand
TENSORS = {
    "input": ("input", "input_for_grad_weight"),
    "weight": ("weight", "weight_for_grad_input"),
    "grad_output": ("grad_output", "grad_output_for_grad_weight"),
}
SLOTS = tuple(slot for slots in TENSORS.values() for slot in slots)

ALLOWED_PAIRS = (
    "(-1, -1) by (-1, -1) tensorwise; (1, -1) by (-1, 1) rowwise; (1, n) by (n, 1), (1, n) by (n, n) and (n, n) by "
    "(n, 1) blockwise with one n"
)


def gemm_kind(a: Block, b: Block) -> str | None:
    """How a product (m, k) by (k, n) with these blocks undoes its scales.

    Returns:
        ``"tensorwise"``, ``"rowwise"``, ``"blockwise"``, or None where no GEMM can.
    """
    if a == b == (-1, -1):
        return "tensorwise"
    if a == (1, -1) and b == (-1, 1):
        return "rowwise"
    along_k = a[1]
    if along_k > 1 and b[0] == along_k and a[0] in (1, along_k) and b[1] in (1, along_k):
        return "blockwise"
    return None


# slots of the gradients, and those of the forward in whose place they read the same tensor
FORWARD_SLOTS = {"weight_for_grad_input": "weight", "input_for_grad_weight": "input"}


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe(Constant):
    """A quantizer for each operand of the three GEMMs of a linear layer; None keeps an operand in high precision.

    Attributes:
        input: x_MK of the output.
        weight: w_NK of the output.
        grad_output: dy_MN of grad_input.
        weight_for_grad_input: w_NK of grad_input.
        grad_output_for_grad_weight: dy_MN of grad_weight.
        input_for_grad_weight: x_MK of grad_weight.
        fast_accumulation_output: Whether the output's GEMM may accumulate in the tensor core's fewer bits. If off,
            partial sums are promoted to float32 (a "split accumulator"). A GEMM without such a
            mode (blockwise, MX, on a CPU) has none to use.
        fast_accumulation_grad_input: The same for grad_input's GEMM.
        fast_accumulation_grad_weight: The same for grad_weight's GEMM.
        keep_weight_codes: Whether compiled code on a GPU writes a weight's codes for grad_input together with those
            for the output, and keeps them for the backward: a weight is read once instead of twice, for a
            byte an element of memory in between, half a byte in four bits. Codes are the same. None are kept if a
            side of the weight is not a multiple of 32, under FSDP, which frees weights in between, and in a
            checkpointed region (PyTorch 2.11 keeps those).
        dequantized_gradients: Whether gradients whose GEMM stays in high precision multiply the values of the codes
            that the forward multiplied, rounded to the dtype of the layer, in place of x and w themselves: gradients
            of what the forward computed.
        emulate: Whether a GPU without a GEMM for these quantizers multiplies their exact values in float64, slowly,
            instead of raising. A CPU always does.

    Raises:
        ValueError: Only one operand of a GEMM is quantized, no GEMM can multiply the two, two slots with delayed
            scaling do not agree, codes of a weight are to be kept that do not serve grad_input, or gradients are to
            multiply values of codes that there are not.
        TypeError: A slot holds no quantizer, or a switch no bool.
    """

    input: Quantizer | None = None
    weight: Quantizer | None = None
    grad_output: Quantizer | None = None
    weight_for_grad_input: Quantizer | None = None
    grad_output_for_grad_weight: Quantizer | None = None
    input_for_grad_weight: Quantizer | None = None
    fast_accumulation_output: bool = True
    fast_accumulation_grad_input: bool = False
    fast_accumulation_grad_weight: bool = False
    keep_weight_codes: bool = False
    dequantized_gradients: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for gemm in GEMMS:
            self._check_slot(gemm.a)
            self._check_slot(gemm.b)
            self._check_pair(gemm)
        switches = ("emulate", "keep_weight_codes", "dequantized_gradients")
        for switch in (*switches, *(f"fast_accumulation_{gemm.name}" for gemm in GEMMS)):
            if type(getattr(self, switch)) is not bool:
                raise TypeError(f"Recipe: {switch} is {getattr(self, switch)!r}; it is True or False.")
        self._check_delayed()
        self._check_kept()
        self._check_dequantized()

    def _check_kept(self) -> None:
        if self.keep_weight_codes and (self.weight is None or self.weight != self.weight_for_grad_input):
            raise ValueError(
                f"Recipe: keep_weight_codes, and weight is {self.weight!r}, weight_for_grad_input "
                f"{self.weight_for_grad_input!r}: what the forward keeps would be other codes than grad_input takes. "
                "Give both the same quantizer, one of a whole tensor or of square blocks, or leave keep_weight_codes "
                "out."
            )

    def _check_dequantized(self) -> None:
        if not self.dequantized_gradients:
            return
        in_high_precision = any(self.quantizers(gemm) is None for gemm in GEMMS[1:])
        if self.input is None or not in_high_precision or self.history():
            raise ValueError(
                "Recipe: dequantized_gradients, which is of gradients in high precision behind an output of codes by "
                f"current scaling; input is {self.input!r}, grad_output {self.grad_output!r} and "
                f"grad_output_for_grad_weight {self.grad_output_for_grad_weight!r}. Give the output quantizers and a "
                "gradient none, or leave dequantized_gradients out."
            )

    def _check_delayed(self) -> None:
        """Raise unless each tensor has one delayed quantizer, and the layer one length of histories."""
        for tensor, slots in TENSORS.items():
            given = [getattr(self, slot) for slot in slots]
            if all(isinstance(quantizer, DelayedScaling) for quantizer in given) and given[0] != given[1]:
                raise ValueError(
                    f"Recipe: {tensor} has one history, and {slots[0]} and {slots[1]} would read it differently: "
                    f"{given[0]!r} and {given[1]!r}. Give both the same DelayedScaling."
                )
        kinds = sorted({(q.history, q.algorithm) for q in self.delayed() if q is not None})
        if len(kinds) > 1:
            raise ValueError(
                f"Recipe: DelayedScaling with history and algorithm {' and '.join(map(str, kinds))}; a layer updates "
                "all its histories in one step. Give every DelayedScaling of a recipe the same two."
            )

    def delayed(self) -> tuple[DelayedScaling | None, ...]:
        """The delayed quantizers of input, weight and grad_output; None for a tensor without one."""
        found: tuple[DelayedScaling | None, ...] = ()
        for slots in TENSORS.values():
            given = [getattr(self, slot) for slot in slots]
            found += (next((quantizer for quantizer in given if isinstance(quantizer, DelayedScaling)), None),)
        return found

    def history(self) -> int:
        """Number of amaxes that delayed scaling remembers for a tensor; 0 for a recipe without it."""
        # every eager call asks; `isinstance` of an opaque class takes twice as long
        for slot in SLOTS:
            if issubclass(type(given := getattr(self, slot)), DelayedScaling):
                return given.history
        return 0

    def shares_weight_codes(self) -> bool:
        """Whether one set of a weight's codes serves both the output and grad_input, as codes or by values."""
        quantizer = self.weight
        return quantizer is not None and quantizer == self.quantizer_read("weight_for_grad_input")

    def _check_slot(self, slot: str) -> None:
        value = getattr(self, slot)
        if value is not None and not isinstance(value, Quantizer):
            raise TypeError(
                f"Recipe: {slot} is {value!r}; it is a quantizer, fp8compile.CurrentScaling(...) for one, or None for "
                "high precision."
            )

    def _check_pair(self, gemm: Gemm) -> None:
        a, b = getattr(self, gemm.a), getattr(self, gemm.b)
        if (a is None) != (b is None):
            given, missing = (gemm.a, gemm.b) if b is None else (gemm.b, gemm.a)
            raise ValueError(
                f"Recipe: the GEMM of {gemm.name} has a quantizer for {given} and none for {missing}; a GEMM takes "
                "two FP8 operands or two in high precision. Give both, or None for both."
            )
        if a is None:
            return
        block_a = a.transposed().block if gemm.a_transposed else a.block
        block_b = b.transposed().block if gemm.b_transposed else b.block
        if gemm_kind(block_a, block_b) is None:
            raise ValueError(
                f"Recipe: no GEMM computes {gemm.name} from {gemm.a} with block {a.block} and {gemm.b} with block "
                f"{b.block}: it multiplies blocks {block_a} over (m, k) by {block_b} over (k, n). Allowed there: "
                f"{ALLOWED_PAIRS}."
            )
        if a.transform() != b.transform():
            raise ValueError(
                f"Recipe: the GEMM of {gemm.name} has transform {a.transform()} for {gemm.a} and {b.transform()} for "
                f"{gemm.b}; only of two operands with the same one is the product that of the two. Give both the same."
            )
        if a.gemm_format() == b.gemm_format() == E5M2:
            raise ValueError(
                f"Recipe: the GEMM of {gemm.name} has e5m2 for {gemm.a} and for {gemm.b}; tensor cores multiply e4m3 "
                "by e4m3 or by e5m2. Make one of them e4m3."
            )

    def quantizers(self, gemm: Gemm) -> tuple[Quantizer, Quantizer] | None:
        """The quantizers of a GEMM's operands as the layer holds them, or None: the GEMM stays in high precision."""
        a, b = getattr(self, gemm.a), getattr(self, gemm.b)
        return None if a is None else (a, b)

    def quantizer_read(self, slot: str) -> Quantizer | None:
        """The quantizer of the codes that a product reads for a slot; the forward's with `dequantized_gradients`."""
        return getattr(self, FORWARD_SLOTS.get(slot, slot) if self.is_dequantized(slot) else slot)

    def is_dequantized(self, slot: str) -> bool:
        """Whether a product in high precision reads the values of the forward's codes for a slot."""
        return self.dequantized_gradients and slot in FORWARD_SLOTS and getattr(self, slot) is None

    def gemm_config(self, gemm: Gemm) -> GemmConfig:
        """Options that a GEMM may use."""
        return _gemm_config(getattr(self, f"fast_accumulation_{gemm.name}"), self.emulate)


@cache
def _gemm_config(fast_accumulation: bool, emulate: bool) -> GemmConfig:
    """A `GemmConfig`, made and checked once for each of four combinations, because every product asks for one."""
    return GemmConfig(fast_accumulation=fast_accumulation, emulate=emulate)
