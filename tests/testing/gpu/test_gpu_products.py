"""What run_gpu_program demands of a product's operands: as the GPU's library does."""

from __future__ import annotations

import pytest
import torch

from fp8compile._compat import TORCH_VERSION
from fp8compile.scale_layouts import down_the_rows, swizzled
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.program.products import Products

M, K, N = 48, 256, 64
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


def codes(rows, columns, dtype=E4M3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def scales(*shape, seed=2):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


A, B = codes(M, K), codes(N, K, seed=1).t()
ONE = torch.tensor(2.0)
MX_A, MX_B = (torch.randint(120, 134, (rows, K // 32), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
              for rows in (M, N))  # fmt: skip


def multiply(*args, arch="h200", out_dtype=BF16, **kwargs):
    return Products(GPUS[arch])._scaled_mm(*args, out_dtype=out_dtype, **kwargs)


def each(scale, rows, columns, tall, wide):
    return scale.double().repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]


ROWS_A, ROWS_B = scales(M, 1), scales(N, 1, seed=4)
BLOCKS_A, BLOCKS_B, SQUARE_B = scales(M, 2), scales(N, 2, seed=5), scales(1, 2, seed=6)
WIDE_B, SQUARES_IN_FOURS = codes(160, K, seed=7).t(), scales(2, 4, seed=8)[:, :2]
SCALED = {
    "tensorwise": (ONE, ONE * 3, ONE.double(), ONE.double() * 3, "h200"),
    "rowwise": (ROWS_A, ROWS_B.t(), ROWS_A.double(), ROWS_B.double(), "h200"),
    "blocks": (down_the_rows(BLOCKS_A), down_the_rows(BLOCKS_B).t(), each(BLOCKS_A, M, K, 1, 128),
               each(BLOCKS_B, N, K, 1, 128), "h200"),
    "blocks and squares": (down_the_rows(BLOCKS_A), SQUARE_B.t(), each(BLOCKS_A, M, K, 1, 128),
                           each(SQUARE_B, N, K, 128, 128), "h200"),
    "mx": (swizzled(MX_A), swizzled(MX_B), torch.exp2(each(MX_A, M, K, 1, 32) - 127),
           torch.exp2(each(MX_B, N, K, 1, 32) - 127), "b200"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_product_is_that_of_the_values(name, assert_bits_equal):
    scale_a, scale_b, values_a, values_b, arch = SCALED[name]
    expected = ((A.double() * values_a) @ (B.t().double() * values_b).t()).to(BF16)
    assert_bits_equal(multiply(A, B, scale_a, scale_b, arch=arch), expected, name)


@pytest.mark.parametrize(
    ("args", "options", "complaint"),
    [
        ((A.t().contiguous().t(), B, ONE, ONE), {}, "row-major left operand"),
        ((A, B.contiguous(), ONE, ONE), {}, "column-major right operand"),
        ((A[:, :40], B[:40], ONE, ONE), {}, "multiples of 16"),
        ((A[:, :32], B[:32, :60], ONE, ONE), {}, "multiples of 16"),
        ((codes(M, K + 8)[:, :K], B, ONE, ONE), {}, "begin at multiples of 16 bytes"),
        ((codes(M, K, E5M2), B.t().float().to(E5M2).t(), ONE, ONE), {}, "e5m2 on one side at most"),
        ((A.float(), B, ONE, ONE), {}, "float8 operands"),
        ((A, B, ONE.double(), ONE), {}, "scales in float32 or E8M0"),
        pytest.param(
            (A, B, ROWS_A, ROWS_B.t()),
            {"out_dtype": torch.float32, "arch": "b200"},
            "bfloat16 only",
            marks=pytest.mark.skipif(
                TORCH_VERSION >= (2, 15), reason="from PyTorch 2.15 on the product writes float32"
            ),
        ),
        ((A, B, BLOCKS_A, down_the_rows(BLOCKS_B).t()), {}, r"strides \(1, 48\)"),
        ((A, WIDE_B, down_the_rows(BLOCKS_A), SQUARES_IN_FOURS.t()), {}, r"strides \(2, 1\)"),
        ((A, WIDE_B, down_the_rows(BLOCKS_A), SQUARES_IN_FOURS.contiguous().t()), {}, "a multiple of 16 bytes"),
        ((A, B, down_the_rows(BLOCKS_A), down_the_rows(BLOCKS_B).t()), {"arch": "b200"}, "9.0 only"),
        ((A, B, SQUARE_B, SQUARE_B.t()), {}, "on one side at most"),
        ((A, B, ROWS_A, ONE), {}, "two scalings that go together"),
        ((A, B, swizzled(MX_A), swizzled(MX_B)), {}, "on compute capability 10.0 to 12.1"),
        ((A, B, swizzled(MX_A)[:512], swizzled(MX_B)), {"arch": "b200"}, "1024 scales in tiles"),
        ((A, B, ONE, ONE), {"out": torch.empty(M, N)}, "`out` has shape"),
        ((A, B, ONE, ONE), {"bias": torch.zeros(N)}, "no bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operands_that_the_gpus_product_would_not_take_raise(args, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        multiply(*args, **options)


INTS = [torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(7)).to(torch.int8)
        for shape in ((24, 16), (16, 8))]  # fmt: skip


def test_an_int8_product_is_exact():
    found = Products(GPUS["h200"])._int_mm(*INTS)
    assert torch.equal(found, (INTS[0].double() @ INTS[1].double()).int())


@pytest.mark.parametrize(
    ("a", "b", "complaint"),
    [
        (INTS[0][:16], INTS[1], "more than 16 rows"),
        (INTS[0][:, :12], INTS[1][:12], "multiples of 8"),
        (INTS[0], INTS[1][:, :7], "multiples of 8"),
        (INTS[0].float(), INTS[1].float(), "int8 operands"),
    ],
)
def test_int8_operands_that_a_gpus_product_would_not_take_raise(a, b, complaint):
    with pytest.raises(ValueError, match=complaint):
        Products(GPUS["h200"])._int_mm(a, b)
    if a.dtype == torch.int8:
        assert Products(None)._int_mm(a, b).dtype == torch.int32  # a CPU takes any size


def test_products_are_kept_with_their_operands():
    products = Products(GPUS["h200"])
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    out = torch.empty(3, 5)
    products.mm(a, b, out=out)
    products.addmm(torch.zeros(5), a, b)
    assert [str(product) for product in products.called] == [
        "mm: (3, 4) x (4, 5) -> (3, 5) float32",
        "addmm: (5,) x (3, 4) x (4, 5) -> (3, 5) float32",
    ]
    assert torch.equal(out, (a.double() @ b.double()).float())


def test_an_unknown_product_raises():
    with pytest.raises(
        NotImplementedError,
        match=r"extern_kernels\.unknown_product, which is not supported; "
        r"supported are _scaled_mm",
    ):
        Products(GPUS["h200"]).unknown_product(1, 2)
