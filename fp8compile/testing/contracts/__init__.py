"""What extenders run: contracts of operators and their derivatives, of quantizers and their products."""

from fp8compile.testing.contracts.op_contracts import check_op
from fp8compile.testing.contracts.quantizer_contracts import check_quantizer

__all__ = ["check_op", "check_quantizer"]
