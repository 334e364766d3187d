"""Sample arguments of this package's ops, for their contracts; ops of other libraries come with their own."""

from fp8compile.testing.samples.samples_of import samples_of

__all__ = ["samples_of"]
