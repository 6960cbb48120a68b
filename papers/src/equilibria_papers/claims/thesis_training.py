"""The NTK thesis, section 3.3: what is claimed of training, along real runs of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from equilibria_papers.theory.monotone_ntk import (
    SCENARIOS,
    Ingredients,
    Radii,
    ThesisModel,
    check_condition,
    closed_form_gradient,
    find_equilibrium,
    gradient_descent,
    gradient_flow,
    ingredients,
    search_radii,
    square_loss,
)

from .claim import Trial
from .numerics import Random, identity, norm, spectral, tensor, zeros
from .thesis_model import Case, case_of, draw_case, near_labels


def _flow(draw: Random) -> Trial | None:
    """Theorem 3.3.1: labels so near that Condition 1 holds with a slack of 1.02 to 3."""
    made = near_labels(draw, "1", draw.log_uniform(1.02, 3.0))
    return None if made is None else _flow_trial(*made)


def _flow_trial(case: Case, given: Ingredients) -> Trial | None:
    report = search_radii("1", given)
    if not report.holds:
        return None
    if given.misfit < 1e-7 * float(norm(case.y)):
        return None  # what is left of it after a while is rounding of the outputs
    try:
        horizon = 8.0 / given.lambda0**2
        run = gradient_flow(*case[:3], horizon=horizon, points=9, rtol=1e-11, max_evaluations=4000)
    except ArithmeticError:
        return None  # stiff beyond what a trial may cost
    details = {"slack": report.slack, "lambda0": given.lambda0, "misfit": given.misfit}
    return Trial(run.worst, case.sizes() | details)


def _flow_family(draw: Random) -> Iterator[Trial | None]:
    """U = cI less t off the diagonal, u = 0, and the random scenario."""
    for scale, tilt in ((20.0, 0.0), (20.0, 0.5), (40.0, 0.0), (40.0, 5.0)):
        eye, zero = identity(2), zeros(2, 2)
        model = ThesisModel(A=zero, B=zero, U=scale * eye - tilt * (1 - eye), u=zero[0], m=1.0)
        case = case_of(model, eye, tensor([0.6, -0.8]))
        yield _flow_trial(case, ingredients(*case))
    case = case_of(*SCENARIOS["guaranteed-random"].build(0))
    yield _flow_trial(case, ingredients(*case))


def _diagonal(draw: Random, m: float, scale: float) -> Case:
    """n = N = d up to 2, X = I, U = scale·I, A = B = 0, u = 0, ‖y‖ = 1."""
    n = draw.integer(1, 2)
    eye, zero = identity(n), zeros(n, n)
    model = ThesisModel(A=zero, B=zero, U=scale * eye, u=zero[0], m=m)
    y = draw.normal(n)
    return case_of(model, eye, y / norm(y))


def _printed_descent(draw: Random) -> Trial | None:
    case = _diagonal(draw, draw.log_uniform(0.02, 0.2), draw.log_uniform(1.0, 50.0))
    radii = Radii(
        A=draw.log_uniform(0.1, 3.0),
        B=1.0,
        U=spectral(case.model.U) * draw.log_uniform(1e-3, 1.0),
        u=draw.log_uniform(1e-2, 1.0),
    )
    return _descent_trial(case, "2", radii, 4, draw.uniform(0.2, 1.0))


def _descent_trial(
    case: Case, condition: str, radii: Radii | None, steps: int, share: float
) -> Trial | None:
    """A run with this share of the largest allowed step; None where the condition fails."""
    given = ingredients(*case)
    report = check_condition(condition, given, radii)
    if not report.holds or report.step is None:
        return None
    run = gradient_descent(*case[:3], step=share * report.step, steps=steps)
    details = {"slack": report.slack, "step": run.step, "losses": list(run.loss[:4])}
    return Trial(run.worst, case.sizes() | details)


def _counterexample(draw: Random) -> Iterator[Trial | None]:
    scenario = SCENARIOS["counterexample"]
    case = case_of(*scenario.build(0))
    yield _descent_trial(case, "2", scenario.radii, 4, 1.0)
    yield _descent_trial(case, "2", scenario.radii, 4, 0.9)


def _repaired_descent(draw: Random) -> Trial | None:
    made = near_labels(draw, "2'", draw.log_uniform(1.02, 3.0))
    if made is None:
        return None
    return _descent_trial(made[0], "2'", None, draw.integer(1, 25), draw.uniform(0.5, 1.0))


def _repaired_family(draw: Random) -> Iterator[Trial | None]:
    for scale in (150.0, 160.0, 320.0):
        yield _descent_trial(_diagonal(draw, 1.0, scale), "2'", None, 300, 1.0)


def _satisfiable(draw: Random, condition: str) -> Trial | None:
    """1/slack of the best radii, where u and ŷ − y are as small as the condition may ask."""
    made = near_labels(draw, condition, 1.0)
    return None if made is None else _met(*made, condition)


def _small_m(draw: Random) -> Trial:
    """20Nm² well below 1, U a large multiple of I: (3.18) as printed has no power of m."""
    case = _diagonal(draw, draw.log_uniform(0.02, 0.1), draw.log_uniform(20.0, 200.0))
    return _met(case, ingredients(*case), "2")


def _met(case: Case, given: Ingredients, condition: str) -> Trial:
    best = search_radii(condition, given)
    details = {"binding": best.binding.name, "20N": 20 * given.samples}
    return Trial(1.0 / best.slack, case.sizes() | details)


def _one_step(draw: Random, *, near: bool) -> tuple[Case, Ingredients, Radii, float] | None:
    """A case, radii (those that (3.16) needs where ``near``), and a step size."""
    if near:
        made = near_labels(draw, "2'", draw.log_uniform(1.0, 2.0))
        if made is None:
            return None
        case, given = made
        radii = search_radii("2'", given).radii
        share = draw.log_uniform(1e-2, 1.0)
        step = (check_condition("2'", given, radii).step or 1.0) * share
        return case, given, radii, step
    case = draw_case(draw, wide=True)
    given = ingredients(*case)
    tiny = 1e-9
    return case, given, Radii(A=tiny, B=tiny, U=tiny, u=tiny), draw.log_uniform(1e-4, 10.0)


def _move(case: Case, step: float) -> ThesisModel:
    """−η∇L, as a model whose parameters are the moves: no rounding against the parameters."""
    _, rest = square_loss(case.model, case.found, case.y)
    gradient = closed_form_gradient(case.model, case.X, case.found, rest)
    return case.model.at(-step * gradient)


def _after(case: Case, step: float) -> Case:
    model = case.model.at(case.model.vector() + _move(case, step).vector())
    return case._replace(model=model, found=find_equilibrium(model, case.X, case.found))


def _bars(given: Ingredients, radii: Radii) -> tuple[float, float, float]:
    return given.norm_A + radii.A, given.norm_U + radii.U, given.norm_u + radii.u


def _parameter_steps(draw: Random, *, near: bool) -> Trial | None:
    """Lemma 3.3.7, all five lines."""
    made = _one_step(draw, near=near)
    if made is None:
        return None
    case, given, radii, step = made
    a, U, u = _bars(given, radii)
    m, move, A = given.m, _move(case, step), case.model.A
    unit = step * given.norm_X * given.misfit
    bounds = {
        "U": unit * u / m,
        "u": unit * U / m,
        "A": unit * 2 * U * u * a / m**2,
        "B": unit * 2 * U * u / m**2,
    }
    if min(bounds.values()) == 0.0:
        return None
    ratios = {k: norm(getattr(move, k)) / bound for k, bound in bounds.items()}
    inner = a * a + step * given.lambda0**2 * a * a / 16 + 1
    change = move.B - move.B.T - A.T @ move.A - move.A.T @ A - move.A.T @ move.A
    ratios["W"] = spectral(change) / (unit * 4 * U * u * inner / m**2)
    return Trial(max(ratios.values()), case.sizes() | ratios | {"step": step})


def _constants(given: Ingredients, radii: Radii, restored: bool) -> tuple[float, float, float]:
    """C₁₁, C₁₂ and ‖X‖²λ̄_U² of Lemma 3.3.8, as printed or with the powers of m."""
    a, U, u = _bars(given, radii)
    m, X = (given.m if restored else 1.0), given.norm_X**2
    c11 = X * ((u * u + U * U) / m**2 + 4 * (U * u) ** 2 * (1 + a * a) / m**4)
    return c11, X * (U * u * a) ** 2 / 4 / m**4, X * U * U / m**2


def _progress(draw: Random, *, which: str, restored: bool) -> Trial | None:
    """Lemmas 3.3.8 (I₁), 3.3.9 (I₂) and 3.3.10 (I₃) for one step."""
    made = _one_step(draw, near=True)
    if made is None:
        return None
    case, given, radii, step = made
    then = _after(case, step)
    loss, rest = square_loss(case.model, case.found, case.y)
    before, after = case.found.Z.T @ case.model.u, then.found.Z.T @ then.model.u
    between = case.found.Z.T @ then.model.u
    if norm(after - before) < 1e-10 * (1e-3 + norm(before)):
        return None  # rounding of ŷ
    lam2 = given.lambda0**2
    c11, c12, cu = _constants(given, radii, restored)
    if which == "I1":
        left = 0.5 * float((after - before) @ (after - before))
        last = lam2**2 if restored else given.lambda0
        right = loss * (
            (step * c11) ** 2 + 2 * step**3 * lam2 * c11 * c12 + step**4 * last * c12**2
        )
    elif which == "I2":
        left = float((after - between) @ rest)
        right = 2 * loss * (step * (c11 - cu) + step**2 * lam2 * c12)
    else:  # I₃ = −η‖Zr‖² ≤ −left
        left, right = step * lam2 / 2 * loss, -float(_move(case, step).u @ case.found.Z @ rest)
    return Trial(left / right, case.sizes() | {"step": step})


def _path(draw: Random, case: Case, given: Ingredients, step: float) -> Iterator[Case]:
    """Up to eleven steps of descent, to the first at which the loss has not kept its rate."""
    then, start = case, 0.5 * given.misfit**2
    for k in range(1, draw.integer(2, 12)):
        then = _after(then, step)
        yield then
        loss, _ = square_loss(then.model, then.found, case.y)
        if loss > (1 - step * given.lambda0**2 / 4) ** k * start:
            break  # hypothesis 3 ends here


def _stay(draw: Random, *, frobenius: bool) -> Trial | None:
    """Proposition 5 along a run: norms, and ‖W(k+1) − W(0)‖, where hypotheses 1 and 3 hold."""
    made = _one_step(draw, near=True)
    if made is None:
        return None
    case, given, radii, step = made
    a, U, u = _bars(given, radii)
    drift = 16 * (3 * a * a + 2) * U * u / (given.lambda0 * given.m) ** 2
    size = norm if frobenius else spectral
    worst = 0.0
    for then in _path(draw, case, given, step):
        for name in ("A", "B", "U"):
            bound = getattr(given, f"norm_{name}") + getattr(radii, name)
            worst = max(worst, size(getattr(then.model, name)) / bound)
        worst = max(worst, norm(then.model.u) / (given.norm_u + radii.u))
        moved = norm(then.model.W - case.model.W)
        if moved > 1e-9 * norm(case.model.W):
            worst = max(worst, moved / (given.norm_X * given.misfit * drift))
    return Trial(worst, case.sizes() | {"step": step})


def _features_stay(draw: Random, *, restored: bool) -> Trial | None:
    """Proposition 6 along a run: σ_min(Z(k)) ≥ λ₀/2 while hypotheses 1 and 3 hold."""
    made = _one_step(draw, near=True)
    if made is None:
        return None
    case, given, radii, step = made
    rows = check_condition("2'" if restored else "2", given, radii).inequalities
    if any(row.slack < 1 for row in rows if not row.name.startswith("(3.18")):
        return None
    path = _path(draw, case, given, step)
    least = min(float(torch.linalg.svdvals(then.found.Z)[-1]) for then in path)
    return Trial(given.lambda0 / 2 / max(least, 1e-300), case.sizes() | {"step": step})


def _large_steps(draw: Random, *, near: bool) -> Iterator[Trial | None]:
    """Lemma 3.3.7's line on W asks for (3.16): a large η shows it."""
    for _ in range(40):
        yield _parameter_steps(draw, near=near)
