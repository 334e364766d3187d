"""Rows that go to the ranks of their experts, and come back."""
