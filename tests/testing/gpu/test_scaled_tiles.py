"""tl.dot_scaled as each GPU multiplies: exact beside float64, and at the ends of the scales' range."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fp8compile.testing import run_gpu_program
from fp8compile.testing.gpu.gpus import GPUS

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
]
M, N, K, PROGRAMS = 32, 16, 64, 3
DTYPES = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@pytest.fixture
def dots():
    import scaled_dots

    return scaled_dots


def operand(name, rows, seed):
    """Codes of rows, and their values in float64, multiples of 2**-4 below 16: every sum here is exact in float64."""
    generator = torch.Generator().manual_seed(seed)
    if name == "e2m1":
        codes = torch.randint(0, 256, (rows, K // 2), generator=generator).to(torch.uint8)
        return codes, E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    values = torch.randint(-15, 16, (rows, K), generator=generator) / 8
    codes = values.to(DTYPES[name])
    return (codes.view(torch.uint8) if codes.itemsize == 1 else codes), codes.double()


def scale(rows, seed, low=122, high=133):
    """E8M0 bytes of blocks of 32, and the scale of each element in float64."""
    bytes_ = torch.randint(low, high, (rows, K // 32), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    return bytes_, torch.exp2(bytes_.double() - 127).repeat_interleave(32, 1)


@pytest.fixture
def launched(dots):
    def call(arch, *args, elements=1 << 17, kernel=None, **options):
        from fp8compile.testing.gpu.program.arithmetic import Arithmetic
        from fp8compile.testing.gpu.program.interpreter import Interpreter

        capability = None if arch is None else GPUS[arch].target.capability
        with Interpreter(Arithmetic(capability=capability), elements).active():
            return dots.multiplied(*args, **options)

    return call


@pytest.mark.parametrize("arch", ["rtx4090", "h200", "b200", "rtx5090", "gb10"])
@pytest.mark.parametrize(
    "formats",
    [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e2m1", "e2m1"), ("e5m2", "e2m1"), ("bf16", "e2m1"), ("fp16", "e4m3")],
    ids="x".join,
)
def test_a_product_within_the_range_of_its_scales_is_exact_on_each_gpu(launched, arch, formats, assert_bits_equal):
    (a, left), (b, right) = operand(formats[0], PROGRAMS * M, 0), operand(formats[1], N, 1)
    (a_scale, by_left), (b_scale, by_right) = scale(PROGRAMS * M, 2), scale(N, 3)
    if formats[0] in ("bf16", "fp16"):
        a_scale, by_left = None, 1
    start = torch.randint(-8, 8, (PROGRAMS * M, N), generator=torch.Generator().manual_seed(4)).float()
    expected = ((left * by_left) @ (right * by_right).t() + start.double()).float()
    assert expected.isfinite().all()
    for elements in (1, 1 << 17):
        assert_bits_equal(launched(arch, a, b, a_scale, b_scale, start.clone(), formats, elements=elements), expected,
                          f"{arch}, {elements}")  # fmt: skip


def test_four_bits_that_are_packed_along_the_rows(dots, assert_bits_equal):
    from fp8compile.testing.gpu.program.arithmetic import Arithmetic
    from fp8compile.testing.gpu.program.interpreter import Interpreter

    a, b = (torch.randint(0, 16, (rows, K), generator=torch.Generator().manual_seed(rows)) for rows in (M, N))
    (a_scale, by_left), (b_scale, by_right) = scale(M, 2), scale(N, 3)
    packed = (a[::2] | a[1::2] << 4).to(torch.uint8), (b[::2] | b[1::2] << 4).to(torch.uint8).t().contiguous()
    out = torch.empty(M, N)
    with Interpreter(Arithmetic(capability=(10, 0))).active():
        dots.packed_product[(1,)](*packed, a_scale, b_scale, out, M=M, N=N, K=K)
    assert_bits_equal(out, ((E2M1[a] * by_left) @ (E2M1[b] * by_right).t()).float(), "packed")


def test_scales_in_e4m3_of_sixteen_codes_each(launched, assert_bits_equal):
    (a, left), (b, right) = operand("e2m1", M, 0), operand("e2m1", N, 1)
    scales = [(torch.randint(1, 16, (rows, K // 16)) / 8).to(torch.float8_e4m3fn) for rows in (M, N)]
    by_left, by_right = (each.double().repeat_interleave(16, 1) for each in scales)
    expected = ((left * by_left) @ (right * by_right).t()).float()
    for arch in ("b200", "rtx5090"):
        out = launched(arch, a, b, *scales, torch.zeros(M, N), ("e2m1", "e2m1"))
        assert_bits_equal(out, expected, arch)


ONES, ZERO = torch.full((M, K), 0x38, dtype=torch.uint8), torch.zeros(M, N)  # 0x38 is 1 in e4m3


def of_scales(launched, arch, a_byte, b_byte, formats=("e4m3", "e4m3"), a=ONES, **options):
    b = ONES[:N] if formats[1] == "e4m3" else torch.full((N, K // 2), 0x22, dtype=torch.uint8)
    a_scale = None if a_byte is None else torch.full((M, K // 32), a_byte, dtype=torch.uint8)
    b_scale = torch.full((N, K // 32), b_byte, dtype=torch.uint8)
    return launched(arch, a, b, a_scale, b_scale, ZERO.clone(), formats, **options)[0, 0].item()


@pytest.mark.parametrize(
    ("arch", "byte", "expected"),
    [
        ("b200", 0, K * 2.0**-127),  # the scale is 2**-127
        ("rtx5090", 0, K * 2.0**-127),
        ("h200", 0, 0.0),  # its byte, shifted to bf16's exponent, is 0
        ("rtx4090", 0, 0.0),
        ("b200", None, K * 1.0),
        ("b200", 254, torch.inf),  # 64 * 2**127 is beyond float32
        ("h200", 254, torch.inf),
        ("b200", 255, torch.nan),
        ("h200", 255, torch.nan),
    ],
)
def test_the_ends_of_e8m0(launched, arch, byte, expected):
    found = of_scales(launched, arch, byte, 127)
    assert found == expected or (found != found and expected != expected), found


def test_a_product_without_one_of_the_scales_is_decomposed_everywhere(launched):
    assert of_scales(launched, "b200", 127, 0) == K * 2.0**-127
    assert of_scales(launched, "b200", None, 0) == 0


def test_fast_math_does_not_look_for_nan_where_scales_are_decomposed(launched):
    assert of_scales(launched, "h200", 255, 127, fast_math=True) == torch.inf
    assert of_scales(launched, "b200", 255, 127, fast_math=True) != of_scales(launched, "b200", 254, 127)


def test_values_are_rounded_to_the_format_that_is_multiplied(launched):
    """Scales that cancel: 2**100 and 2**-100 of codes on Hopper's bf16, not in fp16, where a scale is infinite."""
    assert of_scales(launched, "h200", 227, 27) == K
    halves = torch.ones(M, K, dtype=torch.float16)
    assert of_scales(launched, "h200", None, 143, ("fp16", "e4m3"), halves) == torch.inf  # 2**16 in fp16
    assert of_scales(launched, "h200", None, 142, ("fp16", "e4m3"), halves) == K * 2.0**15
    assert of_scales(launched, "h200", None, 143, ("bf16", "e4m3"), halves.bfloat16()) == K * 2.0**16


def test_a_product_that_triton_does_not_compile_is_refused_by_name(dots):
    """As the line of the kernel, in the author's file."""
    (a, _), (b, _) = operand("e2m1", M, 0), operand("e2m1", N, 1)
    scales = [torch.ones(rows, K // 16).to(torch.float8_e4m3fn) for rows in (M, N)]
    mixed = torch.ones(M, K).to(torch.float8_e4m3fn)

    def product(a, b, a_scale, b_scale):
        out = torch.zeros(M, N)
        dots.scaled_product[(1,)](
            a, b, a_scale, b_scale, out, A="e2m1" if a.dtype == torch.uint8 else "e4m3", B="e2m1", HAS_A=True,
            PACKED_A=K // a.shape[1], PACKED_B=2, GROUP=16, FAST=False, M=M, N=N, K=K,
        )  # fmt: skip
        return out

    line = Path(dots.__file__).read_text().partition("tl.dot_scaled(a, a_scale, A")[0].count("\n") + 1
    with pytest.raises(
        RuntimeError, match=rf"scaled_product: at scaled_dots.py:{line}: Triton raises an error: scales in e4m3 with"
    ):
        run_gpu_program(product, mixed, b, *scales, arch="b200")
    assert not run_gpu_program(product, a, b, *scales, arch="b200").differences
    import triton

    if triton.__version__.startswith("3.7"):
        with pytest.raises(
            RuntimeError, match=r"scales in e4m3 on compute capability 9\.0: Triton 3\.7\.1 has no product"
        ):
            run_gpu_program(product, a, b, *scales, arch="h200")


def test_without_a_gpu_it_is_not_known(launched):
    with pytest.raises(
        NotImplementedError, match=r"tl\.dot_scaled requires the compute capability of a GPU, but none was passed"
    ):
        of_scales(launched, None, 127, 127)
