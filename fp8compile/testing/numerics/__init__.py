"""Effects of FP8 on a model's values: advice on recipes, comparison with a reference and of ranks."""

from fp8compile.testing.numerics.advice import Advice, LayerAdvice
from fp8compile.testing.numerics.advise import advise
from fp8compile.testing.numerics.compare import compare
from fp8compile.testing.numerics.compare_ranks import compare_ranks
from fp8compile.testing.numerics.comparison import Comparison, ComparisonRow
from fp8compile.testing.numerics.product_costs import Cost
from fp8compile.testing.numerics.rank_findings import RankComparison, RankFinding

__all__ = [
    "Advice",
    "Comparison",
    "ComparisonRow",
    "Cost",
    "LayerAdvice",
    "RankComparison",
    "RankFinding",
    "advise",
    "compare",
    "compare_ranks",
]
