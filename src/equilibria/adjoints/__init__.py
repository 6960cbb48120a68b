"""How gradients pass an equilibrium, one file each."""

from .implicit import Implicit
from .one_step import OneStep
from .phantom import Phantom
from .reversible import Reversible
from .unrolled import Unrolled

__all__ = ["Implicit", "OneStep", "Phantom", "Reversible", "Unrolled"]
