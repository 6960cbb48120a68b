"""Whole networks by name, baselines beside them."""
