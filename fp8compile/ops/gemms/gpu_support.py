"""Table of which GPU, with which build of PyTorch, runs which product; taken from PyTorch's sources.

Sources, of PyTorch 2.11 to 2.15: aten/src/ATen/native/cuda/{ScaledBlas,GroupedBlas}.cpp (checks and dispatch),
RowwiseScaledMM.cu, ScaledGroupMM.cu and cmake/Codegen.cmake (for which GPUs a kernel is built),
torch/testing/_internal/common_cuda.py (which GPUs upstream tests skip). The table leaves out products that PyTorch's
checks admit but its kernels do not run: rowwise groups on 10.x trap and destroy the process's CUDA context
(pytorch#187095), and before 2.15 the rowwise kernel returns bfloat16 bits for float16 (pytorch#187569).

AMD's GPUs are in the table by their own names (ScaledBlasUtils.cpp), because their compute capabilities look like
NVIDIA's. AMD GPUs with the OCP formats run tensorwise and rowwise products by hipBLASLt. MX of gfx950 is left out,
because hipBLASLt reads its scales in another layout than cuBLASLt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8compile.formats import E4M3, E5M2
from fp8compile.ops.gemms.interface import GemmProblem
from fp8compile.target import Build, Target

__all__ = [
    "AMD_NAMES",
    "GPU_NAMES",
    "PRODUCTS",
    "Gate",
    "Product",
    "advice",
    "gates_of",
    "lacks_tensor_cores",
    "why_not",
]

ASK = "Use a recipe that this GPU supports ({recipes}), or slow emulation in float64 (emulate=True)."
ASK_EXPERTS = "Use a recipe that this GPU supports for experts ({recipes}), or leave them in bfloat16."
LEAVE = "Leave the model in bfloat16, or use slow emulation in float64 (emulate=True)."
GPU_NAMES = {
    (8, 9): "L4, L40S, RTX 40",
    (9, 0): "H100, H200",
    (10, 0): "B200",
    (10, 3): "B300",
    (11, 0): "Thor",
    (12, 0): "RTX 50, RTX PRO Blackwell",
    (12, 1): "GB10",
}
AMD_NAMES = {"gfx950": "MI350X, MI355X", "gfx1200": "RX 9060", "gfx1201": "RX 9070, R9700"}
FNUZ = ("gfx940", "gfx941", "gfx942")  # MI300A, MI300X, MI325X: e4m3fnuz and e5m2fnuz, which are not the OCP formats
HOPPER = ((9, 0),)
DATA_CENTRE = ((10, 0), (10, 3))
BLACKWELL = ((10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
GEFORCE = ((12, 0),)
ALL = tuple(GPU_NAMES)
OCP = tuple(AMD_NAMES)
BF16 = (torch.bfloat16,)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A kernel that computes a product, and the conditions under which it runs.

    Attributes:
        kernel: The kernel's origin, such as ``"cuBLASLt"``, as tables show it.
        capabilities: Compute capabilities of the NVIDIA GPUs on which the kernel runs.
        gcn: AMD's names of the AMD GPUs on which the kernel runs.
        out_dtypes: Dtypes that the result may have.
        b_is_e4m3: Whether the right operand's codes have to be e4m3; the left operand's codes may be e5m2.
        cuda: The oldest CUDA that PyTorch may be built with, (major, minor).
        rocm: The oldest ROCm that PyTorch may be built with, (major, minor).
        torch: The oldest PyTorch, (major, minor).
        on_windows: Whether PyTorch builds the kernel for Windows.
        needs_mslk: Whether PyTorch has to be built with MSLK, Meta's kernel library.
    """

    kernel: str
    capabilities: tuple[tuple[int, int], ...] = ()
    gcn: tuple[str, ...] = ()
    out_dtypes: tuple[torch.dtype, ...] = FLOATS
    b_is_e4m3: bool = False
    cuda: tuple[int, int] = (12, 6)
    rocm: tuple[int, int] = (6, 5)
    torch: tuple[int, int] = (2, 11)
    on_windows: bool = True
    needs_mslk: bool = False

    def is_for(self, target: Target) -> bool:
        """Whether the kernel is made for the target's GPU, whatever the build of PyTorch."""
        return target.architecture in (self.capabilities if target.hip is None else self.gcn)

    def lacks(self, build: Build) -> str | None:
        """Return what a build of PyTorch lacks to run this kernel, as the end of an error text; None if nothing."""
        if build.cuda is not None and build.cuda < self.cuda:
            return f"needs PyTorch built with CUDA {_dotted(self.cuda)} or later; this has {_dotted(build.cuda)}"
        if build.rocm is not None and build.rocm < self.rocm:
            return f"needs PyTorch built with ROCm {_dotted(self.rocm)} or later; this has {_dotted(build.rocm)}"
        if build.torch < self.torch:
            return f"needs PyTorch {_dotted(self.torch)}; this is {_dotted(build.torch)}"
        if build.is_windows and not self.on_windows:
            return "needs a kernel that PyTorch does not build for Windows"
        if self.needs_mslk and not build.has_mslk:
            return "needs a PyTorch built with MSLK, which this one lacks (see torch.__config__.show())"
        return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of codes and scales that PyTorch, or a kernel of this package, computes.

    Attributes:
        name: Name of the product, as in the tables of GEMMs.
        gates: The kernels, in the order in which PyTorch tries them.
        needs: Words before the list of GPUs that run the product, in an error text on another GPU.
        recipe: Name of the ready recipe that uses the product.
        is_grouped: Whether the product is a grouped GEMM, as of experts.
    """

    name: str
    gates: tuple[Gate, ...]
    recipe: str
    needs: str = "needs"
    is_grouped: bool = False


_PRODUCTS = (
    Product(
        name="tensorwise",
        recipe="tensorwise",
        gates=(Gate(kernel="cuBLASLt", capabilities=ALL), Gate(kernel="hipBLASLt", gcn=OCP)),
    ),
    Product(
        name="rowwise",
        recipe="rowwise",
        gates=(
            Gate(kernel="cuBLASLt", capabilities=HOPPER, cuda=(12, 9)),
            Gate(kernel="CUTLASS", capabilities=ALL, b_is_e4m3=True, on_windows=False, out_dtypes=BF16),
            Gate(kernel="CUTLASS", capabilities=ALL, b_is_e4m3=True, on_windows=False, torch=(2, 15)),
            Gate(kernel="hipBLASLt", gcn=OCP, b_is_e4m3=True, out_dtypes=BF16),
        ),
    ),
    Product(
        name="blockwise",
        recipe="blockwise",
        gates=(Gate(kernel="cuBLASLt", capabilities=HOPPER, cuda=(12, 9)),),
    ),
    Product(
        name="blockwise, powers of two",
        recipe="blockwise(scale='pow2')",
        gates=(Gate(kernel="cuBLASLt, MX", capabilities=BLACKWELL, cuda=(12, 8)),),
    ),
    Product(
        name="scaled by MX",
        recipe="rowwise",
        gates=(Gate(kernel="cuBLASLt, MX", capabilities=GEFORCE, cuda=(12, 8)),),
    ),
    Product(
        name="mx",
        recipe="mxfp8",
        gates=(Gate(kernel="cuBLASLt", capabilities=BLACKWELL, cuda=(12, 8)),),
        needs="is MX, which needs",
    ),
    Product(
        name="nvfp4",
        recipe="nvfp4",
        gates=(Gate(kernel="cuBLASLt", capabilities=BLACKWELL, cuda=(12, 8)),),
        needs="is NVFP4, which needs",
    ),
    Product(
        name="rowwise groups",
        recipe="rowwise",
        gates=(Gate(kernel="CUTLASS", capabilities=HOPPER, out_dtypes=BF16, on_windows=False),),
        needs="needs a grouped GEMM with scales of rows, which runs on",
        is_grouped=True,
    ),
    Product(
        name="rowwise groups, ours",
        recipe="rowwise",
        gates=(Gate(kernel="Triton, ours", capabilities=ALL),),
        needs="needs a grouped GEMM with scales of rows, which runs on",
        is_grouped=True,
    ),
    Product(
        name="blockwise groups",
        recipe="blockwise",
        gates=(Gate(kernel="Triton, ours", capabilities=ALL),),
        needs="needs a grouped GEMM with blocks of 128, which runs on",
        is_grouped=True,
    ),
    Product(
        name="mx groups",
        recipe="mxfp8",
        gates=(Gate(kernel="MSLK", capabilities=DATA_CENTRE, out_dtypes=BF16, cuda=(12, 8), needs_mslk=True),),
        needs="is MX in groups, which needs",
        is_grouped=True,
    ),
    Product(
        name="nvfp4 groups",
        recipe="nvfp4",
        gates=(Gate(kernel="MSLK", capabilities=DATA_CENTRE, out_dtypes=BF16, cuda=(12, 8), needs_mslk=True),),
        needs="is NVFP4 in groups, which needs",
        is_grouped=True,
    ),
)
PRODUCTS: dict[str, Product] = {product.name: product for product in _PRODUCTS}


def _names(capabilities: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{_dotted(each)} ({GPU_NAMES[each]})" for each in capabilities)


def _lacks_formats(target: Target) -> str | None:
    """Return None for NVIDIA GPUs, and AMD GPUs with GEMMs for OCP formats (e4m3, e5m2, e2m1); else an error text.

    AMD's older GPUs have "fnuz" formats instead.
    """
    if target.type != "cuda":
        return f"has no FP8 GEMM on device {target.type!r}; FP8 GEMMs run on 'cuda' and 'cpu'."
    if target.hip is None:
        return None
    gates = [gate for gate in PRODUCTS["tensorwise"].gates if gate.is_for(target)]
    lacking: str | None
    if target.gcn in FNUZ:
        lacking = f"has no FP8 or FP4 GEMM on AMD GPUs of {target.gcn} (MI300), which use e4m3fnuz and e5m2fnuz"
    elif not gates:
        known = ", ".join(f"{name} ({cards})" for name, cards in AMD_NAMES.items())
        lacking = f"has no FP8 or FP4 GEMM on AMD GPUs other than {known}"
    else:
        lacking = gates[0].lacks(target.build)
    return None if lacking is None else f"{lacking}. {LEAVE}"


def lacks_tensor_cores(problem: GemmProblem) -> str | None:
    """Return why a device can't multiply a problem's float8 codes on tensor cores; None if it can."""
    target, formats = problem.target, (problem.a.gemm_format(), problem.b.gemm_format())
    if (lacking := _lacks_formats(target)) is not None:
        return lacking
    if target.hip is None and target.capability < (8, 9):
        return (
            "needs a GPU with FP8 tensor cores, compute capability 8.9 or higher (L4, RTX 40, H100, B200). "
            "Leave the model in bfloat16 on this GPU."
        )
    if formats == (E5M2, E5M2):
        return "has no GEMM: tensor cores multiply e4m3 by e4m3 or by e5m2. Use e4m3 for at least one operand."
    return None


def gates_of(product: str, target: Target) -> tuple[Gate, ...]:
    """Return the kernels that run a product, a key of PRODUCTS, on the target's GPU and build of PyTorch."""
    return tuple(gate for gate in PRODUCTS[product].gates if gate.is_for(target) and gate.lacks(target.build) is None)


def advice(target: Target, *, is_grouped: bool = False) -> str:
    """Return a sentence, for errors, with the ready recipes that a GPU runs; with ``is_grouped``, for experts."""
    having = {each.recipe: None for each in _PRODUCTS if each.is_grouped == is_grouped and gates_of(each.name, target)}
    if is_grouped and not having:
        return "Leave the experts in bfloat16."
    return (ASK_EXPERTS if is_grouped else ASK).format(recipes=", ".join(having) or "none")


def why_not(product: str, problem: GemmProblem) -> str | None:
    """Return why a product, a key of ``PRODUCTS``, does not run on a problem's target; None if it runs.

    The reason is the end of an error text.
    """
    if (lacking := _lacks_formats(problem.target)) is not None:
        return lacking
    given = PRODUCTS[product]
    gates = [gate for gate in given.gates if gate.is_for(problem.target)]
    built = gates_of(product, problem.target)
    if not built:
        where = tuple(dict.fromkeys(each for gate in given.gates for each in gate.capabilities))
        needed = f"{given.needs} compute capability {_names(where)}"
        if problem.target.hip is not None:
            needed = "has no grouped GEMM on AMD GPUs"
            if not given.is_grouped:
                needed = "has no GEMM here on AMD GPUs, which only support tensorwise and rowwise scales"
        lacking = gates[0].lacks(problem.target.build) if gates else needed
        return f"{lacking}. {advice(problem.target, is_grouped=given.is_grouped)}"
    typed = [gate for gate in built if problem.out_dtype in gate.out_dtypes]
    if not typed:
        only = " or ".join(f"{dtype}".removeprefix("torch.") for dtype in built[0].out_dtypes)
        return f"only supports an output in {only}, got {problem.out_dtype}. Cast x and weight."
    if all(gate.b_is_e4m3 for gate in typed) and problem.b.gemm_format() != E4M3:
        return "has a GEMM only if the second operand is e4m3."
    return None
