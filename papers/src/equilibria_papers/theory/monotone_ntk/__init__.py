"""Monotone DEQ and the NTK thesis (chapter 3), in closed form and in float64.

``ThesisModel`` z = σ(Wz + Ux), f = uᵀz; ``find_equilibrium``; the kernel K of Proposition 4;
Conditions 1, 2 and 2′ with the radii searched for; gradient flow and gradient descent with the
guaranteed curve beside the loss.
"""

from . import conditions, model, runs
from .conditions import *  # noqa: F403
from .model import *  # noqa: F403
from .runs import *  # noqa: F403

__all__: list[str] = []
__all__ += conditions.__all__
__all__ += model.__all__
__all__ += runs.__all__
