"""FP8 training with torchtitan: `convert` returns a ``Trainer.Config`` that trains in FP8.

```python
from torchtitan.models.llama3.config_registry import llama3_8b

import fp8compile as f8
from fp8compile.integrations import torchtitan as f8titan


def llama3_8b_float8():
    return f8titan.convert(llama3_8b(), f8.recipes.rowwise())
```
"""

# checked_version comes first, so that an unknown version of torchtitan raises before its modules are imported
from fp8compile.integrations.torchtitan.checked_version import KNOWN_VERSIONS
from fp8compile.integrations.torchtitan.config import convert
from fp8compile.integrations.torchtitan.converter import Float8Converter
from fp8compile.integrations.torchtitan.memory_policy import register_memory_policy
from fp8compile.integrations.torchtitan.parallelize import Float8Parallelize

__all__ = ["KNOWN_VERSIONS", "Float8Converter", "Float8Parallelize", "convert", "register_memory_policy"]
