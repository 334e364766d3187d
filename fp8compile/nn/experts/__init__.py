"""Modules of other libraries that `convert` knows: experts, and linears that are not a ``nn.Linear``."""
