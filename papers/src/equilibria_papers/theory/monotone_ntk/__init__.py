"""Monotone DEQ and the NTK thesis (chapter 3), in closed form and in float64.

``ThesisModel`` z = σ(Wz + Ux), f = uᵀz; ``find_equilibrium``; the kernel K of Proposition 4;
Conditions 1, 2 and 2′ with the radii searched for; gradient flow and gradient descent with the
guaranteed curve beside the loss.
"""

# fmt: off
from .conditions import (
    CONDITIONS,
    Condition,
    ConditionReport,
    Inequality,
    Ingredients,
    Radii,
    check_condition,
    ingredients,
    search_radii,
    smallest_singular,
)
from .model import (
    ClosedFormKernel,
    Equilibrium,
    ThesisModel,
    closed_form_gradient,
    closed_form_kernel,
    find_equilibrium,
    sensitivities,
    square_loss,
)
from .runs import (
    SCENARIOS,
    Outcome,
    Run,
    Scenario,
    draw_outcome,
    gradient_descent,
    gradient_flow,
    run_scenario,
)

__all__ = [
    "CONDITIONS", "SCENARIOS", "ClosedFormKernel", "Condition", "ConditionReport", "Equilibrium",
    "Inequality", "Ingredients", "Outcome", "Radii", "Run", "Scenario", "ThesisModel",
    "check_condition", "closed_form_gradient", "closed_form_kernel", "draw_outcome",
    "find_equilibrium", "gradient_descent", "gradient_flow", "ingredients", "run_scenario",
    "search_radii", "sensitivities", "smallest_singular", "square_loss",
]
# fmt: on
