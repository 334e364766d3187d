"""The products that `doctor` runs on a GPU: a case for each of the table, with operands whose sums are exact."""

from __future__ import annotations

import pytest
import torch

from fp8compile._compat import cpu_has_rowwise_gemm
from fp8compile.cli import self_test_operands as exact
from fp8compile.cli.self_test_cases import _operands, product_cases
from fp8compile.ops.gemms.emulated import EMULATED
from fp8compile.ops.gemms.gpu_support import PRODUCTS
from fp8compile.ops.gemms.grouped.cpu_loop import ONE_BY_ONE
from fp8compile.ops.gemms.grouped.table import NATIVE as GROUPED
from fp8compile.ops.gemms.interface import GemmKernel
from fp8compile.ops.gemms.table import NATIVE
from fp8compile.ops.groups.padding import spans
from fp8compile.quantizers import TwoLevelScaling
from fp8compile.target import Build, Target

CASES = product_cases()
ROCM = Build((2, 13), None, rocm=(7, 0))
BUILDS = [Build((2, 13), (13, 0)), Build((2, 15), (13, 0))]


def test_each_product_of_the_table_and_each_gemm_has_a_case():
    assert {case.product for case in CASES} == set(PRODUCTS)
    assert {case.gemm.name for case in CASES if isinstance(case.gemm, GemmKernel)} == {gemm.name for gemm in NATIVE}
    assert {id(case.gemm) for case in CASES if not isinstance(case.gemm, GemmKernel)} == set(map(id, GROUPED))
    assert len({(case.product, str(case)) for case in CASES}) == len(CASES)


def test_each_gate_of_the_table_admits_a_case():
    """With each dtype that the gate has, on one of its GPUs."""
    for name, product in PRODUCTS.items():
        for gate in product.gates:
            targets = [Target("cuda", each, None, build) for each in gate.capabilities for build in BUILDS]
            targets += [Target("cuda", (9, 0), "7.0", ROCM, gcn) for gcn in gate.gcn]
            for dtype in gate.out_dtypes:
                runs = [c for c in CASES if (c.product, c.out_dtype) == (name, dtype)]
                assert any(c.refusal(target) is None for c in runs for target in targets), (name, gate, dtype)


def test_every_partial_sum_is_exact_with_the_digits_of_a_hopper_tensor_core():
    for case in CASES:
        a, b = (side.values.abs() for side in _operands(case))
        if isinstance(case.gemm, GemmKernel):
            pairs = [(a, b.t())]
        else:
            rows = [own for own, _ in spans(exact.offsets(), 1)]
            pairs = [(a[r].t(), b[r]) if case.over_tokens else (a[r], b[g].t()) for g, r in enumerate(rows)]
        for left, right in pairs:
            for row, column in zip(left[:8], right.t()[:8], strict=False):
                addends = row * column
                units = addends[addends > 0]
                if units.numel():  # each addend is a multiple of the smallest one
                    assert bool((units % units.min() == 0).all()), str(case)
                    assert units.sum() / units.min() < 2**exact.SUM_BITS, str(case)


def test_what_is_expected_are_the_bits_of_the_emulation():
    for case in CASES:
        a, b = (side.operand for side in _operands(case))
        if isinstance(case.gemm, GemmKernel):
            result = EMULATED.multiply(a, b.t(), case.out_dtype, case.config)
        elif isinstance(case.a, TwoLevelScaling):
            continue  # a CPU has another layout; a GPU's is read in tests/cli/test_cli_doctor_products.py
        else:
            run = ONE_BY_ONE.outer if case.over_tokens else ONE_BY_ONE.rows
            result = run(a, b, exact.offsets(), case.out_dtype, case.config)
        assert torch.equal(result, case.expected()), f"{case.product}: {case}"
        assert result.isfinite().all()
        assert result.unique().numel() > 100


@pytest.mark.skipif(not cpu_has_rowwise_gemm(), reason="PyTorch before 2.13 has no rowwise product on a CPU")
def test_a_cpus_own_products_give_these_bits():
    """oneDNN adds in float32 in its own order; with these operands that is no excuse."""
    ran = [case for case in CASES if case.product == "rowwise"]
    assert [str(c) for c in ran if not torch.equal(c.result(torch.device("cpu")), c.expected())] == []
    assert len(ran) == 10


@pytest.mark.parametrize("case", [CASES[0], next(c for c in CASES if c.over_tokens)], ids=str)
def test_a_case_is_named_by_its_formats_blocks_and_options(case):
    assert str(case) in (
        "e4m3 allxall by e4m3 allxall to bf16",
        "e4m3 1xall by e4m3 allx1 to bf16, over tokens",
    )
