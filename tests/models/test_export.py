"""Exported programs compute what PyTorch computes, and ONNX files are run as networks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from equilibria import models
from equilibria.engine.dense import eliminate
from equilibria.engine.result import Result
from equilibria.models import ExportError, ModelFileError
from equilibria.models.export import FORMAT
from equilibria.nn import observe
from equilibria.solvers import Anderson, Auto, Picard
from tests.models.small import make
from tests.optional import optional

np = optional("numpy")
onnx = optional("onnx")
onnxruntime = optional("onnxruntime")


def test_elimination_solves_as_lu() -> None:
    torch.manual_seed(0)
    a = torch.randn(7, 5, 5, dtype=torch.float64)
    a = a @ a.mT + 1e-6 * torch.eye(5, dtype=torch.float64)
    b = torch.randn(7, 5, 1, dtype=torch.float64)
    exact = torch.linalg.solve(a, b)
    assert float((eliminate(a, b) - exact).abs().max()) <= 1e-6 * float(exact.abs().max())


def small(solver: Any, **more: Any) -> models.Network:
    return make("geq_digits", widths=(4,), solver=solver, **more).eval()


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("a.txt", {}, r"\.pt2 or \.onnx"),
        ("a.pt2", {"int8": True}, "int8=True"),
        ("a.onnx", {"steps": 0}, "steps=0"),
        ("a.onnx", {"steps": True}, "steps=True"),
        ("a.onnx", {"steps": 4, "early_stop": True}, "early_stop"),
    ],
)
def test_options_that_do_not_fit_are_named(
    tmp_path: Path, name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        models.export(small(Picard(rtol=0.0, max_steps=1)), tmp_path / name, **options)


def test_a_tolerance_needs_steps_or_early_stop(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"--steps N.*--early-stop"):
        models.export(small(Anderson()), tmp_path / "a.onnx")
    with pytest.raises(ExportError, match="Auto chooses"):
        models.export(small(Auto()), tmp_path / "a.onnx", steps=2)
    assert list(tmp_path.iterdir()) == []


def test_segmentation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="segments"):
        models.export(make("fcn_seg"), tmp_path / "a.onnx")


# ---------------------------------------------------------------------- torch.export


def test_pt2_runs_on_any_batch_and_says_what_it_is(tmp_path: Path) -> None:
    model = small(Picard(rtol=0.0, atol=0.0, max_steps=1))
    model.extra = {"classes": list("abcde"), "mean": [0.5], "std": [0.2]}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = models.export(model, tmp_path / "a.pt2")
    assert made.steps == 1
    assert set(made.difference) == {1, 7}
    files = {"equilibria.json": ""}
    program = torch.export.load(made.path, extra_files=files).module()
    about = json.loads(files["equilibria.json"])
    assert about["extra"] == model.extra
    assert about["config"]["name"] == "geq_digits"
    x = torch.randn(11, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(program(x)[0], model(x), rtol=0, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_envelope_keeps_its_scale(tmp_path: Path) -> None:
    """It follows the estimate of the norm of W, which the constraint held."""
    model = make("opteq_certified_digits", widths=(4,), depth=1).eval()
    made = models.export(model, tmp_path / "a.pt2", steps=1)
    assert max(made.difference.values()) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("geq_digits", {"steps": 3}),
        ("geq_digits", {"early_stop": True}),
        ("opteq_digits", {"early_stop": True}),
        ("mdeq_cifar", {"steps": 2}),
        ("geq_certified_digits", {}),
        ("opteq_certified_digits", {"steps": 3}),
        ("geq_stack_digits", {"early_stop": True}),  # has fixed steps: nothing to stop
    ],
)
def test_onnx_answers_as_pytorch(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    model = make(name).eval()
    made = models.export(model, tmp_path / "a.onnx", **options)
    assert max(made.difference.values()) <= 1e-5
    assert b"/equilibria/" not in made.path.read_bytes()  # no paths of this machine
    loaded = models.load_onnx(made.path)
    x = torch.randn(5, model.in_channels, *[model.config.image_size] * 2)
    answers, own = loaded.predict_normalized(x), model.predict_normalized(x)
    if made.early_stop:
        assert all(answer.converged for answer in answers)
        gaps = [abs(a.confidence - b.confidence) for a, b in zip(answers, own, strict=True)]
        assert max(gaps) < 1e-3  # what the tolerance leaves open
    else:
        assert {answer.steps for answer in answers} == {options.get("steps", 4)}
        assert {answer.converged for answer in answers} == {None}
        with observe(loaded) as seen:
            loaded(x)
        assert [s.counts() for s in seen.solutions[""]] == [{Result.fixed_steps: 5}]


@pytest.mark.slow
def test_what_onnx_lacks_is_named_and_torch_export_has_it(tmp_path: Path) -> None:
    """Peaceman-Rachford inverts in the Fourier domain: complex numbers."""
    model = make("mondeq_single").eval()
    with pytest.raises(ExportError, match="complex"):
        models.export(model, tmp_path / "a.onnx", steps=1)
    assert list(tmp_path.iterdir()) == []
    made = models.export(model, tmp_path / "a.pt2", steps=1)
    assert max(made.difference.values()) <= 1e-5


@pytest.mark.slow
def test_int8_weights_are_those_of_a_saved_file_and_smaller(tmp_path: Path) -> None:
    model = make("geq_stack_digits", widths=(32, 64)).eval()
    plain = models.export(model, tmp_path / "a.onnx")
    eight = models.export(model, tmp_path / "b.onnx", int8=True)
    assert eight.bytes < 0.5 * plain.bytes
    graph = onnx.load(eight.path).graph
    whole = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    assert sum(value.dtype == np.int8 for value in whole.values()) >= 4
    x = torch.randn(4, 1, 8, 8)
    gap = (models.load_onnx(eight.path)(x) - model(x).detach()).abs().max()
    assert 0 < float(gap) < 0.05


# ---------------------------------------------------------------------- ONNX files as networks


def written(path: Path, **changes: Any) -> Path:
    """An ONNX file like one of ``export``: logits = mean of each image · [0, 1, 2]."""
    model = optional("onnx.parser").parse_model(
        """<ir_version: 9, opset_import: ["": 18]>
        g (float[b, 1, 8, 8] images) => (float[b, 3] logits)
        <float[1, 3] w = {0, 1, 2}, int64[2] axes = {2, 3}>
        {
            mean = ReduceMean <keepdims = 0> (images, axes)
            logits = MatMul (mean, w)
        }"""
    )
    shape = {"num_classes": 3, "in_channels": 1, "image_size": 8, "options": {}}
    about = {
        "format": FORMAT,
        "config": {"name": "geq_digits", **shape},
        "extra": {"classes": ["x", "y", "z"], "mean": [0.5], "std": [0.25]},
        "steps": 6,
        "early_stop": False,
        "int8": False,
        **changes,
    }
    model.metadata_props.add(key="equilibria", value=json.dumps(about))
    path.write_bytes(model.SerializeToString())
    return path


def test_an_onnx_file_predicts_as_a_network(tmp_path: Path) -> None:
    network = models.load_onnx(written(tmp_path / "a.onnx"))
    white, black = torch.full((1, 8, 8), 1.0), torch.zeros(1, 8, 8)
    white[0, 0, 0] = black[0, 0, 0] = 0.5  # some contrast
    found = network.predict([white, black])
    assert [answer.label for answer in found] == ["z", "x"]
    assert found[0].steps == 6
    assert found[0].converged is None
    with pytest.raises(ValueError, match=r"\[B, 1, 8, 8\]"):
        network(torch.randn(2, 1, 9, 9))


def test_what_an_onnx_file_cannot_do_is_said(tmp_path: Path) -> None:
    network, image = models.load_onnx(written(tmp_path / "a.onnx")), torch.rand(1, 8, 8)
    copied = copy.deepcopy(network).train()
    copied.extra["classes"] = ["a", "b", "c"]
    assert copied.predict(image)[0].label != network.predict(image)[0].label
    for asked in ({"certify": True}, {"stop": "label"}):
        with pytest.raises(ValueError, match="an ONNX file has none"):
            network.predict(image, **asked)
    with pytest.raises(TypeError, match="OnnxNetwork without weights"):
        models.save(network, tmp_path / "b.safetensors")
    with pytest.raises(TypeError, match="export takes a network of"):
        models.export(network, tmp_path / "b.onnx")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "other"}, "format="),
        ({"config": {"name": "a"}}, "models.export"),
        ({"config": 3}, "models.export"),
        ({"extra": {"mean": ["x"]}}, "mean="),
        ({"extra": {"classes": ["a"]}}, "classes"),
        ({"extra": {"image_size": 9}}, "its input is"),
        ({"steps": "many"}, "models.export"),
    ],
)
def test_metadata_are_not_trusted(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        models.load_onnx(written(tmp_path / "a.onnx", **changes))


def test_files_that_are_no_onnx_are_refused(tmp_path: Path) -> None:
    assert onnxruntime.InferenceSession
    (tmp_path / "a.onnx").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ModelFileError, match="not a usable ONNX file"):
        models.load_onnx(tmp_path / "a.onnx")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        models.load_onnx(tmp_path / "b.onnx")
