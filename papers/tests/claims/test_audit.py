"""The audit's own machinery: verdicts, seeds, resuming, pages, solvers, searches."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equilibria_papers import claims as audit
from equilibria_papers.claims import Claim, Settings, Trial, Variant, page
from equilibria_papers.claims import audit as running
from equilibria_papers.claims import claim as records
from equilibria_papers.claims.numerics import (
    ACTIVATIONS,
    Random,
    Unsolved,
    climb,
    evolve,
    newton,
    program,
    relu_prox,
    solve,
)

QUICK = Settings(trials=20, seconds=5.0)


def constant(ratio: float | None, name: str = "as printed", needs: str = "") -> Variant:
    trial = None if ratio is None else Trial(ratio, {"ratio": ratio})
    return Variant(name=name, needs=needs, random=lambda draw: trial)


def claim(*variants: Variant, id: str = "test.claim") -> Claim:
    return Claim(id=id, paper="ours", where="Here", statement="$a \\le b$.", variants=variants)


@pytest.mark.parametrize(
    ("ratios", "verdict", "said"),
    [
        ([1.0], "holds", "holds in all 20 trials (few trials)"),
        ([1.0 + 2e-6], "fails", "fails (violated in 20 of 20 trials)"),
        ([math.nan], "fails", "fails"),
        ([math.inf], "fails", "fails"),
        ([None], "vacuous", "none of 20 draws"),
        (
            [2.0, 0.5],
            "holds under",
            "holds under: change 1 (few trials: 20) (as printed: violated in 20",
        ),
        ([2.0, 3.0, 0.5], "holds under", "holds under: change 2"),
        ([2.0, None], "fails", "fails"),
        ([0.5, 2.0], "holds", "holds in all 20"),
    ],
)
def test_the_verdict_is_counted(ratios: list[float | None], verdict: str, said: str) -> None:
    variants = [
        constant(r, "as printed" if i == 0 else f"repair {i}", "" if i == 0 else f"change {i}")
        for i, r in enumerate(ratios)
    ]
    record = audit.run_claim(claim(*variants), QUICK)
    assert record.verdict == verdict
    assert said in record.sentence()


def test_one_violation_among_many_is_found_and_told() -> None:
    def draw_one(draw: torch.Generator) -> Trial | None:
        value = float(torch.rand((), generator=draw))
        return None if value < 0.3 else Trial(value / 0.9, {"value": value})

    found = audit.run_claim(
        claim(Variant(name="as printed", random=draw_one)), Settings(trials=400)
    )
    first = found.printed
    assert first.random + first.vacuous == 400
    assert 60 < first.vacuous < 180
    assert found.verdict == "fails"
    assert first.worst is not None
    assert first.worst.ratio == pytest.approx(first.worst.case["value"] / 0.9)
    assert 0 < first.violations < 100


def test_the_adversary_has_its_say() -> None:
    def search(draw: torch.Generator) -> Iterator[Trial | None]:
        yield None
        yield Trial(0.2, {})
        yield Trial(1.5, {"found": "by hand"})

    one = Variant(name="as printed", random=lambda draw: Trial(0.1, {}), adversarial=search)
    found = audit.run_claim(claim(one), QUICK).printed
    assert (found.random, found.adversarial, found.vacuous, found.violations) == (20, 2, 1, 1)
    assert found.worst is not None
    assert (found.worst.source, found.worst.index) == ("adversarial", 2)


def test_of_infinitely_bad_trials_the_shortest_is_kept() -> None:
    cases = itertools.cycle([{"a": [1, 2, 3]}, {"a": 1}, {"a": [1, 2]}])
    bad = Variant(name="as printed", random=lambda draw: Trial(math.inf, next(cases)))
    worst = audit.run_claim(claim(bad), QUICK).printed.worst
    assert worst is not None
    assert worst.case == {"a": 1}


def test_cost_divides_the_trials_and_the_clock_stops_them() -> None:
    dear = Variant(name="as printed", random=lambda draw: Trial(0.0, {}), cost=5.0)
    assert audit.run_claim(claim(dear), QUICK).printed.random == 4

    def endless(draw: torch.Generator) -> Iterator[Trial]:
        while True:
            yield Trial(0.0, {})

    slow = Variant(name="as printed", random=lambda draw: Trial(0.0, {}), adversarial=endless)
    found = audit.run_claim(claim(slow), Settings(trials=10**9, seconds=0.05)).printed
    assert 0 < found.random < 10**9
    assert found.adversarial > 0
    assert found.seconds < 2.0


def drawn(draw: torch.Generator) -> Trial:
    return Trial(float(torch.rand((), generator=draw, dtype=torch.float64)), {})


def test_a_trial_depends_on_its_own_seed_alone() -> None:
    def search(draw: torch.Generator) -> Iterator[Trial]:
        for _ in range(5):
            yield Trial(1.0 + drawn(draw).ratio, {})

    one = claim(Variant(name="as printed", random=drawn, adversarial=search))
    few = audit.run_claim(one, Settings(trials=10, seed=3))
    many = audit.run_claim(one, Settings(trials=200, seed=3))
    assert few.printed.worst == many.printed.worst  # the adversary's, which both have in full
    only = claim(Variant(name="as printed", random=drawn))
    worst = audit.run_claim(only, Settings(trials=200, seed=3)).printed.worst
    assert worst is not None
    again = audit.rerun(only, "as printed", worst, Settings(seed=3))
    assert again is not None
    assert again.ratio == worst.ratio
    other = audit.run_claim(only, Settings(trials=200, seed=4)).printed.worst
    assert other != worst
    by_adversary = audit.run_claim(one, Settings(trials=1, seed=3)).printed.worst
    assert by_adversary is not None
    repeated = audit.rerun(one, "as printed", by_adversary, Settings(seed=3))
    assert repeated is not None
    assert repeated.ratio == by_adversary.ratio
    with pytest.raises(ValueError, match="no reading 'other'"):
        audit.rerun(one, "other", by_adversary, Settings(seed=3))


def test_an_error_names_the_trial() -> None:
    def broken(draw: torch.Generator) -> Trial:
        raise ZeroDivisionError("x")

    with pytest.raises(ZeroDivisionError) as caught:
        audit.run_claim(claim(Variant(name="as printed", random=broken)), QUICK)
    assert "test.claim" in str(caught.value.__notes__)
    assert "trial 0" in str(caught.value.__notes__)


def test_finished_claims_are_kept(tmp_path: Path) -> None:
    calls: list[str] = []

    def counted(name: str) -> Claim:
        def one(draw: torch.Generator) -> Trial:
            calls.append(name)
            return Trial(math.inf if name == "b" else 0.5, {"z": torch.ones(2), "nan": math.nan})

        return claim(Variant(name="as printed", random=one, climbs=False), id=name)

    file = tmp_path / "deep" / "audit.json"
    first = audit.run_audit([counted("a"), counted("b")], QUICK, out=file)
    assert len(calls) == 40
    again = audit.run_audit([counted("a"), counted("b"), counted("c")], QUICK, out=file)
    assert calls[40:] == ["c"] * 20
    assert [r.sentence() for r in again[:2]] == [r.sentence() for r in first]
    assert again[1].printed.worst is not None
    assert again[1].printed.worst.ratio == math.inf
    assert again[1].printed.worst.case == {"z": [1.0, 1.0], "nan": "nan"}
    audit.run_audit([counted("a")], Settings(trials=5), out=file)  # other settings: anew
    assert calls[60:] == ["a"] * 5
    audit.run_audit([counted("b")], QUICK, out=file, fresh=True)
    assert calls[65:] == ["b"] * 20
    assert {r.id for r in audit.read_records(file)} == {"a", "b", "c"}
    json.loads(file.read_text())  # no bare NaN or Infinity
    assert "NaN" not in file.read_text()
    assert [p.name for p in file.parent.iterdir()] == ["audit.json"]


def test_an_interrupt_keeps_what_is_done(tmp_path: Path) -> None:
    def stopped(draw: torch.Generator) -> Trial:
        raise KeyboardInterrupt

    file = tmp_path / "audit.json"
    claims = [claim(constant(0.5), id="a"), claim(Variant(name="p", random=stopped), id="b")]
    with pytest.raises(KeyboardInterrupt):
        audit.run_audit(claims, QUICK, out=file)
    assert [r.id for r in audit.read_records(file)] == ["a"]


@pytest.mark.parametrize("text", ["", "[]", '{"claims": [{}]}', '{"claims": 3}'])
def test_a_wrong_file_is_said_to_be_one(text: str, tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"audit\.json is not a record"):
        audit.run_audit([claim(constant(0.5))], QUICK, out=file)
    assert file.read_text() == text


def test_a_changed_statement_is_tried_anew() -> None:
    record = audit.run_claim(claim(constant(0.5)), QUICK)
    assert record.answers(claim(constant(0.5)), QUICK)
    other = Claim(
        id="test.claim", paper="ours", where="Here", statement="$b$", variants=(constant(0.5),)
    )
    assert not record.answers(other, QUICK)
    assert not record.answers(claim(constant(0.5), constant(0.1, "b", "c")), QUICK)
    assert not record.answers(claim(constant(0.5)), Settings(trials=21))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Settings(trials=0),
        lambda: Settings(seconds=0.0),
        lambda: Settings(seconds=math.nan),
        lambda: Settings(seed=-1),
        lambda: audit.load_claims(["no such paper"]),
        lambda: audit.load_claims(["OptEq"], ["opteq.lemma9"]),
    ],
)
def test_wrong_input_is_an_error(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(ValueError, match=r"got|expected|there|has|must|needs"):
        wrong()


def test_readings_are_declared_whole() -> None:
    """Names that differ, what a later reading needs, costs and tolerances that make sense."""
    for each in audit.load_claims():
        names = [variant.name for variant in each.variants]
        assert all(names), each.id
        assert len(set(names)) == len(names) > 0, each.id
        assert all(variant.needs for variant in each.variants[1:]), each.id
        assert all(v.cost > 0 and v.tolerance >= 0 for v in each.variants), each.id


def test_claims_are_found_by_paper_and_pattern() -> None:
    found = audit.load_claims(["opteq"], ["opteq.lemma?", "opteq.eq4"])
    assert [c.id for c in found] == ["opteq.eq4", "opteq.lemma1", "opteq.lemma2", "opteq.lemma3"]
    for name in ("OptEq", "ours"):
        claims = audit.load_claims([name])
        assert len({c.id for c in claims}) == len(claims)
        for each in claims:
            assert each.paper == name
            assert each.id.startswith(audit.PAPERS[name] + ".")
            assert each.statement.count("$") % 2 == 0
            assert each.note.count("$") % 2 == 0


def test_the_page_has_the_verdicts_counterexamples_and_proofs() -> None:
    many = Settings(trials=records.FEW)
    bad = Variant(name="as | printed", random=lambda draw: Trial(3.0, {"W": [[1.0, 2.0]], "k": 7}))
    good = dataclasses.replace(constant(0.25, "repaired", "$x > 0 $"), proof="by $a = b$")
    lied = dataclasses.replace(constant(2.0, "also", "this"), proof="by nothing")
    proven = claim(bad, good, lied, id="ours.bad")
    found = [
        audit.run_claim(proven, many),
        audit.run_claim(claim(constant(None), id="ours.void"), QUICK),
        audit.run_claim(dataclasses.replace(claim(constant(3.0), id="geq.b"), paper="GEQ"), QUICK),
    ]
    text = page.audit_page(found, "equilibria theory audit")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert any("as \\| printed" in row and "**fails**" in row for row in rows)
    assert any("repaired" in row and row.endswith("| holds (proven) |") for row in rows)
    assert "holds under: $x > 0$ (as | printed: violated in" in text
    for part in ("### Here {#ours-bad}", "(#ours-bad)", "| W | `[[1, 2]]` |", "Proof: by $a = b$."):
        assert part in text
    assert "by nothing" not in text  # a trial contradicts it
    assert "- **ours**, of 2: hold with a change 1; premise met by no draw 1." in text
    assert "- **GEQ**, of 1: fail in every reading 1." in text
    assert found[0].answers(proven, many)
    assert not found[0].answers(claim(bad, constant(0.25, "repaired", "$x > 0 $"), lied), many)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations_agree_with_quadrature_and_differences(name: str) -> None:
    each = ACTIVATIONS[name]
    for at in (-2.3, -0.31, 0.0, 0.4, 0.95, 3.7):
        area, _ = scipy.integrate.quad(
            lambda t: float(each.value(torch.tensor(t, dtype=torch.float64))), 0.0, at, limit=200
        )
        t = torch.tensor(at, dtype=torch.float64)
        assert float(each.integral(t)) == pytest.approx(area, abs=1e-9)
        if at != 0.0:
            slope = (each.value(t + 1e-6) - each.value(t - 1e-6)) / 2e-6
            assert float(each.slope(t)) == pytest.approx(float(slope), abs=1e-6)
            assert -1e-12 <= float(slope) <= each.expansion + 1e-6


def seeded(seed: int) -> Random:
    return Random(torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.floats(0.01, 3.0), st.integers(0, 2**31))
def test_weights_have_the_norm_asked_for(rows: int, columns: int, size: float, seed: int) -> None:
    found = seeded(seed).weights(rows, columns, size)
    assert np.linalg.norm(found.numpy(), 2) == pytest.approx(size)
    assert found.shape == (rows, columns)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**31))
def test_programs_agree_with_scipy(size: int, seed: int) -> None:
    draw = seeded(seed)
    root = draw.normal(size + 1, size)
    h, g = root.mT @ root + 0.1 * torch.eye(size, dtype=torch.float64), draw.normal(size)
    signed = draw.share(size) < 0.5
    for mask in (torch.ones(size, dtype=torch.bool), signed):
        found = program(h, g, mask)
        bounds = [(0.0, None) if m else (None, None) for m in mask.tolist()]
        best = scipy.optimize.minimize(
            lambda v: 0.5 * v @ h.numpy() @ v - g.numpy() @ v,
            np.zeros(size),
            jac=lambda v: h.numpy() @ v - g.numpy(),
            bounds=bounds,
            method="L-BFGS-B",
            options={"ftol": 1e-15, "gtol": 1e-10},
        )
        assert found.numpy() == pytest.approx(best.x, abs=1e-5)
        assert bool((found[mask] >= 0).all())


def test_the_prox_of_phi_by_its_definition() -> None:
    """n = m = 1: φ(u) = ½(u/w)² − cu/w − ½u² on u/w ≥ 0, minimized on a grid."""
    w, c, p = 0.8, 0.7, -0.3
    u = np.linspace(0.0, 4.0, 400_001)
    values = 0.5 * (u / w) ** 2 - c * u / w - 0.5 * u**2 + 0.5 * u**2 - p * u
    one = torch.ones(1, 1, dtype=torch.float64)
    found = relu_prox(w * one, c * one[0], p * one[0], one)
    assert float(found) == pytest.approx(u[values.argmin()], abs=1e-5)
    assert float(found) == pytest.approx(w * max(w * p + c, 0.0))


def test_newton_on_kinks_and_without_a_solution() -> None:
    draw = seeded(1)
    w = draw.weights(5, 5, 0.99)
    c = draw.normal(5)
    found, size = newton(
        lambda z: (w @ z + c).clamp_min(0.0),
        lambda z: (w @ z + c > 0).double()[:, None] * w,
        torch.zeros(5).double(),
    )
    assert size < 1e-12
    plain = torch.zeros(5).double()
    for _ in range(5_000):
        plain = (w @ plain + c).clamp_min(0.0)
    assert torch.allclose(found, plain, atol=1e-10)
    one = torch.ones(1, 1).double()
    with pytest.raises(Unsolved, match="Newton"):
        solve(lambda z: z + 1.0, lambda z: one, torch.zeros(1).double())


def test_searches_find_a_known_maximum() -> None:
    def hill(at: Tensor) -> Trial | None:
        if float(at[0]) > 5:
            return None
        return Trial(float(torch.exp(-((at - 1.5) ** 2).sum())), {"at": at})

    for method, found in zip(
        ("Nelder-Mead", "Powell"), climb(hill, [torch.zeros(2).double()]), strict=True
    ):
        assert found is not None
        assert found.ratio == pytest.approx(1.0, abs=1e-6)
        assert method in found.case["found by"]
    draw = seeded(0)
    (best,) = evolve(hill, [(-3.0, 3.0)] * 2, draw)
    assert best is not None
    assert best.ratio > 0.99
    (nothing,) = climb(lambda at: None, [torch.zeros(1).double()], methods=("Powell",))
    assert nothing is None


def test_seeds_do_not_meet() -> None:
    firsts = {
        float(torch.rand((), generator=running.generator_for(seed, *names), dtype=torch.float64))
        for seed in range(3)
        for names in (("a", "b"), ("ab",), ("a", "b", 1), ("a", "b", 2))
    }
    assert len(firsts) == 12
    assert records.plain({"a": torch.tensor(math.inf), 1: (np.float64(2.0), object)})["a"] == "inf"
