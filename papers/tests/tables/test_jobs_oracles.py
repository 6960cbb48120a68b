"""Declared jobs against what the papers say of them, computed from the weights in numpy.

The networks are built as ``reproduce`` builds them. What a row of a table promises (α, K, which
regularizer, by which way in) is written down here again and carried out in float64.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from equilibria import data
from equilibria.data import ImageData
from equilibria_papers.tables import describe, measures, reproduce
from equilibria_papers.tables import images as supplying
from equilibria_papers.tables.experiment import Cell, Job
from equilibria_papers.tables.plan import Planned, plan_of
from equilibria_papers.tables.thesis import create
from tests.evaluation.standins import dataset

from . import tiny
from .scenes import scene_of

Array = npt.NDArray[np.float64]
Step = Callable[[Array], Array]


def _create(planned: Planned, images: ImageData) -> nn.Module:
    return create(planned.config.model, images, **planned.config.model_options)


def _convolved(z: Array, w: Array) -> Array:
    """[B, c, H, W] with kernels [o, c, 3, 3] and zeros around → [B, o, H, W]."""
    padded = np.pad(z, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    made: Array = np.tensordot(windows, w, ((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)
    return made


def _transposed(w: Array) -> Array:
    """The kernels of Wᵀ."""
    return w.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1]


class _Weights:
    """W_l, U_l and b_l of a built network's layer, in float64."""

    def __init__(self, layer: nn.Module) -> None:
        blocks: Any = layer.blocks
        self.w = [block.W.weight.detach().double().numpy() for block in blocks]
        self.u = [block.U.weight.detach().double().numpy() for block in blocks]
        self.b = [block.U.bias.detach().double().numpy() for block in blocks]

    def map(self, x: Array, alpha: float) -> Step:
        """T(z) = f_L ∘ … ∘ f_1, f_l(z) = αW_lᵀ relu(W_l z + U_l x + b_l) + (1 − α)z (Eq 5, 6)."""
        c = [_convolved(x, u) + b[:, None, None] for u, b in zip(self.u, self.b, strict=True)]

        def apply(z: Array) -> Array:
            for w, part in zip(self.w, c, strict=True):
                hidden = np.maximum(_convolved(z, w) + part, 0.0)
                z = alpha * _convolved(hidden, _transposed(w)) + (1 - alpha) * z
            return z

        return apply


def _gradient(value: Callable[[Tensor], Tensor]) -> Step:
    def at(z: Array) -> Array:
        given = torch.from_numpy(z).requires_grad_()
        made: Array = torch.autograd.grad(value(given), given)[0].numpy()
        return made

    return at


def _decorrelation(z: Tensor) -> Tensor:
    """300·½‖D Z Zᵀ D − I‖²_F (Eq 13), a row for each channel."""
    rows = z.movedim(1, 0).flatten(1)
    d = torch.diag(1 / rows.norm(dim=1))
    return 300 * 0.5 * (d @ rows @ rows.T @ d - torch.eye(len(rows)).double()).square().sum()


def _hsic(z: Tensor) -> Tensor:
    """5000·Σ_{i<j} tr(K_i H K_j H)/(B − 1)² (§7.2.1), the kernel exp(−‖·‖²/(2·15²))."""
    batch, channels = z.shape[:2]
    h = torch.eye(batch).double() - 1 / batch
    gaps = z.transpose(0, 1).flatten(2)[:, :, None] - z.transpose(0, 1).flatten(2)[:, None]
    centered = torch.exp(-gaps.square().sum(3) / (2 * 15.0**2)) @ h  # K_i H, [m, B, B]
    traces = torch.einsum("iab,jba->ij", centered, centered)
    pairs = torch.ones(channels, channels).triu(1).bool()
    return 5000 * traces[pairs].sum() / (batch - 1) ** 2


# The weights are ours, and so is ε = 4,000 of the feature incay.
_REGULARIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "½‖z‖²": lambda z: 0.5 * z.square().sum(),
    "2/(‖z‖²+2ε)": lambda z: (2 * 4.8e6 / (z.square().flatten(1).sum(1) + 8e3)).sum(),
    "F_Dz": _decorrelation,
    "HSIC": _hsic,
}


def _plain(apply: Step, z: Array, steps: int = 20) -> Array:
    for _ in range(steps):
        z = apply(z)
    return z


def _sam(apply: Step, gradient: Step, z: Array, bound: float) -> Array:
    """Eq 11 with L_z: γ = 1/(2L_z), β_k = λ_k = η/k^0.3, η = min(√(2L_z), L_z/2, ½); K = 20."""
    gamma, eta = 1 / (2 * bound), min(np.sqrt(2 * bound), bound / 2, 0.5)
    for k in range(1, 21):
        beta = decay = eta / k**0.3
        s = (1 - gamma * decay) * z - gamma * gradient(z)
        z = beta * s + (1 - beta) * apply(z)
    return z


def _carried_out(setting: str, apply: Step, z: Array) -> Array:
    """What the name of a row of Table 5 says: R† by SAM (§5.2), R* in the map (§5.1)."""
    if setting == "no Reg":
        return _plain(apply, z)
    name = setting[:-1]
    gradient = _gradient(_REGULARIZERS[name[1:-1] if name.startswith("(") else name])
    if setting.endswith("†"):
        # Incay's Hessian is at most weight/ε², at z = 0; the others have 1 or are given it.
        return _sam(apply, gradient, z, 4.8e6 / 4000**2 if "ε" in setting else 1.0)
    return _plain(lambda z: apply(z - gradient(z)), z)


def _images(count: int, size: int, name: str = "cifar10") -> ImageData:
    pixels = torch.zeros(count, 3, size, size, dtype=torch.uint8)
    return dataset(pixels, torch.arange(count) % 10, 10, name=name, split_name="train")


def _layer(job: Job, folder: Path, smoke: bool) -> Any:
    """The layer of the job's network, as it is built, in float64."""
    (planned,) = plan_of(job, tiny.choices(folder, smoke=smoke))
    torch.manual_seed(0)
    made: Any = _create(planned, _images(2, 6)).double().eval()
    return made.layer


def _cells(table: str, model: str = "deep_opteq_") -> list[Cell]:
    found = describe(table).cells
    return [
        c
        for c in found
        if c.job is not None and c.job.model.startswith(model) and "acc" in c.metric
    ]


def _input(channels: int, setting: str) -> Array:
    # Such that the regularizer is felt and does not rule: its weight is for 125 · 32² pixels.
    scale = {"HSIC": 0.1, "2/(‖": 4.0, "F_Dz": 300.0}.get(setting.strip("()")[:4], 1.0)
    drawn: Array = scale * np.random.default_rng(0).standard_normal((3, channels, 6, 6))
    return drawn


# Rows of Tables 3 and 4 in the words of Table 5.
_SETTING = {
    "R_z†": "F_Dz†",
    "R_z*": "F_Dz*",
    "decorrelation (R*)": "F_Dz*",
    "decorrelation (R†)": "F_Dz†",
    "HSIC (R*)": "HSIC*",
}


def _settings() -> list[Any]:
    made = {}
    for table in ("opteq-table3", "opteq-table4", "opteq-table5"):
        for cell in _cells(table):
            assert cell.job is not None
            if not cell.row.startswith("λ"):
                found = re.search(r"α = ([\d.]+)", cell.column)
                alpha = float(found[1]) if found else 0.8
                setting = _SETTING.get(cell.row, cell.row)
                made[cell.job.name] = (cell.job, setting, alpha)
    return [pytest.param(*given, id=name) for name, given in made.items()]


@pytest.mark.parametrize(("job", "setting", "alpha"), _settings())
def test_rows_of_opteq_are_the_networks_they_name(
    job: Job, setting: str, alpha: float, tmp_path: Path
) -> None:
    """Tables 3, 4, 5: 20 steps from z₀ = x, by the row's regularizer and the column's α."""
    # Narrow networks, and one of full width, with the α that the papers' others have.
    whole = job.name == "cifar10-deep_opteq_199k-decorrelation-alpha-0.8"
    layer = _layer(job, tmp_path, smoke=not whole)
    x = _input(layer.channels, setting)
    with torch.no_grad():
        found = layer(torch.from_numpy(x)).numpy()
    apply = _Weights(layer).map(x, alpha)
    expected = _carried_out(setting, apply, x)
    size = np.abs(expected).max()
    assert np.abs(found - expected).max() < 1e-12 * size
    if setting != "no Reg":
        assert np.abs(expected - _plain(apply, x)).max() > 1e-9 * size


def test_every_row_of_tables_3_to_5_is_looked_at() -> None:
    settings = {(given.values[1], given.values[2]) for given in _settings()}
    alphas = (0.01, 0.1, 0.4, 0.8, 1.0)
    names = {"no Reg", "(½‖z‖²)†", *(f"{n}{w}" for n in ("F_Dz", "HSIC") for w in "†*")}
    names |= {"(2/(‖z‖²+2ε))†", "(2/(‖z‖²+2ε))*"}
    assert settings == {(name, alpha) for name in names for alpha in alphas}
    assert {given.values[0].model for given in _settings()} == {
        "deep_opteq_199k",
        "deep_opteq_162k",
        "deep_opteq_1m4",
    }


def _prox(kind: str, weight: float) -> Step:
    """argmin_u λ|u| + ½(u − z)², or λu² + ½(u − z)², number by number."""
    if kind == "‖z‖₁":
        return lambda z: np.where(np.abs(z) > weight, z - weight * np.sign(z), 0.0)
    return lambda z: z / (1 + 2 * weight)


def _penalized() -> list[tuple[str, float, Job]]:
    found = []
    for cell in _cells("opteq-table3"):
        named = re.fullmatch(r"λ(\S+), λ = ([\d.]+)", cell.row)
        if named and cell.job is not None:
            found.append((named[1], float(named[2]), cell.job))
    return found


_ONE_BLOCK = {"channels": 4, "mids": [6], "image_size": 8}


def _network(job: Job, folder: Path) -> tuple[Any, supplying.Supplied, Path]:
    """A smoke test's network with the weights that its training left, its images, its folder."""
    (planned,) = plan_of(job, tiny.choices(folder, smoke=True))
    given = supplying.supply(planned, progress=False)
    model = _create(planned, given.train)
    weights = safetensors.torch.load_file(planned.folder / "model.safetensors")
    model.load_state_dict(weights)
    return model.eval(), given, planned.folder


def _stem(model: Any, images: ImageData) -> Array:
    """relu(BN(convolution)) of the normalized images."""
    pixels = torch.as_tensor(images.images).numpy() / 255.0
    x = (pixels - np.reshape(images.mean, (1, -1, 1, 1))) / np.reshape(images.std, (1, -1, 1, 1))
    norm = model.extractor[1]
    gain, shift, mean, variance = (
        t.detach().double().numpy()[:, None, None]
        for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    )
    x = _convolved(x, model.extractor[0].weight.detach().double().numpy())
    out: Array = np.maximum((x - mean) / np.sqrt(variance + norm.eps) * gain + shift, 0.0)
    return out


@pytest.mark.parametrize("kind", ["‖z‖₁", "‖z‖²"])
def test_a_trained_row_of_table_3_is_penalized_as_it_says(kind: str, tmp_path: Path) -> None:
    """From the job to the number of the table, with the trained weights taken up in numpy."""
    rows = [(value, job) for name, value, job in _penalized() if name == kind]
    assert [value for value, _ in rows] == ([0.01, 0.15, 0.5] if "₁" in kind else [0.01, 1.0, 10.0])
    jobs = [dataclasses.replace(job, smoke=_ONE_BLOCK) for _, job in rows]
    metric = "mean_absolute" if "₁" in kind else "mean_square"
    middle = next(
        dataclasses.replace(cell, job=jobs[1])
        for cell in describe("opteq-table3").cells
        if cell.job is rows[1][1] and cell.metric != "accuracy"
    )
    assert middle.metric == metric
    table = dataclasses.replace(tiny.table(), cells=(middle,))
    result = reproduce(table, tiny.choices(tmp_path, smoke=True))
    model, given, folder = _network(jobs[1], tmp_path)
    x = _stem(model, given.test)
    weights = _Weights(model.layer)
    apply = weights.map(x, 0.8)

    means = []
    for (value, _), job in zip(rows, jobs, strict=True):
        prox = _prox(kind, value)
        z = _plain(lambda z, prox=prox: apply(prox(z)), x)  # type: ignore[misc]
        (planned,) = plan_of(job, tiny.choices(tmp_path, smoke=True))
        other = _create(planned, given.train)
        other.load_state_dict(model.state_dict())  # the same weights with another λ
        scene = scene_of(other, given.test, folder, batch_size=24, smoke=True)
        found = measures.features(scene)
        assert found["mean_absolute"] == pytest.approx(np.abs(z).mean(), rel=1e-4)
        assert found["mean_square"] == pytest.approx((z**2).mean(), rel=1e-4)
        means.append(found[metric])
    assert result.cells[0].mean == pytest.approx(means[1], rel=1e-6)
    assert means[0] > 1.05 * means[1]  # §7.1: features show decreases in the norm
    assert means[1] > 1.05 * means[2]


def test_table_8_takes_the_steps_that_it_names(tmp_path: Path) -> None:
    """K plain steps at α = 0.8, and ‖z − T(z)‖/‖z‖ of test batches; IFT: near its threshold."""
    jobs = {cell.row: cell.job for cell in _cells("opteq-table8")}
    assert len(jobs) == 6
    test = dataclasses.replace(
        _images(12, 6),
        images=torch.randint(0, 256, (12, 3, 6, 6), generator=torch.Generator().manual_seed(0)).to(
            torch.uint8
        ),
    )
    previous = np.inf
    for row, job in jobs.items():
        assert job is not None
        (planned,) = plan_of(job, tiny.choices(tmp_path, smoke=True))
        torch.manual_seed(0)
        model: Any = _create(planned, test).double().eval()
        with torch.no_grad():  # initial weights are small: let T contract slowly
            for block in model.layer.blocks:
                block.W.weight = 10 * block.W.weight
        scene = scene_of(model, test, tmp_path, batch_size=8, smoke=True)
        found = measures.residual(scene)["residual"]
        steps = re.fullmatch(r"Unrolling \(K=(\d+)\)", row)
        if steps is None:
            threshold = float(re.findall(r"thd = (.*)\)", row)[0])
            solver, adjoint = model.layer.solver, model.layer.adjoint
            assert (type(solver).__name__, solver.rtol) == ("Broyden", threshold)
            assert (type(adjoint).__name__, adjoint.solver.rtol) == ("Implicit", threshold)
            assert 0.0 < found <= 1.5 * threshold  # ours: over ‖T(z)‖, a sample
            continue
        x, ratios = _stem(model, test), []
        for rows in (slice(0, 8), slice(8, 12)):
            apply = _Weights(model.layer).map(x[rows], 0.8)
            z = _plain(apply, x[rows], int(steps[1]))
            ratios.append(np.linalg.norm(z - apply(z)) / np.linalg.norm(z))
        assert found == pytest.approx(np.mean(ratios), rel=1e-4, abs=1e-9)
        assert found < max(previous, 1e-12)
        previous = found


# Table → (its large data, pixels of CIFAR-10 in their place).
_LARGE = {
    "geq-table2": ("imagenette", "imagenet-100"),
    "kerdeq-table2": ("imagenette", "imagenet-100"),
    "geq-figure3": ("imagenette",),
    "thesis-figure4.5": ("imagenet-100",),
    "opteq-table7": ("imagenet",),
}


@pytest.mark.parametrize("table", _LARGE)
def test_cifar_10_stands_in_for_large_images(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resized to 64 pixels (128 for patches of 4), ten classes, 20 epochs, a tenth held out."""
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path / "cache"))
    asked: list[tuple[str, str, int]] = []

    def load(name: str, split: str, *, image_size: int, **_: Any) -> ImageData:
        asked.append((name, split, image_size))
        return _images(500, image_size)

    supplying._read.cache_clear()
    monkeypatch.setattr(data, "load", load)
    jobs = {job.name: job for job in describe(table).jobs}
    assert {job.data for job in jobs.values()} == set(_LARGE[table])
    for job in jobs.values():
        (planned,) = plan_of(job, tiny.choices(tmp_path, stand_in=True, data_root=tmp_path))
        pixels = 128 if job.model.startswith("kerdeq") else 64
        assert planned.stands_in == "cifar10"
        assert (planned.config.data, planned.config.epochs) == ("cifar10", 20)
        given = supplying.supply(planned, progress=False)
        assert given.train.images.shape[1:] == given.test.images.shape[1:] == (3, pixels, pixels)
        share = 10 if table == "opteq-table7" else 50
        assert given.held_out is not None
        assert (len(given.train), len(given.held_out)) == (500 - share, share)
    supplying._read.cache_clear()
    assert {(name, split) for name, split, _ in asked} == {
        ("cifar10", "train"),
        ("cifar10", "test"),
    }


def _standing_in(folder: Path) -> dict[str, Planned]:
    """By model and options, each once."""
    made = {}
    for table in _LARGE:
        for job in describe(table).jobs:
            (one,) = plan_of(job, tiny.choices(folder, stand_in=True, data_root=folder))
            made[f"{job.model} {sorted(one.config.model_options.items())}"] = one
    return made


@pytest.mark.slow
def test_networks_take_what_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path / "cache"))
    found = _standing_in(tmp_path)
    assert len(found) == 12
    for planned in found.values():
        pixels = planned.config.image_size
        assert pixels is not None
        model = _create(planned, _images(10, pixels)).eval()
        with torch.no_grad():
            assert model(torch.zeros(1, 3, pixels, pixels)).shape == (1, 10)
