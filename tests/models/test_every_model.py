"""What holds for every named network, whatever is inside."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria import models
from equilibria.problems import solving
from tests.models.small import KINDS, NAMES, images, laid_out, make


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward(name: str) -> None:
    model = make(name)
    x = images(model)
    logits = model(x)
    segments = models.describe(name).task == "segmentation"
    assert logits.shape == ((3, 5, *x.shape[2:]) if segments else (3, 5))
    assert torch.isfinite(logits).all()
    # Logits differ between samples: nothing is constant or dead.
    assert (logits[0] - logits[1]).abs().max() > 1e-4
    torch.nn.functional.cross_entropy(logits, logits.argmin(1).detach()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.abs().max() > 0, f"{key} gets no gradient"


@pytest.mark.parametrize("name", NAMES)
def test_files_copies_and_pickles_answer_as_the_network(name: str, tmp_path: Path) -> None:
    model = make(name)
    x = images(model)
    with torch.no_grad():
        model(x)  # in training mode: batch norms and power iterations move off their start
        expected = model.eval()(x)
    path = models.save(model, tmp_path / "model.safetensors", extra={"seen": name})
    state = torch.get_rng_state()
    loaded = models.load(path)
    assert torch.equal(state, torch.get_rng_state()), "loading used random numbers"
    assert loaded.extra == {"seen": name}
    assert not loaded.training
    grads = {key: p.requires_grad for key, p in model.named_parameters()}
    assert {key: p.requires_grad for key, p in loaded.named_parameters()} == grads
    with torch.no_grad():
        for twin in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(twin) is type(model)
            assert twin.config == model.config
            assert torch.equal(twin(x), expected)
            next(twin.parameters()).add_(1.0)
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", NAMES)
def test_seed_and_config_give_the_network_again(name: str) -> None:
    model = make(name, seed=3)
    config = json.loads(json.dumps(model.config.to_dict()))
    torch.manual_seed(3)
    again = models.create(**config.pop("options"), **config)
    assert again.config == model.config
    state, other = model.state_dict(), again.state_dict()
    assert list(state) == list(other)
    assert all(torch.equal(state[key], other[key]) for key in state)


@pytest.mark.parametrize("name", NAMES)
def test_every_equilibrium_layer_reports_and_has_the_chosen_solver(name: str) -> None:
    model = make(name)
    layers = eq.nn.equilibrium_layers(model)
    options = model.config.options
    assert bool(layers) == ("solver" in options), "explicit networks have no solver, others do"
    with eq.nn.observe(model) as seen, torch.no_grad():
        model.eval()(images(model))
    assert set(seen.solutions) == set(layers)
    for layer in layers.values():
        parts = getattr(layer, "branches", [layer])
        for part in parts:
            assert type(part.solver).__name__ == options["solver"]["kind"]
            assert type(part.adjoint).__name__ == options["adjoint"]["kind"]
            assert part.solver.max_steps == options["solver"]["max_steps"]


def test_bad_images_are_refused_with_the_models_name() -> None:
    model = make("geq_digits")
    good = images(model)
    with pytest.raises(ValueError, match=r"geq_digits takes normalized images \[B, "):
        model(good[0])
    with pytest.raises(ValueError, match=r"got a tensor of shape \(3, 7,"):
        model(torch.zeros(3, 7, *good.shape[2:]))
    with pytest.raises(
        TypeError, match=r"in floating point, got torch\.uint8; use model\.preprocess"
    ):
        model((good * 10).to(torch.uint8))
    with pytest.raises(TypeError, match="as a tensor, got list"):
        model(good.tolist())


@pytest.mark.parametrize("name", models.names())
def test_lays_out_without_memory(name: str) -> None:
    # What models.load relies on: every weight and buffer is in the state_dict, none elsewhere.
    model = laid_out(name)
    state = model.state_dict()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert set(tensors) == set(state)
    assert all(value.is_meta for value in tensors.values())
    for module in model.modules():
        loose = {k for k, v in vars(module).items() if isinstance(v, torch.Tensor)}
        assert not loose, f"{type(module).__name__} keeps tensors outside its state: {loose}"


@pytest.mark.parametrize("name", ["resnet18_cifar", "geq_stack_digits", "opteq_digits"])
def test_takes_other_sizes_than_the_one_it_was_made_for(name: str) -> None:
    model = make(name).eval()
    size = 2 * model.config.image_size
    with torch.no_grad():
        assert model(torch.randn(2, model.config.in_channels, size, size)).shape == (2, 5)


def test_count_parameters() -> None:
    layer = nn.Linear(3, 4)
    assert models.count_parameters(layer) == 16
    layer.bias.requires_grad_(False)
    assert models.count_parameters(layer) == 12
    tied = nn.ModuleList([layer, layer])
    assert models.count_parameters(tied) == 12
    assert models.count_parameters(nn.BatchNorm2d(5)) == 10  # running statistics are buffers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["geq_stack_digits", "explicit_digits"])
def test_compiles_whole(name: str) -> None:
    model = make(name).eval()
    x = images(model)
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["geq_cifar_5m", "mopteq_cifar_5m", "geq_stack_cifar_3m"])
def test_trains_compiled_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a compiler follows. The fused path takes its gradient one step before.
    monkeypatch.setattr(solving, "serves", lambda *_: False)
    model = make(name)
    twin, x = copy.deepcopy(model), images(model)
    expected = model(x)
    found = torch.compile(twin, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    pairs = [(a.grad, b.grad) for a, b in zip(twin.parameters(), model.parameters(), strict=True)]
    size = torch.stack([g.norm() for _, g in pairs]).norm()
    assert float(torch.stack([(a - b).norm() for a, b in pairs]).norm() / size) < 1e-5


@pytest.mark.parametrize("name", KINDS)
def test_runs_under_autocast(name: str) -> None:
    model = make(name)
    x = images(model)
    with torch.no_grad():
        exact = model.eval()(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = model(x)
    assert float((rough.float() - exact).norm() / exact.norm()) < 0.03
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.train()(x).float().square().mean()
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    assert all(g is not None and bool(torch.isfinite(g).all()) for g in grads)
