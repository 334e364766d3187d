"""Least time of a GEMM by a GPU's published peaks, from its operations and its bytes.

    seconds >= max(2 m n k / peak, bytes of (m, k), (k, n) and (m, n) / bandwidth)

The time is a bound, not a measurement: kernels reach 60 to 80 % of the peak in practice, and norms, activations,
attention and the time between kernels are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fp8compile.ops.gemms.selection import ALIGNMENT
from fp8compile.testing.explain.graphs import GRAD_WEIGHT, GraphGemm

__all__ = ["PEAKS", "Peaks", "Roofline", "experts_speed", "least_seconds", "padding", "roofline"]


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Published peaks of a GPU, dense (without structured sparsity).

    Attributes:
        name: Full name of the GPU.
        capability: Compute capability; for an AMD GPU, AMD's name of the architecture.
        fp4: Operations per second of FP4 tensor cores, or of the cores that are used instead if the GPU has none.
        fp8: Operations per second of FP8 tensor cores, with float32 sums.
        mx: Operations per second for FP8 codes with block scales, if it differs from ``fp8``; else None.
        bf16: Operations per second of bfloat16 and float16 tensor cores.
        fp32: Operations per second of float32 arithmetic, without TF32.
        bandwidth: Bytes per second that the GPU reads from and writes to its memory.
        nvlink: Bytes per second that the GPU sends to other GPUs of its node.
        network: Bytes per second that the GPU sends to other nodes, if it has its own network adapter.
    """

    name: str
    capability: tuple[int, int] | str
    fp4: float
    fp8: float
    bf16: float
    fp32: float
    bandwidth: float
    nvlink: float
    network: float
    mx: float | None = None

    def __str__(self) -> str:
        """Peak rates and bandwidth as text."""
        rates = {"bf16": self.bf16, "FP8": self.fp8, "MXFP8": self.mx or self.fp8, "FP4": self.fp4}
        tera = ", ".join(f"{name} {rate / 1e12:.0f}" for name, rate in rates.items())
        return f"{tera} TFLOPS; {self.bandwidth / 1e12:.2f} TB/s"

    def of_codes(self, bits: int, *, is_mx: bool = False) -> float:
        """Operations per second for GEMMs of codes with 4 or 8 bits; ``is_mx`` for MX codes of 8 bits."""
        return self.fp4 if bits == 4 else (self.mx or self.fp8) if is_mx else self.fp8


# Source: NVIDIA H200 Tensor Core GPU data sheet, H200 SXM. Its tensor core figures (FP8 3,958 TFLOPS, BF16 1,979) are
# "with sparsity"; dense figures are half of them. NVIDIA HGX B200 data sheet, one GPU: FP4 18 PFLOPS, FP8 9 and BF16
# 4.5 with sparsity, FP32 75 TFLOPS, 8 TB/s (later editions: 7.7). NVLink's figures there, 900 GB/s and 1.8 TB/s, are
# for both directions together. DGX H200 and DGX B200 data sheets: one adapter of 400 Gb/s for each GPU. H100, B300 and
# L40S: their data sheets, read in the same way. GeForce and RTX PRO: specification pages, FP8 with float32 sums (half
# the block-scaled rate on 12.x); they reach other GPUs only by PCIe, 32 GB/s (4.0) or 64 (5.0) in one direction.
# AMD: data sheets of MI300X, MI355X and RX 9070 XT; seven links of Infinity Fabric, 64 or 76.8 GB/s in one direction.
PEAKS = {
    "h200": Peaks(
        name="NVIDIA H200 SXM", capability=(9, 0),
        fp4=1979e12, fp8=1979e12, bf16=989e12, fp32=67e12, bandwidth=4.8e12, nvlink=450e9, network=50e9,
    ),
    "b200": Peaks(
        name="NVIDIA B200 SXM", capability=(10, 0),
        fp4=9000e12, fp8=4500e12, bf16=2250e12, fp32=75e12, bandwidth=8e12, nvlink=900e9, network=50e9,
    ),
    "rtx4090": Peaks(
        name="NVIDIA GeForce RTX 4090", capability=(8, 9),
        fp4=330e12, fp8=330e12, bf16=165e12, fp32=83e12, bandwidth=1.008e12, nvlink=32e9, network=50e9,
    ),
    "l40s": Peaks(
        name="NVIDIA L40S", capability=(8, 9),
        fp4=733e12, fp8=733e12, bf16=362e12, fp32=92e12, bandwidth=0.864e12, nvlink=32e9, network=50e9,
    ),
    "h100": Peaks(
        name="NVIDIA H100 SXM", capability=(9, 0),
        fp4=1979e12, fp8=1979e12, bf16=989e12, fp32=67e12, bandwidth=3.35e12, nvlink=450e9, network=50e9,
    ),
    "b300": Peaks(
        name="NVIDIA B300 SXM", capability=(10, 3),
        fp4=12600e12, fp8=4500e12, bf16=2250e12, fp32=75e12, bandwidth=8e12, nvlink=900e9, network=100e9,
    ),
    "rtx5090": Peaks(
        name="NVIDIA GeForce RTX 5090", capability=(12, 0),
        fp4=1676e12, fp8=419e12, bf16=209e12, fp32=105e12, bandwidth=1.792e12, nvlink=64e9, network=50e9,
        mx=838e12,
    ),
    "rtx_pro_6000": Peaks(
        name="NVIDIA RTX PRO 6000 Blackwell", capability=(12, 0),
        fp4=2015e12, fp8=1008e12, bf16=504e12, fp32=125e12, bandwidth=1.792e12, nvlink=64e9, network=50e9,
    ),
    "gb10": Peaks(
        name="NVIDIA GB10", capability=(12, 1),
        fp4=500e12, fp8=250e12, bf16=125e12, fp32=31e12, bandwidth=0.273e12, nvlink=25e9, network=25e9,
    ),
    "mi300x": Peaks(
        name="AMD Instinct MI300X", capability="gfx942",
        fp4=2610e12, fp8=2610e12, bf16=1300e12, fp32=163e12, bandwidth=5.3e12, nvlink=448e9, network=50e9,
    ),
    "mi355x": Peaks(
        name="AMD Instinct MI355X", capability="gfx950",
        fp4=10100e12, fp8=5000e12, bf16=2500e12, fp32=157e12, bandwidth=8e12, nvlink=538e9, network=50e9,
    ),
    "rx9070": Peaks(
        name="AMD Radeon RX 9070 XT", capability="gfx1201",
        fp4=389e12, fp8=389e12, bf16=195e12, fp32=49e12, bandwidth=0.64e12, nvlink=64e9, network=50e9,
    ),
}  # fmt: skip


# Shares of an H200's published peaks: 590 of 989 and 850 of 1979 TFLOP/s in grouped GEMMs, 2.8 of 4.8 TB/s in casts.
REACHED_BF16, REACHED_FP8, REACHED_BY_CASTS = 0.6, 0.43, 0.58


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Least times of the GEMMs of all layers in one training step, by the peaks of a GPU.

    Attributes:
        gpu: Name of the GPU.
        seconds: Time for the graphs as they are: GEMMs in FP8 and in high precision, and casts.
        gemm_seconds: The part of ``seconds`` for GEMMs.
        cast_seconds: The part of ``seconds`` for casts. The cast of a parameter reads it and writes its codes. The
            cast of any other tensor only writes codes, because it can be fused with the kernel that computes the
            tensor.
        bf16_seconds: Time for the same GEMMs in bfloat16.
    """

    gpu: str
    seconds: float
    gemm_seconds: float
    cast_seconds: float
    bf16_seconds: float

    @property
    def ratio(self) -> float:
        """Least time in bfloat16 divided by the least time of the graphs as they are."""
        return self.bf16_seconds / self.seconds if self.seconds else 1.0


def padding(gemm: GraphGemm) -> tuple[int, int]:
    """Sizes (k, n) to which a GPU pads the summed dim and the columns of a GEMM of codes."""
    if not gemm.is_fp8:
        return gemm.k, gemm.n
    return gemm.k + -gemm.k % gemm.sum_to, gemm.n + -gemm.n % ALIGNMENT


def least_seconds(operations: float, moved: float, peak: float, peaks: Peaks) -> float:
    """Least time in seconds: the longer of ``operations / peak`` and ``moved`` bytes by the bandwidth."""
    return max(operations / peak, moved / peaks.bandwidth)


def _seconds(gemm: GraphGemm, k: int, n: int, in_bytes: float, out_bytes: int, peak: float, peaks: Peaks) -> float:
    of_weight, of_result = (1, gemm.groups) if gemm.gemm == GRAD_WEIGHT.name else (gemm.groups, 1)
    moved = (gemm.m * k + of_weight * k * n) * in_bytes + of_result * gemm.m * n * out_bytes
    return least_seconds(2 * gemm.m * k * n, moved, peak, peaks) / gemm.shared_by


def gemm_seconds(gemm: GraphGemm, peaks: Peaks) -> float:
    """Least time of a GEMM with its formats and padding, divided by the number of layers that share it."""
    k, n = padding(gemm)
    if gemm.is_fp8:
        peak = peaks.of_codes(gemm.code_bits, is_mx=gemm.by_mx)
        return _seconds(gemm, k, n, gemm.code_bits / 8, gemm.out_bytes, peak, peaks)
    peak = peaks.bf16 if gemm.in_bytes == 2 else peaks.fp32
    return _seconds(gemm, k, n, gemm.in_bytes, gemm.out_bytes, peak, peaks)


def bf16_seconds(gemm: GraphGemm, peaks: Peaks) -> float:
    """Least time of a GEMM if it ran in bfloat16, divided by the number of layers that share it."""
    return _seconds(gemm, gemm.k, gemm.n, 2, 2, peaks.bf16, peaks)


def _cast_bytes(gemms: Iterable[GraphGemm]) -> float:
    casts: dict[tuple[Any, ...], float] = {}
    for gemm in gemms:
        for cast, is_parameter in zip(gemm.casts, gemm.parameters, strict=True):
            # equal casts of a tensor count once in each graph, forward and backward
            _, quantizer, size = cast
            casts[(gemm.gemm == "output", *cast)] = size * (
                quantizer.code_bits() / 8 + (gemm.in_bytes if is_parameter else 0)
            )
    return sum(casts.values())


def experts_speed(gemms: Iterable[GraphGemm], peaks: Peaks) -> tuple[int, float] | None:
    """Estimate the speed of FP8 experts, for a GPU with peak rates ``peaks``.

    Args:
        gemms: GEMMs of the graphs.
        peaks: Peaks of the GPU.

    Returns:
        The mean number of rows of an expert in the layer that has the fewest, and the speed relative to bfloat16; None
        if no experts are in FP8.

    Source: the model in docs/speed.md, by the shares of an H200's peaks that good kernels reach.
    """
    grouped = [gemm for gemm in gemms if gemm.groups > 1 and gemm.layer is not None]
    if not any(gemm.is_fp8 for gemm in grouped):
        return None
    rows = min((gemm.k if gemm.gemm == GRAD_WEIGHT.name else gemm.m) // gemm.groups for gemm in grouped)
    seconds = sum(gemm_seconds(gemm, peaks) / (REACHED_FP8 if gemm.is_fp8 else REACHED_BF16) for gemm in grouped)
    seconds += _cast_bytes(grouped) / (REACHED_BY_CASTS * peaks.bandwidth)
    return rows, sum(bf16_seconds(gemm, peaks) for gemm in grouped) / REACHED_BF16 / seconds


def roofline(gemms: Iterable[GraphGemm], peaks: Peaks) -> Roofline:
    """Sum the least times of the GEMMs of all layers.

    Args:
        gemms: GEMMs of the graphs; those that belong to no layer are skipped.
        peaks: Peaks of the GPU.
    """
    gemms = [gemm for gemm in gemms if gemm.layer is not None]
    products = sum(gemm_seconds(gemm, peaks) for gemm in gemms)
    casts = _cast_bytes(gemms) / peaks.bandwidth
    return Roofline(
        gpu=peaks.name,
        seconds=products + casts,
        gemm_seconds=products,
        cast_seconds=casts,
        bf16_seconds=sum(bf16_seconds(gemm, peaks) for gemm in gemms),
    )
