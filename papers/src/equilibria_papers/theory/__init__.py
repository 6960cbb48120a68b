"""What the papers prove, as code to call on your own model.

OptEq: ``multi_block`` (Lemma 3), ``inclusion_residual`` (Theorem 2), ``two_layer_objective``
(Corollary 1), ``wide_limit`` (Theorem 3), ``to_hidden_units`` (Lemma 1) and ``to_deep_opteq``
(Lemma 2). Each states its assumptions and checks them.

GEQ and KerDEQ: ``bounds``, the calculators of the propositions.
Any model: ``ntk``, its tangent kernel, and ``KernelMonitor`` along a run of training.
The NTK thesis, chapter 3: ``monotone_ntk``; chapter 4: ``trajectories`` and ``landscapes``.

The names of all of them can be imported from here, too.
"""

from . import (
    bounds,
    converters,
    landscapes,
    monitors,
    monotone_ntk,
    ntk,
    opteq_theorems,
    trajectories,
)
from .bounds import *  # noqa: F403
from .converters import *  # noqa: F403
from .landscapes import *  # noqa: F403
from .monitors import *  # noqa: F403
from .monotone_ntk import *  # noqa: F403
from .ntk import *  # noqa: F403
from .opteq_theorems import *  # noqa: F403
from .trajectories import *  # noqa: F403

__all__: list[str] = []
__all__ += bounds.__all__
__all__ += converters.__all__
__all__ += opteq_theorems.__all__
__all__ += landscapes.__all__
__all__ += monitors.__all__
__all__ += monotone_ntk.__all__
__all__ += ntk.__all__
__all__ += trajectories.__all__
