"""Fused operations with their plain PyTorch twins."""

from equilibria.ops.gaussian import (
    gaussian_energies,
    gaussian_message,
    gaussian_message_jvp,
    gaussian_weights,
)

__all__ = ["gaussian_energies", "gaussian_message", "gaussian_message_jvp", "gaussian_weights"]
