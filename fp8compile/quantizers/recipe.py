"""Recipe: the quantizer of each operand of a linear layer's three GEMMs.

    output       y_MN  = x_MK  @ w_NK^T    input, weight
    grad_input   dx_MK = dy_MN @ w_NK      grad_output, weight_for_grad_input
    grad_weight  dw_NK = dy_MN^T @ x_MK    grad_output_for_grad_weight, input_for_grad_weight

M is the number of tokens, K in_features, N out_features. Blocks refer to an operand as the layer holds it (x_MK, w_NK,
dy_MN), not as a GEMM transposes it. A GEMM can apply a scale after its whole sum if the scale is constant along the
summed dim; otherwise it applies scales after each block along that dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from fp8compile.formats import E5M2
from fp8compile.quantizers.blocks import Block
from fp8compile.quantizers.constant import Constant
from fp8compile.quantizers.delayed_scaling import DelayedScaling
from fp8compile.quantizers.gemm_config import GemmConfig
from fp8compile.quantizers.lifetime_flags import accept_lifetime_flags, lifetime_of_flags
from fp8compile.quantizers.quantizer import Quantizer

__all__ = ["CALL", "GEMMS", "PARAMETER", "PASS", "STEP", "TENSORS", "Gemm", "Recipe", "gemm_kind"]


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

# the three tensors of a layer, each with the recipe's fields (roles) for the GEMMs that read it
TENSORS = {
    "input": ("input", "input_for_grad_weight"),
    "weight": ("weight", "weight_for_grad_input"),
    "grad_output": ("grad_output", "grad_output_for_grad_weight"),
}
ROLES = tuple(role for roles in TENSORS.values() for role in roles)

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


# how long the quantized data of a weight live, from the shortest
CALL, PASS, STEP, PARAMETER = LIFETIMES = "call", "pass", "step", "parameter"
# roles of the gradients' GEMMs, and the roles of the forward for the same tensor
FORWARD_ROLES = {"weight_for_grad_input": "weight", "input_for_grad_weight": "input"}


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe(Constant):
    """Quantizers for the operands of a linear layer's three GEMMs; None for high precision.

    Attributes:
        input: Quantizer of x_MK for the output GEMM; M is the number of tokens, K is in_features.
        weight: Quantizer of w_NK for the output GEMM; N is out_features.
        grad_output: Quantizer of dy_MN for the grad_input GEMM.
        weight_for_grad_input: Quantizer of w_NK for the grad_input GEMM.
        grad_output_for_grad_weight: Quantizer of dy_MN for the grad_weight GEMM.
        input_for_grad_weight: Quantizer of x_MK for the grad_weight GEMM.
        fast_accumulation_output: Whether the output GEMM may accumulate in the tensor core's reduced precision. If
            False, partial sums are promoted to float32 (a "split accumulator"). GEMMs without such a mode (blockwise,
            MX, on a CPU) ignore it.
        fast_accumulation_grad_input: The same for the grad_input GEMM.
        fast_accumulation_grad_weight: The same for the grad_weight GEMM.
        weight_lifetime: How long the quantized data of a weight live. Results are bit-identical for the first three.
            ``"call"``: each GEMM quantizes the weight, and nothing is kept.
            ``"pass"``: compiled code on a GPU quantizes a weight for output and grad_input in one pass, and keeps the
            result for the backward: the weight is read once instead of twice, for one byte of memory per element, or
            half a byte in four bits. Nothing is kept if a dim of the weight is not a multiple of 32, under FSDP, which
            frees weights after the forward, or in a checkpointed region (except with PyTorch 2.11).
            ``"step"``: a layer caches its quantized weight between optimizer steps, instead of quantizing it in each
            forward and backward of every micro-batch. The cache takes one byte per element of the weight (with FSDP2,
            of the rank's shard), or two if output and grad_input quantize it differently. See docs/memory.md.
            ``"parameter"``: the quantized data are the parameter, without a copy in high precision; only
            ``fp8compile.convert`` creates such layers. See docs/parameters.md.
        dequantized_output: Whether the output GEMM multiplies dequantized values, rounded to the layer's dtype, in
            high precision. Use this if only one operand has a quantizer (W4A16 quantizes ``weight`` alone), or if no
            GEMM supports the two formats together. Gradients ignore the rounding: the weight's gradient is ``dy^T @
            x``.
        dequantized_gradients: Whether a gradient GEMM in high precision multiplies the dequantized operands of the
            forward, rounded to the layer's dtype, instead of x and w. The result is the gradient of the function that
            the forward computed. An operand that is not quantized is used unchanged.
        emulate: Whether a GPU without a GEMM for these quantizers multiplies the exact values in float64, slowly,
            instead of raising an error. A CPU always does this.
        by_mx: Whether a GPU of compute capability 12.0 runs tensorwise and rowwise GEMMs with its MX GEMM and scales
            of 1, and applies the scales to the result. GeForce cards (RTX 50) run MX at twice the rate of plain FP8;
            RTX PRO cards have the same rate for both and don't benefit. The quantized operands are the same, but the
            result is rounded to float32 once per scale. Other devices and grouped GEMMs of experts ignore it.

    Raises:
        ValueError: Only one operand of a GEMM is quantized, or no GEMM supports the two operands, except for the
            output GEMM with ``dequantized_output``. With delayed scaling, the two quantizers of one tensor differ, or
            those of two tensors differ in ``history`` or ``algorithm``. ``weight_lifetime`` is none of the four
            values, or it is ``"pass"`` but output and grad_input quantize the weight differently.
            ``dequantized_output`` or ``dequantized_gradients`` is set, but nothing is quantized, a quantizer has
            delayed scaling, or (for the latter) no gradient is in high precision.
        TypeError: The field of an operand is neither a quantizer nor None, or a flag is not a bool.
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
    weight_lifetime: str = CALL
    dequantized_output: bool = False
    dequantized_gradients: bool = False
    emulate: bool = False
    by_mx: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for gemm in GEMMS:
            self._check_role(gemm.a)
            self._check_role(gemm.b)
            if not (gemm is GEMMS[0] and self.dequantized_output is True):
                self._check_pair(gemm)
        high = "dequantized_output", "dequantized_gradients"
        switches = ("emulate", "by_mx", *high)
        for switch in (*switches, *(f"fast_accumulation_{gemm.name}" for gemm in GEMMS)):
            if type(getattr(self, switch)) is not bool:
                raise TypeError(f"Recipe: `{switch}` is {getattr(self, switch)!r}; it must be True or False.")
        self._check_delayed()
        self._check_lifetime()
        self._check_dequantized_output()
        self._check_dequantized()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the fields from a pickle, of earlier versions too."""
        super().__setstate__(lifetime_of_flags(state))

    def with_lifetime(self, weight_lifetime: str) -> Recipe:
        """Return this recipe with another ``weight_lifetime``: one object for equal recipes, as graphs have guards."""
        return _with_lifetime(self, weight_lifetime)

    def _check_lifetime(self) -> None:
        if self.weight_lifetime not in LIFETIMES:
            raise ValueError(
                f"Recipe: `weight_lifetime` is {self.weight_lifetime!r}; it must be {', '.join(map(repr, LIFETIMES))}."
            )
        if self.keeps_weight_for_backward() and (self.weight is None or self.weight != self.weight_for_grad_input):
            raise ValueError(
                f"Recipe: weight_lifetime={PASS!r} requires the same quantizer for weight and weight_for_grad_input, "
                f"because grad_input reuses the weight that the forward quantized; got {self.weight!r} and "
                f"{self.weight_for_grad_input!r}. Use one quantizer with tensorwise or square blocks for both, or "
                f"weight_lifetime={CALL!r}."
            )

    def keeps_weight_for_backward(self) -> bool:
        """Whether grad_input reads the data that the forward quantized; see ``weight_lifetime``."""
        return self.weight_lifetime == PASS

    def _check_dequantized_output(self) -> None:
        if not self.dequantized_output:
            return
        given = [each for each in (self.input, self.weight) if each is not None]
        if not given or self.history():
            raise ValueError(
                "Recipe: dequantized_output requires a quantizer with current scaling for input or weight, because "
                f"the output is computed from dequantized values; got input {self.input!r} and weight "
                f"{self.weight!r}. Use such a quantizer for one of them, or omit dequantized_output."
            )

    def _check_dequantized(self) -> None:
        if not self.dequantized_gradients:
            return
        in_high_precision = any(self.quantizers(gemm) is None for gemm in GEMMS[1:])
        if self.input is self.weight is None or not in_high_precision or self.history():
            raise ValueError(
                "Recipe: dequantized_gradients requires a quantized output with current scaling and gradients in "
                f"high precision; got input {self.input!r}, grad_output {self.grad_output!r} and "
                f"grad_output_for_grad_weight {self.grad_output_for_grad_weight!r}. Use quantizers for the output "
                "and None for a gradient, or omit dequantized_gradients."
            )

    def _check_delayed(self) -> None:
        """Raise a ValueError if one tensor has two different `DelayedScaling`.

        Also raise one if tensors differ in history length or algorithm: a layer updates all histories in one step.
        """
        for tensor, roles in TENSORS.items():
            given = [getattr(self, role) for role in roles]
            if all(isinstance(quantizer, DelayedScaling) for quantizer in given) and given[0] != given[1]:
                raise ValueError(
                    f"Recipe: {tensor} has only one history of amaxes, but {roles[0]} and {roles[1]} have different "
                    f"quantizers: {given[0]!r} and {given[1]!r}. Use the same DelayedScaling for both."
                )
        kinds = sorted({(q.history, q.algorithm) for q in self.delayed() if q is not None})
        if len(kinds) > 1:
            raise ValueError(
                "Recipe: its DelayedScaling quantizers have different (history, algorithm): "
                f"{' and '.join(map(str, kinds))}. A layer updates all of them together; use the same two for each."
            )

    def delayed(self) -> tuple[DelayedScaling | None, ...]:
        """The DelayedScaling quantizers of input, weight and grad_output; None where there is none."""
        found: tuple[DelayedScaling | None, ...] = ()
        for roles in TENSORS.values():
            given = [getattr(self, role) for role in roles]
            found += (next((quantizer for quantizer in given if isinstance(quantizer, DelayedScaling)), None),)
        return found

    def history(self) -> int:
        """Length of the amax history of each tensor; 0 without delayed scaling."""
        # issubclass, because each eager call comes here, and isinstance of an opaque class takes twice as long
        for role in ROLES:
            if issubclass(type(given := getattr(self, role)), DelayedScaling):
                return given.history
        return 0

    def shares_weight_codes(self) -> bool:
        """Whether the GEMMs of output and grad_input read the same quantized weight.

        Also True if the grad_input GEMM reads this weight dequantized.
        """
        quantizer = self.weight
        return quantizer is not None and quantizer == self.quantizer_read("weight_for_grad_input")

    def _check_role(self, role: str) -> None:
        value = getattr(self, role)
        if value is not None and not isinstance(value, Quantizer):
            raise TypeError(
                f"Recipe: `{role}` is {value!r}; it must be a quantizer, such as fp8compile.CurrentScaling(...), or "
                "None for high precision."
            )

    def _check_pair(self, gemm: Gemm) -> None:
        a, b = getattr(self, gemm.a), getattr(self, gemm.b)
        if (a is None) != (b is None):
            given, missing = (gemm.a, gemm.b) if b is None else (gemm.b, gemm.a)
            raise ValueError(
                f"Recipe: the GEMM of {gemm.name} has a quantizer for {given} but none for {missing}; a GEMM requires "
                "both operands in FP8 or both in high precision. Pass a quantizer for both, or None for both. With "
                "dequantized_output=True, the output can use one operand's dequantized values in high precision."
            )
        if a is None:
            return
        block_a = a.transposed().block if gemm.a_transposed else a.block
        block_b = b.transposed().block if gemm.b_transposed else b.block
        if gemm_kind(block_a, block_b) is None:
            raise ValueError(
                f"Recipe: no GEMM supports the blocks of {gemm.name}: {gemm.a} has block {a.block} and {gemm.b} has "
                f"block {b.block}, which is {block_a} over (m, k) by {block_b} over (k, n). Supported are "
                f"{ALLOWED_PAIRS}."
            )
        if a.transform() != b.transform():
            raise ValueError(
                f"Recipe: the GEMM of {gemm.name} has transform {a.transform()} for {gemm.a} and {b.transform()} "
                f"for {gemm.b}; the result is only correct if both are equal. Use the same transform for both."
            )
        if a.gemm_format() == b.gemm_format() == E5M2:
            raise ValueError(
                f"Recipe: the GEMM of {gemm.name} has e5m2 for {gemm.a} and for {gemm.b}, but tensor cores multiply "
                "e4m3 by e4m3 or by e5m2. Use e4m3 for at least one of them."
            )

    def quantizers(self, gemm: Gemm) -> tuple[Quantizer, Quantizer] | None:
        """The quantizers of both operands of a GEMM; None if the GEMM stays in high precision.

        The blocks refer to tensors as the layer stores them. With `dequantized_output`, the output GEMM stays in high
        precision.
        """
        a, b = getattr(self, gemm.a), getattr(self, gemm.b)
        return None if a is None or (gemm is GEMMS[0] and self.dequantized_output) else (a, b)

    def quantizer_read(self, role: str) -> Quantizer | None:
        """The quantizer of the data that a GEMM reads for an operand; None if the operand is not quantized.

        ``role`` is the operand's field, such as ``"weight"``. With `dequantized_gradients`, a gradient GEMM in high
        precision reads the quantized operand of the forward.
        """
        return getattr(self, FORWARD_ROLES.get(role, role) if self.is_dequantized(role) else role)

    def is_dequantized(self, role: str) -> bool:
        """Whether a GEMM in high precision reads an operand dequantized.

        ``role`` is the operand's field, such as ``"weight"``. A gradient GEMM reads the quantized operand of the
        forward.
        """
        if role in FORWARD_ROLES.values():
            return self.dequantized_output and getattr(self, role) is not None
        is_high = self.dequantized_gradients and role in FORWARD_ROLES and getattr(self, role) is None
        return is_high and getattr(self, FORWARD_ROLES[role]) is not None

    def gemm_config(self, gemm: Gemm) -> GemmConfig:
        """Return the options of one of the three GEMMs: accumulation, emulation, use of the MX GEMM."""
        return _gemm_config(getattr(self, f"fast_accumulation_{gemm.name}"), self.emulate, self.by_mx)


Recipe.__init__ = accept_lifetime_flags(Recipe.__init__)  # type: ignore[method-assign]
_with_lifetime: Callable[[Recipe, str], Recipe] = cache(lambda recipe, own: replace(recipe, weight_lifetime=own))


@cache
def _gemm_config(fast_accumulation: bool, emulate: bool, by_mx: bool) -> GemmConfig:
    return GemmConfig(fast_accumulation=fast_accumulation, emulate=emulate, by_mx=by_mx)
