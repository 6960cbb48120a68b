"""evaluate(stop="label") against the converged network and against the plain evaluation."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.certify import LabelStopping
from equilibria.evaluation import evaluate
from equilibria.evaluation.layer_solvers import with_solver
from tests.evaluation.standins import Wired, dataset, random_data, tiny_geq


@pytest.mark.parametrize("solver", [None, eq.Auto(rtol=1e-7)])
def test_the_report_counts_every_sample_once(solver: eq.Auto | None) -> None:
    data, model = random_data(23), tiny_geq(gamma=0.5)
    with torch.no_grad():  # margins of many sizes
        model[4].bias -= 0.9 * model(data.normalize(data.images)).mean(0)
    asked: dict[str, Any] = {"batch_size": 5, "certify": 0, "progress": False, "solver": solver}
    plain = evaluate(model, data, **asked)
    report = evaluate(model, data, **asked, stop="label")
    assert plain.stopped is None
    assert report.accuracy == plain.accuracy
    found = report.stopped
    assert found is not None
    stopped = found.samples_steps > 0
    assert found.proven == pytest.approx(float(stopped.double().mean()))
    assert stopped.any()
    assert sum(part.samples for part in found.levels) == 23
    right = {part.steps: part.samples * (part.accuracy or 0.0) for part in found.levels}
    assert found.metrics.accuracy == pytest.approx(sum(right.values()) / 23)
    # Who stopped early has the label of the exact network.
    exact = eq.certify(model, data.normalize(data.images)).label
    early = sum(count for steps, count in right.items() if steps)
    assert int((exact == data.targets)[stopped].sum()) == round(early)
    assert found.mean_steps < found.full_steps + 4
    if solver is None:
        assert found.full_steps == 4.0
        assert found.agreement > 0.9  # four steps and convergence may differ
    else:
        assert found.agreement == 1.0
    assert 'stop="label"' in str(report)
    written = json.loads(json.dumps(report.to_dict()))["stopped"]
    assert written["samples_steps"] == found.samples_steps.tolist()
    assert written["accuracy"] == found.metrics.accuracy


def test_the_steps_of_a_full_solve_are_those_of_the_sample_that_got_it() -> None:
    data, x = random_data(23), random_data(23).normalize(random_data(23).images)
    model: Any = with_solver(tiny_geq(gamma=0.5), eq.Picard(rtol=1e-5, max_steps=60))
    with torch.no_grad():
        with eq.nn.observe(model) as seen:
            model(x)
        steps = seen.solutions["1"][0].stats.steps
        slow = int(steps.argmax())  # its two best classes are alike: no step proves the label
        model[4].bias[2] = -10.0
        first, second, _ = with_solver(model, eq.Picard(rtol=1e-6))(x)[slow]
        model[4].bias[0] -= first - second
    found = evaluate(model, data, certify=0, progress=False, stop="label", batch_size=5).stopped
    assert found is not None
    assert (found.samples_steps == 0).nonzero().tolist() == [[slow]]
    in_vain = LabelStopping(model).certify(x).steps[slow]
    spent = found.samples_steps.sum() + in_vain + steps[slow]
    assert found.mean_steps == pytest.approx(float(spent) / 23)
    assert steps[slow] > found.full_steps + 3  # the mean of all is another number


def test_where_nothing_is_proven_the_answers_are_those_of_the_full_solve() -> None:
    data, model = random_data(9), tiny_geq()
    model.insert(0, Wired(torch.exp))
    report = evaluate(model, data, certify=0, progress=False, stop="label")
    assert report.stopped is not None
    assert report.stopped.proven == 0.0
    assert report.stopped.agreement == 1.0
    assert report.stopped.metrics.headline == pytest.approx(report.metrics.headline)
    assert any("exp" in note for note in report.notes)


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="stop='labels': expected 'label' or None"):
        evaluate(tiny_geq(), random_data(3), stop="labels", progress=False)  # type: ignore[arg-type]
    maps = dataset(torch.zeros(2, 1, 8, 8).byte(), torch.zeros(2, 8, 8).long(), 3)
    with pytest.raises(ValueError, match="for classification"):
        evaluate(tiny_geq(), maps, stop="label", progress=False)
