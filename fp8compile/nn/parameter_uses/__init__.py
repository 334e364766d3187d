"""What the forwards of a model do with each parameter, read from their source before anything runs."""

from fp8compile.nn.parameter_uses.reader import parameter_uses
from fp8compile.nn.parameter_uses.uses import Kind, Use, Uses

__all__ = ["Kind", "Use", "Uses", "parameter_uses"]
