"""The kinds of quantized weights that serving formats know; a quantizer is of one kind or of none."""

from __future__ import annotations

from fp8compile.quantizers import CurrentScaling, DelayedScaling, Quantizer, TwoLevelScaling

__all__ = ["KINDS", "kind_of"]

KINDS = {
    "tensor": "e4m3, one float32 scale for each matrix",
    "static_tensor": "e4m3, one float32 scale for each matrix and one for its input, both from delayed scaling",
    "channel": "e4m3, a float32 scale for each row of w_NK",
    "block": "e4m3, a float32 scale for 128 x 128 values",
    "block_ue8m0": "e4m3, a scale for 128 x 128 values that is a power of two",
    "mx": "e4m3, an E8M0 scale for 32 values of a row",
    "nvfp4": "e2m1, an e4m3 scale for 16 values of a row and a float32 scale for each matrix",
}


def _kind_of_current(quantizer: CurrentScaling) -> str | None:
    if quantizer.format != "e4m3":
        return None
    block, scale = quantizer.block, quantizer.scale
    if quantizer.stores_e8m0():
        return "mx" if block in ((1, 32), (32, 32)) else None
    if block == (128, 128):
        return "block_ue8m0" if scale == "pow2" else "block"
    return {(-1, -1): "tensor", (1, -1): "channel"}.get(block)


def kind_of(quantizer: Quantizer) -> str | None:
    """The kind of a weight whose codes this quantizer makes, a key of `KINDS`; None if no serving format has it."""
    if type(quantizer) is CurrentScaling:
        return _kind_of_current(quantizer)
    if type(quantizer) is DelayedScaling:
        return "static_tensor" if quantizer.format == "e4m3" else None
    if type(quantizer) is TwoLevelScaling and not quantizer.hadamard:
        return "nvfp4" if quantizer.block in ((1, 16), (16, 16)) else None
    return None
