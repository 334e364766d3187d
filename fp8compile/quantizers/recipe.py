"""Recipe: the quantizer of each operand of a linear layer's three GEMMs.

    output       y_MN  = x_MK  @ w_NK^T    input, weight
    grad_input   dx_MK = dy_MN @ w_NK      grad_output, weight_for_grad_input
    grad_weight  dw_NK = dy_MN^T @ x_MK    grad_output_for_grad_weight, input_for_grad_weight

M is the number of tokens, K in_features, N out_features. Blocks refer to an operand as the layer holds it (x_MK, w_NK,
dy_MN), not as a GEMM transposes it. A GEMM can apply a scale after its whole sum if the scale is constant along the
summed dim; otherwise it applies scales after each block along that dim.
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
    """One of the three GEMMs, (m, k) by (k, n): its name, and the fields of `Recipe` for its two operands.

    ``a_transposed`` and ``b_transposed`` tell whether the layer's tensor is transposed first.
    """

    name: str
    a: str
    b: str
    a_transposed: bool = False
    b_transposed: bool = False

    def oriented(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Return both operands, each transposed by its method ``t`` if this GEMM needs it."""
        return a.t() if self.a_transposed else a, b.t() if self.b_transposed else b


GEMMS = (
    Gemm(name="output", a="input", b="weight", b_transposed=True),
    Gemm(name="grad_input", a="grad_output", b="weight_for_grad_input"),
    Gemm(name="grad_weight", a="grad_output_for_grad_weight", b="input_for_grad_weight", a_transposed=True),
)

# the three tensors of a layer, each with the recipe's fields (slots) for the GEMMs that read it
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
    """Return the kind of GEMM that multiplies (m, k) in blocks ``a`` by (k, n) in blocks ``b``.

    Each block has a scale. The kind is ``"tensorwise"``, ``"rowwise"`` or ``"blockwise"``; None if no GEMM can.
    """
    if a == b == (-1, -1):
        return "tensorwise"
    if a == (1, -1) and b == (-1, 1):
        return "rowwise"
    along_k = a[1]
    if along_k > 1 and b[0] == along_k and a[0] in (1, along_k) and b[1] in (1, along_k):
        return "blockwise"
    return None


# slots of the gradients' GEMMs, and the slots of the forward for the same tensor
FORWARD_SLOTS = {"weight_for_grad_input": "weight", "input_for_grad_weight": "input"}


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe(Constant):
    """A quantizer for each operand of a linear layer's three GEMMs; None for high precision.

    Attributes:
        input: Quantizer of x_MK for the output's GEMM; M is the number of tokens, K in_features.
        weight: Quantizer of w_NK for the output's GEMM; N is out_features.
        grad_output: Quantizer of dy_MN for grad_input's GEMM.
        weight_for_grad_input: Quantizer of w_NK for grad_input's GEMM.
        grad_output_for_grad_weight: Quantizer of dy_MN for grad_weight's GEMM.
        input_for_grad_weight: Quantizer of x_MK for grad_weight's GEMM.
        fast_accumulation_output: Whether the output's GEMM may accumulate with the tensor core's reduced precision. If
            not, partial sums are promoted to float32 (a "split accumulator"). GEMMs without such a mode (blockwise,
            MX, on a CPU) ignore it.
        fast_accumulation_grad_input: The same for grad_input's GEMM.
        fast_accumulation_grad_weight: The same for grad_weight's GEMM.
        keep_weight_codes: Whether compiled code on a GPU writes a weight's codes for grad_input together with the
            codes for the output, and keeps them for the backward. The weight is read once instead of twice. Until the
            backward, the codes take one byte of memory for each element, or half a byte in four bits. Codes are not
            kept if a side of the weight is not a multiple of 32, under FSDP, which frees weights after the forward, or
            in a checkpointed region (except by PyTorch 2.11).
        cache_weights: Whether a layer keeps the codes of its plain weight from one optimizer step to the next, instead
            of making codes in each forward and backward of every micro-batch. The codes take one byte of memory for
            each element of the weight (under FSDP2, of the rank's shard), or two bytes if output and grad_input read
            different codes. The bits are the same. See docs/memory.md.
        dequantized_output: Whether the output's GEMM multiplies dequantized codes, rounded to the layer's dtype, in
            high precision. This is for operands whose codes no GEMM multiplies: only one operand has a quantizer, and
            the other stays in high precision (W4A16 quantizes ``weight`` alone), or no GEMM takes both kinds of codes.
            Gradients ignore the rounding: the weight's gradient is ``dy^T @ x``.
        dequantized_gradients: Whether a gradient whose GEMM stays in high precision multiplies the dequantized codes
            that the forward multiplied, rounded to the layer's dtype, instead of x and w. The result is the gradient
            of the function that the forward computed. An operand without codes is multiplied as it is.
        emulate: Whether a GPU without a GEMM for these quantizers multiplies the exact values in float64, slowly,
            instead of raising. A CPU always multiplies in this way.
        by_mx: Whether a GPU of compute capability 12.0 multiplies tensorwise and rowwise codes by its MX GEMM, with
            scales of 1, and multiplies the product by the scales. GeForce cards (RTX 50) do MX at twice the rate of
            plain FP8; RTX PRO cards have one rate for both, and gain nothing. The codes are the same; the result is
            rounded to float32 for each scale. Other devices, and products of experts, ignore it.

    Raises:
        ValueError: Only one operand of a GEMM is quantized, or no GEMM can multiply the two, except for the output's
            GEMM with ``dequantized_output``. Two quantizers of one tensor with delayed scaling differ, or those of two
            tensors in ``history`` or ``algorithm``. ``keep_weight_codes`` is set, and output and grad_input need
            different codes. ``dequantized_output`` or ``dequantized_gradients`` is set, and there are no codes, no
            gradient in high precision (for the latter), or delayed scaling.
        TypeError: An operand's field is neither a quantizer nor None, or a switch is not a bool.
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
    cache_weights: bool = False
    dequantized_output: bool = False
    dequantized_gradients: bool = False
    emulate: bool = False
    by_mx: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for gemm in GEMMS:
            self._check_slot(gemm.a)
            self._check_slot(gemm.b)
            if not (gemm is GEMMS[0] and self.dequantized_output is True):
                self._check_pair(gemm)
        high = "dequantized_output", "dequantized_gradients"
        switches = ("emulate", "by_mx", "keep_weight_codes", "cache_weights", *high)
        for switch in (*switches, *(f"fast_accumulation_{gemm.name}" for gemm in GEMMS)):
            if type(getattr(self, switch)) is not bool:
                raise TypeError(f"Recipe: {switch} is {getattr(self, switch)!r}; it is True or False.")
        self._check_delayed()
        self._check_kept()
        self._check_dequantized_output()
        self._check_dequantized()

    def _check_kept(self) -> None:
        if self.keep_weight_codes and (self.weight is None or self.weight != self.weight_for_grad_input):
            raise ValueError(
                f"Recipe: keep_weight_codes, and weight is {self.weight!r}, weight_for_grad_input "
                f"{self.weight_for_grad_input!r}: what the forward keeps would be other codes than grad_input takes. "
                "Give both the same quantizer, one of a whole tensor or of square blocks, or leave keep_weight_codes "
                "out."
            )

    def _check_dequantized_output(self) -> None:
        if not self.dequantized_output:
            return
        given = [each for each in (self.input, self.weight) if each is not None]
        if not given or self.history():
            raise ValueError(
                f"Recipe: dequantized_output, which multiplies values of codes by current scaling; input is "
                f"{self.input!r} and weight {self.weight!r}. Give one of them a quantizer with current scaling, or "
                "leave dequantized_output out."
            )

    def _check_dequantized(self) -> None:
        if not self.dequantized_gradients:
            return
        in_high_precision = any(self.quantizers(gemm) is None for gemm in GEMMS[1:])
        if self.input is self.weight is None or not in_high_precision or self.history():
            raise ValueError(
                "Recipe: dequantized_gradients, which is of gradients in high precision behind an output of codes by "
                f"current scaling; input is {self.input!r}, grad_output {self.grad_output!r} and "
                f"grad_output_for_grad_weight {self.grad_output_for_grad_weight!r}. Give the output quantizers and a "
                "gradient none, or leave dequantized_gradients out."
            )

    def _check_delayed(self) -> None:
        """Raise a ValueError if one tensor has two different `DelayedScaling`.

        Also raise one if tensors differ in history length or algorithm: a layer updates all histories in one step.
        """
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
        """The DelayedScaling of input, weight and grad_output; None for a tensor without one."""
        found: tuple[DelayedScaling | None, ...] = ()
        for slots in TENSORS.values():
            given = [getattr(self, slot) for slot in slots]
            found += (next((quantizer for quantizer in given if isinstance(quantizer, DelayedScaling)), None),)
        return found

    def history(self) -> int:
        """Number of amaxes that delayed scaling keeps for each tensor; 0 without delayed scaling."""
        # issubclass, because each eager call comes here, and isinstance of an opaque class takes twice as long
        for slot in SLOTS:
            if issubclass(type(given := getattr(self, slot)), DelayedScaling):
                return given.history
        return 0

    def shares_weight_codes(self) -> bool:
        """Whether the GEMMs of output and grad_input read the same codes of a weight.

        True also if grad_input's GEMM reads these codes dequantized.
        """
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
                "two FP8 operands or two in high precision. Give both, or None for both. dequantized_output=True lets "
                "the output multiply one operand's values in high precision."
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
        """The quantizers of both operands of a GEMM; None if the GEMM stays in high precision.

        The quantizers' blocks refer to tensors as the layer holds them. With `dequantized_output` the output's GEMM
        stays in high precision.
        """
        a, b = getattr(self, gemm.a), getattr(self, gemm.b)
        return None if a is None or (gemm is GEMMS[0] and self.dequantized_output) else (a, b)

    def quantizer_read(self, slot: str) -> Quantizer | None:
        """The quantizer of the codes that a GEMM reads for its operand; None if the operand has no codes.

        ``slot`` is the operand's field, such as ``"weight"``. With `dequantized_gradients`, a gradient's GEMM in high
        precision reads the forward's codes.
        """
        return getattr(self, FORWARD_SLOTS.get(slot, slot) if self.is_dequantized(slot) else slot)

    def is_dequantized(self, slot: str) -> bool:
        """Whether a GEMM in high precision reads an operand as dequantized codes.

        ``slot`` is the operand's field, such as ``"weight"``. The GEMM of a gradient reads the codes that the forward
        reads.
        """
        if slot in FORWARD_SLOTS.values():
            return self.dequantized_output and getattr(self, slot) is not None
        is_high = self.dequantized_gradients and slot in FORWARD_SLOTS and getattr(self, slot) is None
        return is_high and getattr(self, FORWARD_SLOTS[slot]) is not None

    def gemm_config(self, gemm: Gemm) -> GemmConfig:
        """Return the options of one of the three GEMMs: accumulation, emulation, use of the MX GEMM."""
        return _gemm_config(getattr(self, f"fast_accumulation_{gemm.name}"), self.emulate, self.by_mx)


@cache
def _gemm_config(fast_accumulation: bool, emulate: bool, by_mx: bool) -> GemmConfig:
    return GemmConfig(fast_accumulation=fast_accumulation, emulate=emulate, by_mx=by_mx)
