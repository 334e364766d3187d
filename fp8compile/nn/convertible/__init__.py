"""Which modules of a model can be converted, and by which recipe each."""
