"""From which sizes on can FP8 help a linear layer? An answer from published peaks alone: no GPU was asked.

Forward and backward of a layer (K in, N out), many tokens: FP8 halves the time of three products, and casts x and the
gradient of y, which in bf16 nobody does. Per token, with the peaks below,

    saved = 3 * 2 K N * (1 / bf16 - 1 / fp8)        paid = bytes * (K + N) / bandwidth

where a tensorwise cast that no kernel takes over moves 6 bytes an element (read for the amax, read again, two layouts
of codes written) and one that fuses into what makes the tensor 2. Weights are cast once for all tokens: their part
vanishes. The layer gains where K N / (K + N) is above a bound, which is what the table says; what launches cost comes
on top, and only a GPU tells.

    python -m benchmarks.roofline [--json]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.table import Row, emit

__all__ = ["PEAKS", "Peak", "bound_ms", "smallest_side"]


@dataclass(frozen=True)
class Peak:
    """Published peaks of one GPU, without sparsity: operations and bytes a second; FP4 as FP8 where it has no FP4."""

    fp4: float
    fp8: float
    bf16: float
    memory: float


# Source: data sheets of NVIDIA H200 Tensor Core GPU (SXM) and of NVIDIA HGX B200 (an eighth); dense is half of sparse.
PEAKS = {
    "h200": Peak(fp4=1979e12, fp8=1979e12, bf16=989.5e12, memory=4.8e12),
    "b200": Peak(fp4=9000e12, fp8=4500e12, bf16=2250e12, memory=8e12),
}
CASTS = {"casts alone": 6, "casts fused": 2}  # bytes an element of x and of the gradient of y


def bound_ms(moved: int, operations: Mapping[str, float], arch: str) -> float:
    """Milliseconds below which a GPU can't move these bytes and do these operations, one after the other.

    Operations are by the units that do them, which are fields of `Peak`.
    """
    peak = PEAKS[arch]
    return 1e3 * (moved / peak.memory + sum(count / getattr(peak, unit) for unit, count in operations.items()))


def smallest_side(peak: Peak, cast_bytes: int) -> float:
    """The side of a square layer, K = N, from which on FP8 can gain."""
    saved = 6 * (1 / peak.bf16 - 1 / peak.fp8)  # a token, by K N
    return 2 * cast_bytes / peak.memory / saved


def main() -> None:
    parser = argparse.ArgumentParser(description="Sizes of layers that FP8 can help, from published peaks.")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[Row] = [
        {
            "GPU": arch,
            "casts": name,
            "bytes an element": count,
            "smallest side, K = N": smallest_side(peak, count),
            "smallest K N / (K + N)": smallest_side(peak, count) / 2,
        }
        for arch, peak in PEAKS.items()
        for name, count in CASTS.items()
    ]
    emit("Linear layers that FP8 can help, by published peaks", rows, as_json=args.json, digits=0)


if __name__ == "__main__":
    main()
