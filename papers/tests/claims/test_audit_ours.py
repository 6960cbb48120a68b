"""Our own facts in the audit: verdicts, known numbers, and that wrong bounds would be caught."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

import equilibria as eq
from equilibria.problems import Gaussian, MeanPatchEnergy
from equilibria.problems.kernels import Curvature
from equilibria_papers import claims as audit
from equilibria_papers.claims import ours_gaussian, ours_sensitivity
from equilibria_papers.claims.numerics import ACTIVATIONS, Random, newton
from equilibria_papers.claims.ours_gaussian import THRESHOLD, B, GaussLayer, draw_gauss

from .limited import limited

VERDICTS = {
    "holds": """
        ours.fact1 ours.fact1.sharp ours.bend ours.fact2 ours.fact3 ours.fact3.sharp
        ours.fact3.rate ours.fact4 ours.fact4.plain ours.fact4.tight ours.certificate
        ours.fact5 ours.fact5.sharp ours.fact5.local ours.fact5.mean ours.fact5.min
        ours.fact6.linear ours.fact6.sigmoid ours.fact6.unique ours.fact6.polynomial
        ours.fact7 ours.fact7.layer
    """,
    "holds under": "ours.fact4.usual ours.fact5.rule ours.fact5.mean_sharp ours.polynomial",
}
EXPECTED = {name: verdict for verdict, names in VERDICTS.items() for name in names.split()}
CLAIMS = {claim.id: claim for claim in audit.load_claims(["ours"])}
SEARCHED = {"ours.fact5.mean_sharp"}  # needs its optimizers to find the violation


def run(name: str, *, trials: int = 20, seconds: float = 60.0, search: bool = True) -> audit.Record:
    claim = CLAIMS[name] if search else limited(CLAIMS[name], 3 if name == "ours.fact5.rule" else 0)
    return audit.run_claim(claim, audit.Settings(trials=trials, seconds=seconds, seed=2))


def test_every_claim_has_an_expected_verdict() -> None:
    assert set(CLAIMS) == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - SEARCHED))
def test_verdicts(name: str) -> None:
    # The adversaries take seconds each: the command runs them, and the tests marked slow.
    found = run(name, search=False)
    assert found.verdict == EXPECTED[name], found.sentence()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SEARCHED))
def test_verdicts_that_need_a_search(name: str) -> None:
    found = run(name, seconds=15.0)
    assert found.verdict == EXPECTED[name], found.sentence()


def test_the_layer_is_the_librarys() -> None:
    draw = Random(torch.Generator().manual_seed(0))
    for _ in range(30):
        layer = draw_gauss(draw, 0.2, 1.4)
        z = draw.normal(layer.n)
        problem = layer.problem()
        own = problem.step(layer.state(z)).flatten()
        assert torch.allclose(own, layer(z), atol=1e-12)
        value = problem.coupling.value(layer.state(z))[0]
        assert float(value) == pytest.approx(float(layer.value(z)), rel=1e-12)
        assert isinstance(problem.coupling, Gaussian)
        assert problem.coupling.mu_upper() >= layer.mu * (1 - 1e-12)
        gradient = torch.autograd.functional.jacobian(layer.value, z)
        assert torch.allclose(-gradient, layer.force(z), atol=1e-12)
        hessian = torch.autograd.functional.hessian(layer.value, z)
        assert torch.allclose(hessian, layer.hessian(z), atol=1e-10)


def test_equilibria_agree_with_long_damped_iteration() -> None:
    draw = Random(torch.Generator().manual_seed(4))
    for _ in range(5):
        layer = draw_gauss(draw, 0.5, 0.95)
        z = torch.zeros(layer.w.shape[1], dtype=torch.float64)
        for _ in range(2000):
            z = layer(z)
        assert torch.allclose(layer.equilibrium(), z, atol=1e-11)


def test_three_equilibria_ready_made() -> None:
    one = torch.ones(1, 1).double()
    c = torch.tensor([1.880956005]).double()
    layer = GaussLayer(1.55 * one, one, c, 1.0, ACTIVATIONS["identity"])
    starts = (0.58, 0.42, 0.24)
    found = [newton(layer, layer.slope, torch.tensor([s]).double())[0] for s in starts]
    assert [float(z) for z in found] == pytest.approx([0.5820372, 0.4203373, 0.2396931], abs=1e-6)
    assert pytest.approx(1.4969450, abs=1e-7) == THRESHOLD
    assert pytest.approx(2 * np.exp(-1.5)) == B


@pytest.mark.parametrize(("patches", "ratio"), [(1, 1.89), (4, 3.69), (16, 7.35), (64, 14.67)])
def test_the_min_rule_grows_with_the_patches(patches: int, ratio: float) -> None:
    """The first audit's numbers, with its large step; ours is the slope 1.8332√P."""
    trial = ours_sensitivity._min_family(patches, 0.6, 1.0)
    m = 1.0 - B * 0.36
    met = trial.case["met"] / (0.6 / m)
    assert met == pytest.approx(1.8332 * math.sqrt(patches), rel=1e-3)
    assert met == pytest.approx(ratio, rel=0.04)


def test_the_mean_rule_has_the_proven_factor() -> None:
    assert MeanPatchEnergy(0.2).lipschitz_factor == pytest.approx(2.833, abs=1e-3)
    assert ours_sensitivity._constant(0.6, "mean") == pytest.approx(
        2.8332 * 0.6 / (1 - B * 0.36), rel=1e-4
    )


@pytest.mark.slow
def test_the_search_reaches_the_sharp_constant() -> None:
    draw = Random(torch.Generator().manual_seed(0))
    found = [
        trial.ratio
        for trial in ours_sensitivity._search_inputs(draw, rule=None, kind="sharp")
        if trial
    ]
    assert 0.999 < max(found) <= 1.0 + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours.fact1", "ours.fact2", "ours.fact3", "ours.fact4.tight"])
def test_adversaries_nearly_reach_the_bounds(name: str) -> None:
    worst = run(name, seconds=10.0).printed.worst
    assert worst is not None
    assert 0.99 < worst.ratio <= 1.0 + 1e-6


def scaled(bounds: Curvature, factor: float) -> Curvature:
    return Curvature(bounds.lower * factor, bounds.upper * factor, bounds.rigorous, bounds.note)


def test_a_curvature_that_is_too_small_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Gaussian.curvature
    monkeypatch.setattr(
        Gaussian, "curvature", lambda self, **given: scaled(real(self, **given), 0.7)
    )
    assert run("ours.fact1", trials=150, search=False).verdict == "fails"
    assert run("ours.fact1.sharp").verdict == "holds"  # a smaller bound is still attained
    monkeypatch.setattr(
        Gaussian, "curvature", lambda self, **given: scaled(real(self, **given), 1.2)
    )
    assert run("ours.fact1.sharp").verdict == "fails"


def test_a_lipschitz_constant_that_is_too_small_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ours_sensitivity.gaussian_sensitivity
    monkeypatch.setattr(ours_sensitivity, "gaussian_sensitivity", lambda mu: 0.8 * real(mu))
    assert run("ours.fact5", trials=200, search=False).verdict == "fails"
    monkeypatch.setattr(ours_sensitivity, "gaussian_sensitivity", lambda mu: 1.05 * real(mu))
    assert run("ours.fact5.sharp").verdict == "fails"


def test_an_error_bound_that_is_too_small_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ours_gaussian.certify

    def wrong(problem: object, z: torch.Tensor) -> object:
        found = real(problem, z=z)  # type: ignore[call-overload]
        return dataclasses.replace(found, error_bound=0.5 * found.error_bound)

    monkeypatch.setattr(ours_gaussian, "certify", wrong)
    assert run("ours.certificate", trials=60, search=False).verdict == "fails"


def test_a_step_that_is_wrong_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = eq.Problem.step
    monkeypatch.setattr(
        eq.Problem, "step", lambda self, z, tau=1.0: real(self, z, tau) + 0.3 * z, raising=True
    )
    assert run("ours.fact2", search=False).verdict == "fails"
    assert run("ours.fact4.plain", search=False).verdict == "fails"
