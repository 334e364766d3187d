"""Registration of GEMMs of other packages, with the self tests that a GEMM has to pass."""
