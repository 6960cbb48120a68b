"""The NTK thesis, section 3.3: what is claimed of training, along real runs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

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

from .claim import Claim, Trial, Variant, claim, reading
from .drawing import integer, log_uniform, norm, normal, spectral, uniform
from .thesis_models import Case, draw_case, near_labels

Draw = Callable[[torch.Generator], Trial | None]


# ---------------------------------------------------------------- the theorems


def _flow(draw: torch.Generator) -> Trial | None:
    """Theorem 3.3.1: labels so near that Condition 1 holds with a slack of 1.02 to 3."""
    made = near_labels(draw, "1", log_uniform(draw, 1.02, 3.0))
    return None if made is None else _flow_trial(*made)


def _flow_trial(case: Case, given: Ingredients) -> Trial | None:
    report = search_radii("1", given)
    if not report.holds:
        return None
    if given.misfit < 1e-7 * float(norm(case.y)):
        return None  # what is left of it after a while is rounding of the outputs
    try:
        run = gradient_flow(
            *case[:3],
            horizon=8.0 / given.lambda0**2,
            points=9,
            rtol=1e-11,
            max_evaluations=4000,
        )
    except ArithmeticError:
        return None  # stiff beyond what a trial may cost
    told = {"slack": report.slack, "lambda0": given.lambda0, "misfit": given.misfit}
    return Trial(run.worst, case.sizes() | told)


def _flow_family(draw: torch.Generator) -> Iterator[Trial | None]:
    """U = cI less t off the diagonal, u = 0, and the random scenario."""
    for scale, tilt in ((20.0, 0.0), (20.0, 0.5), (40.0, 0.0), (40.0, 5.0)):
        eye, zero = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
        model = ThesisModel(A=zero, B=zero, U=scale * eye - tilt * (1 - eye), u=zero[0], m=1.0)
        y = torch.tensor([0.6, -0.8], dtype=torch.float64)
        yield _flow_of(model, eye, y)
    yield _flow_of(*SCENARIOS["guaranteed-random"].build(0))


def _flow_of(model: ThesisModel, X: Any, y: Any) -> Trial | None:
    case = Case(model, X, y, find_equilibrium(model, X))
    return _flow_trial(case, ingredients(model, X, y, case.found))


def _diagonal(draw: torch.Generator, m: float, scale: float) -> Case:
    """n = N = d up to 2, X = I, U = scale·I, A = B = 0, u = 0, ‖y‖ = 1."""
    n = integer(draw, 1, 2)
    eye, zero = torch.eye(n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    model = ThesisModel(A=zero, B=zero, U=scale * eye, u=zero[0], m=m)
    y = normal(draw, n)
    return Case(model, eye, y / norm(y), find_equilibrium(model, eye))


def _printed_descent(draw: torch.Generator) -> Trial | None:
    case = _diagonal(draw, log_uniform(draw, 0.02, 0.2), log_uniform(draw, 1.0, 50.0))
    radii = Radii(
        A=log_uniform(draw, 0.1, 3.0),
        B=1.0,
        U=spectral(case.model.U) * log_uniform(draw, 1e-3, 1.0),
        u=log_uniform(draw, 1e-2, 1.0),
    )
    return _descent_trial(case, "2", radii, 4, uniform(draw, 0.2, 1.0))


def _descent_trial(
    case: Case, condition: str, radii: Radii | None, steps: int, share: float
) -> Trial | None:
    """A run with this share of the largest allowed step; None where the condition fails."""
    model, X, y, found = case
    given = ingredients(model, X, y, found)
    if radii is None:
        report = search_radii(condition, given)
    else:
        report = check_condition(condition, given, radii)
    if not report.holds or report.step is None:
        return None
    run = gradient_descent(model, X, y, step=share * report.step, steps=steps)
    told = {"slack": report.slack, "step": run.step, "losses": list(run.loss[:4])}
    return Trial(run.worst, case.sizes() | told)


def _counterexample(draw: torch.Generator) -> Iterator[Trial | None]:
    scenario = SCENARIOS["counterexample"]
    model, X, y = scenario.build(0)
    case = Case(model, X, y, find_equilibrium(model, X))
    yield _descent_trial(case, "2", scenario.radii, 4, 1.0)
    yield _descent_trial(case, "2", scenario.radii, 4, 0.9)


def _repaired_descent(draw: torch.Generator) -> Trial | None:
    made = near_labels(draw, "2'", log_uniform(draw, 1.02, 3.0))
    if made is None:
        return None
    return _descent_trial(made[0], "2'", None, integer(draw, 1, 25), uniform(draw, 0.5, 1.0))


def _repaired_family(draw: torch.Generator) -> Iterator[Trial | None]:
    for scale in (150.0, 160.0, 320.0):
        yield _descent_trial(_diagonal(draw, 1.0, scale), "2'", None, 300, 1.0)


def _satisfiable(draw: torch.Generator, condition: str) -> Trial | None:
    """1/slack of the best radii, where u and ŷ − y are as small as the condition may ask."""
    made = near_labels(draw, condition, 1.0)
    return None if made is None else _met(*made, condition)


def _small_m(draw: torch.Generator) -> Trial:
    """20Nm² well below 1, U a large multiple of I: (3.18) as printed has no power of m."""
    case = _diagonal(draw, log_uniform(draw, 0.02, 0.1), log_uniform(draw, 20.0, 200.0))
    return _met(case, ingredients(*case), "2")


def _met(case: Case, given: Ingredients, condition: str) -> Trial:
    best = search_radii(condition, given)
    told = {"binding": best.binding.name, "20N": 20 * given.samples}
    return Trial(1.0 / best.slack, case.sizes() | told)


# ---------------------------------------------------------------- the lemmas of the proof


def _one_step(
    draw: torch.Generator, *, near: bool
) -> tuple[Case, Ingredients, Radii, float] | None:
    """A case, radii (those that (3.16) needs where ``near``), and a step size."""
    if near:
        made = near_labels(draw, "2'", log_uniform(draw, 1.0, 2.0))
        if made is None:
            return None
        case, given = made
        radii = search_radii("2'", given).radii
        share = log_uniform(draw, 1e-2, 1.0)
        step = (check_condition("2'", given, radii).step or 1.0) * share
        return case, given, radii, step
    case = draw_case(draw, wide=True)
    given = ingredients(*case)
    tiny = 1e-9
    return case, given, Radii(A=tiny, B=tiny, U=tiny, u=tiny), log_uniform(draw, 1e-4, 10.0)


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


def _parameter_steps(*, near: bool) -> Draw:
    """Lemma 3.3.7, all five lines."""

    def trial(draw: torch.Generator) -> Trial | None:
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

    return trial


def _constants(given: Ingredients, radii: Radii, restored: bool) -> tuple[float, float, float]:
    """C₁₁, C₁₂ and ‖X‖²λ̄_U² of Lemma 3.3.8, as printed or with the powers of m."""
    a, U, u = _bars(given, radii)
    m, X = (given.m if restored else 1.0), given.norm_X**2
    c11 = X * ((u * u + U * U) / m**2 + 4 * (U * u) ** 2 * (1 + a * a) / m**4)
    return c11, X * (U * u * a) ** 2 / 4 / m**4, X * U * U / m**2


def _progress(which: str, *, restored: bool) -> Draw:
    """Lemmas 3.3.8 (I₁), 3.3.9 (I₂) and 3.3.10 (I₃) for one step."""

    def trial(draw: torch.Generator) -> Trial | None:
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

    return trial


def _stay(*, frobenius: bool) -> Draw:
    """Proposition 5 along a run: norms, and ‖W(k+1) − W(0)‖, where hypotheses 1 and 3 hold."""

    def trial(draw: torch.Generator) -> Trial | None:
        made = _one_step(draw, near=True)
        if made is None:
            return None
        case, given, radii, step = made
        worst, then, factor = 0.0, case, 1 - step * given.lambda0**2 / 4
        start = 0.5 * given.misfit**2
        for k in range(1, integer(draw, 2, 12)):
            then = _after(then, step)
            size = norm if frobenius else spectral
            for name in ("A", "B", "U"):
                bound = getattr(given, f"norm_{name}") + getattr(radii, name)
                worst = max(worst, size(getattr(then.model, name)) / bound)
            worst = max(worst, norm(then.model.u) / (given.norm_u + radii.u))
            a, U, u = _bars(given, radii)
            drift = 16 * (3 * a * a + 2) * U * u / (given.lambda0 * given.m) ** 2
            moved = norm(then.model.W - case.model.W)
            if moved > 1e-9 * norm(case.model.W):
                worst = max(worst, moved / (given.norm_X * given.misfit * drift))
            if square_loss(then.model, then.found, case.y)[0] > factor**k * start:
                break  # hypothesis 3 ends here
        return Trial(worst, case.sizes() | {"step": step})

    return trial


def _features_stay(*, restored: bool) -> Draw:
    """Proposition 6 along a run: σ_min(Z(k)) ≥ λ₀/2 while hypotheses 1 and 3 hold."""

    def trial(draw: torch.Generator) -> Trial | None:
        made = _one_step(draw, near=True)
        if made is None:
            return None
        case, given, radii, step = made
        rows = check_condition("2'" if restored else "2", given, radii).inequalities
        if any(row.slack < 1 for row in rows if not row.name.startswith("(3.18")):
            return None
        then, worst = case, 0.0
        for k in range(1, integer(draw, 2, 12)):
            then = _after(then, step)
            least = float(torch.linalg.svdvals(then.found.Z)[-1])
            worst = max(worst, given.lambda0 / 2 / max(least, 1e-300))
            loss, _ = square_loss(then.model, then.found, case.y)
            if loss > (1 - step * given.lambda0**2 / 4) ** k * 0.5 * given.misfit**2:
                break
        return Trial(worst, case.sizes() | {"step": step})

    return trial


def _large_steps(draw: torch.Generator) -> Iterator[Trial | None]:
    """Lemma 3.3.7's line on W asks for (3.16): a large η shows it."""
    attempt = _parameter_steps(near=False)
    for _ in range(40):
        yield attempt(draw)


def _printed(random: Draw, cost: float, **more: Any) -> Variant:
    return Variant(name="as printed", random=random, cost=cost, **more)


def _restored(random: Draw, needs: str = "the powers of $m$ of Lemmas 3.3.4 and 3.3.7") -> Variant:
    return reading("with the powers of m", needs, random, cost=10.0)


CLAIMS: tuple[Claim, ...] = (
    claim(
        "thesis.theorem3.3.1",
        "Theorem 3.3.1",
        r"Under Condition 1 and $n \ge N$, gradient flow keeps $L(\theta(t)) \le "
        r"e^{-\lambda_0^2t/2}L(\theta(0))$.",
        _printed(_flow, 20.0, adversarial=_flow_family, tolerance=1e-5),
        note=r"The premise is met by few initializations ($u = 0$ and a large $U$) and by every "
        r"one whose labels lie close to its outputs; at usual ones the best slack is about "
        r"$10^{-7}$. The proof prints $e^{-\lambda_0 s/4}$ for $e^{-\lambda_0^2s/4}$.",
    ),
    claim(
        "thesis.condition2",
        "Condition 2",
        r"Condition 2 can be met: by initializations made for it, with $\lambda_0 > 0$ (the ratio "
        "is 1 over the least slack at the best radii).",
        _printed(_small_m, 5.0),
        reading(
            "with the powers of m",
            "the powers of $m$ that Lemmas 3.3.4 and 3.3.7 carry; $u$ small, labels near the "
            "outputs",
            partial(_satisfiable, condition="2m"),
            cost=10.0,
        ),
        reading(
            "Condition 2′",
            r"the repaired Condition 2′: $16C_2 \le \lambda_0^2$ in place of (3.18), and "
            r"$\eta \le \lambda_0^2/(8C^2)$; $u$ small, labels near the outputs",
            partial(_satisfiable, condition="2'"),
            cost=10.0,
        ),
        note=r"As printed it needs $20Nm^2 \le 1$, so a small $m$, and there Theorem 3.3.5 is "
        r"false. With the powers of $m$: $\lambda_0^2 \le \|Z\|_F^2/N \le \|X\|_F^2\|U\|^2/(m^2N)$ "
        r"by Lemma 3.3.3, and (3.18) asks for $20\|X\|_F^2\|U\|^2/m^2$: $20N \le 1$, never.",
    ),
    claim(
        "thesis.theorem3.3.5",
        "Theorem 3.3.5",
        r"Under Condition 2, $n \ge N$ and the step sizes printed, $L(\theta_{k+1}) \le (1 - "
        r"\eta\lambda_0^2/4)L(\theta_k)$.",
        _printed(_printed_descent, 10.0, adversarial=_counterexample),
        reading(
            "Condition 2′",
            r"Condition 2′ and $\eta \le \lambda_0^2/(8C^2)$",
            _repaired_descent,
            _repaired_family,
            tolerance=1e-5,
            cost=20.0,
        ),
        note=r"Without the powers of $m$ the condition is met by $m = 0.05$, $U = 10I$, where the "
        r"allowed $\eta = 4/\lambda_0^2$ makes the loss grow ninefold a step.",
    ),
    claim(
        "thesis.lemma3.3.7",
        "Lemma 3.3.7",
        r"While the parameters are in their balls, one step moves $U$, $u$, $A$, $B$ by at most "
        r"$\eta\|X\|_F\|\hat y - y\|$ times $\bar\lambda_u/m$, $\bar\lambda_U/m$, "
        r"$2\bar\lambda_{UuA}/m^2$, $2\bar\lambda_{Uu}/m^2$, and $W$ by $4\bar\lambda_{Uu}"
        r"(\bar\lambda_A^2 + \eta\lambda_0^2\bar\lambda_A^2/16 + 1)/m^2$.",
        _printed(_parameter_steps(near=False), 5.0, adversarial=_large_steps),
        reading(
            "with (3.16)",
            "Eq 3.16 for the line on $W$, which the lemma does not state",
            _parameter_steps(near=True),
            cost=10.0,
        ),
    ),
    claim(
        "thesis.prop5",
        "Proposition 5",
        r"The balls are not left: $\|A(k+1)\|_F \le \|A(0)\|_2 + R_A$ and so on, and $\|W(k+1) - "
        r"W(0)\|_F \le 16\|X\|_F\|\hat y_0 - y\|(3\bar\lambda_A^2 + "
        r"2)\bar\lambda_{Uu}/(\lambda_0^2m^2)$.",
        _printed(_stay(frobenius=True), 10.0),
        reading(
            "spectral norms",
            r"$\|\cdot\|_2$ on the left, as $\bar\lambda$ is defined",
            _stay(frobenius=False),
            cost=10.0,
        ),
    ),
    claim(
        "thesis.prop6",
        "Proposition 6",
        r"$\sigma_{\min}(Z(k+1)) \ge \lambda_0/2$ under (3.16), (3.17) and hypotheses 1 and 3.",
        _printed(_features_stay(restored=False), 10.0),
        _restored(
            _features_stay(restored=True),
            needs="(3.17) with 16 for 8 and the powers of $m$, which is what the proof uses",
        ),
        note="The proof needs 16 for 8 in (3.17) and drops powers of $m$; no run was found in "
        "which the conclusion fails.",
    ),
    claim(
        "thesis.lemma3.3.8",
        "Lemma 3.3.8",
        r"$I_1 \le L(\eta^2C_{11}^2 + 2\eta^3\lambda_0^2C_{11}C_{12} + \eta^4\lambda_0C_{12}^2)$, "
        r"$C_{11} = \|X\|_F^2(\bar\lambda_u^2 + 4\bar\lambda_{Uu}^2 + 4\bar\lambda_{UuA}^2 + "
        r"\bar\lambda_U^2)$, $C_{12} = \|X\|_F^2\bar\lambda_{UuA}^2/4$.",
        _printed(_progress("I1", restored=False), 10.0),
        _restored(_progress("I1", restored=True)),
        note=r"The last term needs $\lambda_0^4$.",
    ),
    claim(
        "thesis.lemma3.3.9",
        "Lemma 3.3.9",
        r"$I_2 \le 2L(\eta(C_{11} - \bar\lambda_U^2\|X\|_F^2) + \eta^2\lambda_0^2C_{12})$.",
        _printed(_progress("I2", restored=False), 10.0),
        _restored(_progress("I2", restored=True)),
        note=r"$I_2 = -\eta\,r^\top(J_AJ_A^\top + J_BJ_B^\top + J_UJ_U^\top)r + O(\eta^2)$ is "
        "negative to first order; the proof bounds its size, which is what makes (3.18) so strict.",
    ),
    claim(
        "thesis.lemma3.3.10",
        "Lemma 3.3.10",
        r"$I_3 \le -\eta\frac{\lambda_0^2}{2}L(\theta_k)$ where $\sigma_{\min}(Z(k)) \ge "
        r"\lambda_0/2$ and $n \ge N$.",
        _printed(_progress("I3", restored=True), 10.0),
    ),
)
