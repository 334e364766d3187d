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

from benchmarks.table import Row, emit
from fp8compile.testing.explain.roofline import PEAKS, Peaks

__all__ = ["CASTS", "PEAKS", "bound_ms", "smallest_side"]


CASTS = {"casts alone": 6, "casts fused": 2}  # bytes an element of x and of the gradient of y


def bound_ms(moved: int, operations: Mapping[str, float], arch: str) -> float:
    """Milliseconds below which a GPU can't move these bytes and do these operations, one after the other.

    Operations are by the units that do them, which are fields of `Peaks`.
    """
    peak = PEAKS[arch]
    return 1e3 * (moved / peak.bandwidth + sum(count / getattr(peak, unit) for unit, count in operations.items()))


def smallest_side(peak: Peaks, cast_bytes: int) -> float:
    """The side of a square layer, K = N, from which on FP8 can gain."""
    saved = 6 * (1 / peak.bf16 - 1 / peak.fp8)  # a token, by K N
    return 2 * cast_bytes / peak.bandwidth / saved


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
