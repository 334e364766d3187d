"""Registration of GEMMs of other packages."""
