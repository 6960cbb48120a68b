"""Equilibrium estimators that behave as scikit-learn expects."""
