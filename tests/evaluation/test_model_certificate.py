"""Certificates of every layer on its own input."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.certify import CompositeCertificate, Guarantee
from equilibria.engine.files import json_value
from equilibria.evaluation import certify_dataset, certify_model
from equilibria.evaluation.model_certificate import certificate_dict
from equilibria.nn.multi_branch import MultiBranch
from tests.evaluation.standins import Wired, random_data, tiny_geq
from tests.evaluation.test_layer_solvers import Scaled


def two_dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 4),
        eq.nn.GEQ(6, 4, in_channels=4, hidden=None, solver=eq.Picard(max_steps=3, rtol=0.0)),
        nn.ReLU(),
        eq.nn.OptEq(3, 4, in_channels=6, solver=eq.Picard(max_steps=3, rtol=0.0)),
    )


def test_each_layer_at_its_own_input_and_its_own_answer() -> None:
    model = two_dense()
    x = torch.randn(4, 5)
    found = certify_model(model, x)
    assert isinstance(found, CompositeCertificate)
    assert list(found) == ["1", "3"]
    assert not any(m._forward_pre_hooks for m in model.modules())
    with torch.no_grad():
        first = model[0](x)
        z = model[1](first)
        second = model[2](z)
        for name, layer, inner, state in (
            ("1", model[1], first, z),
            ("3", model[3], second, model[3](second)),
        ):
            expected = eq.certify(layer, inner, state)
            torch.testing.assert_close(found[name].error_bound, expected.error_bound)
            torch.testing.assert_close(found[name].residual, expected.residual)
    assert found.unique


@pytest.mark.parametrize("kind", ["geq", "opteq"])
def test_layers_inside_envelopes_are_seen(kind: str) -> None:
    """By hooks, so by all that look at layers: certificates, time by parts, penalties."""
    name = f"{kind}_certified_digits"
    model = eq.models.create(name, 10, image_size=8, widths=(16, 24), depth=1).eval()
    x = model.preprocess(torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8))
    seen: dict[str, Any] = {}

    def note(name: str, _: nn.Module, inputs: Any, z: torch.Tensor) -> None:
        seen[name] = inputs[0], z

    layers: dict[str, Any] = dict(eq.nn.equilibrium_layers(model))
    handles = [m.register_forward_hook(partial(note, n)) for n, m in layers.items()]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    assert list(seen) == list(layers)
    found = certify_model(model, x)
    assert len(found) == len(layers)
    for (name, part), (inner, z) in zip(found.items(), seen.values(), strict=True):
        expected = eq.certify(layers[name], inner, z)
        torch.testing.assert_close(part.error_bound, expected.error_bound)
        exact = layers[name].solve(inner, solver=eq.ProximalGradient(rtol=1e-6, max_steps=500))
        off = (z - exact.value).flatten(1).norm(dim=1)
        assert (off <= part.error_bound + 1e-5).all()


def test_the_bound_holds() -> None:
    """The state after three steps lies within its bound of the equilibrium found in float64."""
    model = two_dense().double()
    x = torch.randn(4, 5, dtype=torch.float64)
    found = certify_model(model, x)
    with torch.no_grad():
        exact = model[1].solve(model[0](x), solver=eq.Auto(rtol=1e-13, max_steps=2000)).value
        error = torch.linalg.vector_norm(model[:2](x) - exact, dim=1)
    bound = found["1"].error_bound  # type: ignore[attr-defined]
    assert bool((error <= bound).all())
    assert bool((error > 0.05 * bound).any())  # and says something
    assert float(error.max()) > 1e-6


def test_a_layer_used_twice_has_two_parts() -> None:
    torch.manual_seed(0)
    layer, x = eq.nn.GEQ(4, 4, hidden=None), torch.randn(3, 4)
    model = Wired(lambda x, layer: layer(layer(x)), layer)
    found = certify_model(model, x)
    assert list(found) == ["parts.0", "parts.0#2"]
    with torch.no_grad():
        again = eq.certify(layer, layer(x), model(x))
    torch.testing.assert_close(found["parts.0#2"].residual, again.residual)


def test_a_layer_in_two_blocks_is_certified_once_a_call() -> None:
    torch.manual_seed(0)
    layer, x = eq.nn.GEQ(4, 4, hidden=None), torch.randn(3, 4)
    model = nn.Sequential(nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer, nn.Tanh()))
    assert list(certify_model(model, x)) == ["0.0", "0.0#2"]


def test_the_state_that_was_found_is_judged_and_not_another() -> None:
    """A warm start leads the three steps elsewhere than the start from zero would."""

    torch.manual_seed(0)
    layer = eq.nn.GEQ(4, 4, hidden=None, solver=eq.Picard(max_steps=3, rtol=0.0))
    model, x = Wired(lambda x, layer: layer(x, torch.full_like(x, 5.0)), layer), torch.randn(3, 4)
    with torch.no_grad():
        expected = eq.certify(layer, x, model(x))
        cold = eq.certify(layer, x)
    found = certify_model(model, x)["parts.0"]
    torch.testing.assert_close(found.residual, expected.residual)
    assert not torch.allclose(found.residual, cold.residual, rtol=1e-2)


def test_branches_become_parts() -> None:
    torch.manual_seed(0)
    layers = [eq.nn.GEQ(2, 2, hidden=None, patch=eq.Patches(channels=1, size=2)) for _ in range(2)]
    model = nn.Sequential(MultiBranch(layers, [4, 2]))
    found = certify_model(model, torch.randn(2, 2, 4, 4))
    assert list(found) == ["0, branch 0", "0, branch 1"]
    assert isinstance(found, CompositeCertificate)
    assert found.unique


def test_a_layer_without_a_proof_says_so() -> None:
    model = nn.Sequential(two_dense(), Scaled(eq.Picard(rtol=1e-6)))
    found = certify_model(model, torch.full((2, 5), 0.3))
    assert isinstance(found, CompositeCertificate)
    assert found["0.1"].unique
    assert found["1"].kinds == (Guarantee.none,) * 2
    assert found.kind is Guarantee.none
    assert not found.rigorous
    assert "neither certify(x, z) nor problem(x)" in str(found)
    numbers = json_value(certificate_dict(found))
    assert numbers["1"]["error_bound"] == {"min": None, "median": None, "max": None}
    json.dumps(numbers, allow_nan=False)


def test_parts_of_other_batch_sizes_come_as_a_dict() -> None:
    layers = eq.nn.GEQ(4, 4, hidden=None), eq.nn.GEQ(2, 2, hidden=None)
    model = Wired(lambda x, first, second: second(first(x).reshape(-1, 2)), *layers)
    found = certify_model(model, torch.randn(3, 4))
    assert type(found) is dict
    assert {name: len(part.kinds) for name, part in found.items()} == {"parts.0": 3, "parts.1": 6}


def test_on_a_data_set() -> None:
    model, data = tiny_geq(), random_data(6)
    found = certify_dataset(model, data, 2)
    expected = certify_model(model, data.normalize(data.images[:2]))
    assert certificate_dict(found)["1"]["kinds"] == {"contraction": 2}
    torch.testing.assert_close(found["1"].residual, expected["1"].residual)
    with pytest.raises(ValueError, match="count=0"):
        certify_dataset(model, data, 0)


def test_nothing_to_certify() -> None:
    with pytest.raises(ValueError, match="has no equilibrium layers"):
        certify_model(nn.Linear(2, 2), torch.zeros(1, 2))

    idle = Wired(lambda x, layer: x, eq.nn.GEQ(2, 2, hidden=None))
    with pytest.raises(ValueError, match=r"no equilibrium layer of Wired ran .*\(parts\.0\)"):
        certify_model(idle, torch.zeros(1, 2))
