"""Uses of PyTorch's private interfaces, which may differ between versions of PyTorch.

The package exports the names that its files list in ``__all__``.
"""

from fp8compile._compat.autograd import *
from fp8compile._compat.dtensor import *
from fp8compile._compat.fsdp import *
from fp8compile._compat.fsdp_fewer_ranks import *
from fp8compile._compat.imports import *
from fp8compile._compat.inductor import *
from fp8compile._compat.modes import *
from fp8compile._compat.modules import *
from fp8compile._compat.once_a_graph import *
from fp8compile._compat.operators import *
from fp8compile._compat.optimizers import *
from fp8compile._compat.process_groups import *
from fp8compile._compat.serialization import *
from fp8compile._compat.tracing import *
from fp8compile._compat.versions import *
