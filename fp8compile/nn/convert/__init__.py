"""Functions that change a whole model: convert and revert, recipes, calibration."""
