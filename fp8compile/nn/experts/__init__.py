"""Modules of other libraries that convert knows: experts, and linear layers that are not a ``nn.Linear``."""
