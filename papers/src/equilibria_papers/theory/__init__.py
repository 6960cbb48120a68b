"""What the papers prove, as code to call on your own model.

OptEq: ``multi_block`` (Lemma 3), ``inclusion_residual`` (Theorem 2),
``two_layer_objective`` (Corollary 1), ``wide_limit`` (Theorem 3), ``to_hidden_units`` (Lemma 1) and
``to_deep_opteq`` (Lemma 2). Each states its assumptions and checks them.

GEQ and KerDEQ: ``bounds``, the calculators of the propositions: ``margin_report``,
``lipschitz_report``, ``similarity_report``, ``feature_map_report``, ``compare_bounds``.

Any model: ``empirical_ntk`` and what follows from it (``spectrum``, ``label_alignment``,
``kernel_drift``, ``compare_training``), ``KernelMonitor`` along a run of training.

The NTK thesis, chapter 3: ``ThesisModel``, ``closed_form_kernel``, ``search_radii`` and the runs of
``monotone_ntk``.

The NTK thesis, chapter 4: ``record_path``, ``follow_training`` (``trajectories``),
``measure_landscape`` (``landscapes``), with their figures.
"""

from .bounds import (
    AssumptionError,
    compare_bounds,
    demonstration_pair,
    feature_map_report,
    lipschitz_report,
    margin_report,
    network_bounds,
    similarity_report,
)
from .converters import UnitNetwork, prior_of, to_deep_opteq, to_hidden_units
from .deep_opteq import (
    Block,
    MultiBlock,
    WideLimitStudy,
    approach_wide_limit,
    as_blocks,
    deep_equilibrium,
    inclusion_residual,
    moreau_envelope,
    multi_block,
    to_wide_opteq,
    two_layer_objective,
    wide_limit,
)
from .landscapes import (
    Grid,
    Surface,
    measure_landscape,
    random_directions,
    repeated,
    training_plane,
)
from .monitors import BallConditioning, KernelMonitor, KernelProbe, conditioning_on_ball
from .monotone_ntk import (
    ThesisModel,
    closed_form_kernel,
    commutation_matrix,
    gradient_descent,
    gradient_flow,
    search_radii,
)
from .ntk import (
    KernelStudy,
    LinearCurve,
    Projection,
    Spectrum,
    TangentKernel,
    TrainingComparison,
    compare_training,
    empirical_ntk,
    kernel_alignment,
    kernel_distance,
    kernel_drift,
    label_alignment,
    linear_gradient_descent,
    linear_gradient_flow,
    spectrum,
    study_kernels,
)
from .trajectories import (
    SolverPath,
    TrainingPath,
    at_scale,
    follow_training,
    layer_input,
    record_path,
    training_recorder,
)

__all__ = [
    "AssumptionError",
    "BallConditioning",
    "Block",
    "Grid",
    "KernelMonitor",
    "KernelProbe",
    "KernelStudy",
    "LinearCurve",
    "MultiBlock",
    "Projection",
    "SolverPath",
    "Spectrum",
    "Surface",
    "TangentKernel",
    "ThesisModel",
    "TrainingComparison",
    "TrainingPath",
    "UnitNetwork",
    "WideLimitStudy",
    "approach_wide_limit",
    "as_blocks",
    "at_scale",
    "closed_form_kernel",
    "commutation_matrix",
    "compare_bounds",
    "compare_training",
    "conditioning_on_ball",
    "deep_equilibrium",
    "demonstration_pair",
    "empirical_ntk",
    "feature_map_report",
    "follow_training",
    "gradient_descent",
    "gradient_flow",
    "inclusion_residual",
    "kernel_alignment",
    "kernel_distance",
    "kernel_drift",
    "label_alignment",
    "layer_input",
    "linear_gradient_descent",
    "linear_gradient_flow",
    "lipschitz_report",
    "margin_report",
    "measure_landscape",
    "moreau_envelope",
    "multi_block",
    "network_bounds",
    "prior_of",
    "random_directions",
    "record_path",
    "repeated",
    "search_radii",
    "similarity_report",
    "spectrum",
    "study_kernels",
    "to_deep_opteq",
    "to_hidden_units",
    "to_wide_opteq",
    "training_plane",
    "training_recorder",
    "two_layer_objective",
    "wide_limit",
]
