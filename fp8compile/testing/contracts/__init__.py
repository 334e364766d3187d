"""Contracts: checks that authors of an operator or quantizer run on it."""

from fp8compile.testing.contracts.op_contracts import check_op
from fp8compile.testing.contracts.quantizer_contracts import check_quantizer
from fp8compile.testing.contracts.statistic_contracts import check_statistic

__all__ = ["check_op", "check_quantizer", "check_statistic"]
