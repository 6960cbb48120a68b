"""The way of a solver to an equilibrium, and how it changes (the NTK thesis, §4.1).

``record_path`` writes down every iterate of a layer's solve with its residual (Eq 4.2),
``at_scale`` draws the layer's weights anew at a scale (§4.1.1), ``follow_training`` looks at a
training's checkpoints (§4.1.2), and the figures draw it.
"""

from .recording import SolverPath, at_scale, clipped_stds, layer_input, record_path
from .training_path import (
    PCA,
    TrainingPath,
    class_figure,
    follow_training,
    path_figure,
    principal_components,
    residual_figure,
)

__all__ = [
    "PCA",
    "SolverPath",
    "TrainingPath",
    "at_scale",
    "class_figure",
    "clipped_stds",
    "follow_training",
    "layer_input",
    "path_figure",
    "principal_components",
    "record_path",
    "residual_figure",
]
