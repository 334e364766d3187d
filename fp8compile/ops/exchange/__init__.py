"""Ops that send rows to the ranks of their experts, and send the results of the experts back."""
