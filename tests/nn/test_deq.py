"""DEQ and RepeatedBlock: any block, its fixed point, its weight-tied twin."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import equilibria as eq
from equilibria.nn import (
    DEQ,
    NormBounded,
    RepeatedBlock,
    ResidualBlock,
    WeightNormalized,
    constrain,
)
from tests.contracts.layer_contract import EXACT, TIGHT
from tests.nn.checks import MapContract
from tests.problems.test_operators import conv_matrix, randn


class TanhBlock(nn.Module):
    """tanh(Wz + Ux + b), a contraction for small W."""

    def __init__(self, inputs: int = 4, width: int = 5, scale: float = 0.5) -> None:
        super().__init__()
        self.W = nn.Linear(width, width, bias=False)
        self.U = nn.Linear(inputs, width)
        with torch.no_grad():
            self.W.weight.mul_(scale)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + self.U(x))


class PairBlock(nn.Module):
    """A state of two parts: (tanh(A v + x), ½cos(B u))."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Linear(3, 4, bias=False)
        self.B = nn.Linear(4, 3, bias=False)

    def forward(self, z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        return {"u": torch.tanh(self.A(z["v"]) + x), "v": 0.5 * torch.cos(self.B(z["u"]))}


def pair_start(x: Tensor) -> dict[str, Tensor]:
    return {"u": torch.zeros_like(x), "v": x.new_zeros(x.shape[0], 3)}


class NormedBlock(nn.Module):
    """½tanh(BN(Wz) + x)."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.W = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.norm(self.W(z)) + x)


def made(seed: int = 0, **options: Any) -> DEQ:
    torch.manual_seed(seed)
    return DEQ(TanhBlock(), **{"start": (5,), **options}).double()


class BlockContract(MapContract):
    """Less what the block decides."""

    test_wrong_number_of_channels = test_wrong_start = None
    infinite_inputs_fail = False
    wrong_options: ClassVar = [
        ("jacobian_weight", -1.0, ValueError, r"jacobian_weight=-1.* is out of range"),
    ]

    def test_wrong_dtype_says_what_to_do(self) -> None:
        layer, x = self.made(), self.drawn()
        with pytest.raises(TypeError, match="floating-point"):
            layer(x.long())
        with pytest.raises(TypeError, match="takes a tensor"):
            layer(None)
        with pytest.raises(TypeError, match="takes a tensor"):
            layer({"a": 1.0})


class TestVectorDEQ(BlockContract):
    shape = (4,)

    def layer(self, **options: Any) -> DEQ:
        return DEQ(TanhBlock(), start=(5,), **options)


class TestResidualDEQ(BlockContract):
    """Nguyen 2022, Eq 4.1, with default start: zero, shaped as x."""

    shape = (4, 6, 6)

    def layer(self, **options: Any) -> DEQ:
        return DEQ(ResidualBlock(4, 8, groups=2), **options)

    def inputs(self, batch: int = 3) -> Tensor:
        return 2.0 * super().inputs(batch)

    def test_zero_input_gives_no_nan(self) -> None:
        layer = self.made()
        x = torch.zeros_like(self.drawn()).requires_grad_()
        # Group norm of an almost constant map divides by nearly nothing: no fixed point is near.
        z = layer.solve(x, solver=eq.Picard(rtol=0.0, max_steps=5), adjoint=eq.Unrolled()).value
        z.sum().backward()
        assert torch.isfinite(z).all()
        assert torch.isfinite(x.grad).all()


# ---------------------------------------------------------------------- fixed points and gradients


def test_a_state_that_is_a_tree() -> None:
    torch.manual_seed(0)
    layer = DEQ(PairBlock(), start=pair_start, solver=TIGHT, adjoint=EXACT).double()
    x = randn(3, 4).requires_grad_()
    z = layer(x)
    image = layer.block(z, x)
    for name in ("u", "v"):
        torch.testing.assert_close(z[name], image[name], rtol=0, atol=1e-11)
    assert torch.autograd.gradcheck(lambda t: tuple(layer(t).values()), (x,), atol=1e-6)
    assert layer.spectral_radius(x, z).shape == (3,)
    assert layer.certify(x).residual.max() < 1e-10
    twin = layer.repeated(60)(x)
    torch.testing.assert_close(twin["u"], z["u"], rtol=0, atol=1e-9)


def test_an_input_that_is_a_tree() -> None:
    layer = DEQ(lambda z, x: torch.tanh(0.5 * z + x["a"] * x["b"]), start=(3,), solver=TIGHT)
    x = {"a": randn(2, 3).requires_grad_(), "b": randn(2, 3)}
    z = layer(x)
    torch.testing.assert_close(torch.tanh(0.5 * z + x["a"] * x["b"]), z, rtol=0, atol=1e-10)
    z.sum().backward()
    assert x["a"].grad is not None
    with pytest.raises(TypeError, match=r"cannot guess the shape.*start="):
        DEQ(lambda z, x: z)(x)


# ---------------------------------------------------------------------- the weight-tied twin


@pytest.mark.parametrize("repeats", [1, 2, 6])
def test_repeated_block_is_so_many_picard_steps(repeats: int) -> None:
    layer, x = made(), randn(3, 4)
    solver = eq.Picard(rtol=0.0, max_steps=repeats)
    expected = layer.solve(x, solver=solver, adjoint=eq.Unrolled())
    twin = layer.repeated(repeats)
    assert torch.equal(twin(x), expected.value)
    w, u, b = (
        p.detach().numpy() for p in (*layer.block.W.parameters(), *layer.block.U.parameters())
    )
    z = np.zeros((3, 5))
    for _ in range(repeats):
        z = np.tanh(z @ w.T + x.numpy() @ u.T + b)
    np.testing.assert_allclose(twin(x).detach().numpy(), z, rtol=1e-12)


def test_state_dicts_go_both_ways() -> None:
    layer, x = made(seed=0), randn(3, 4)
    other = RepeatedBlock(TanhBlock(), repeats=3, start=(5,)).double()
    assert list(other.state_dict()) == list(layer.state_dict())
    back = layer.repeated(6).deq()
    assert back.block is layer.block
    assert back.initial == layer.initial
    assert not eq.nn.equilibrium_layers(other)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer.repeated(3)(x))
    fresh = made(seed=1)
    fresh.load_state_dict(other.state_dict())
    assert torch.equal(fresh(x), layer(x))
    warm = other(x, layer(x).detach())
    torch.testing.assert_close(warm, layer(x), rtol=1e-6, atol=1e-7)


def test_a_state_may_be_wider_than_x_and_start_from_its_own_answer() -> None:
    x = torch.randn(3, 4)
    layer = DEQ(lambda z, x: 0.5 * z + x.double(), start=lambda x: x.double())
    z = layer(x)
    torch.testing.assert_close(z, 2 * x.double(), rtol=1e-4, atol=1e-4)
    assert torch.equal(layer(x, z.detach()), z.detach())
    plain = DEQ(lambda z, x: 0.5 * z + x)
    with pytest.raises(TypeError, match="meet a state of torch"):
        plain(x, z.detach())


# ---------------------------------------------------------------------- parts that move in training


def test_batch_norm_stands_still_in_a_solve_and_moves_once() -> None:
    torch.manual_seed(0)
    layer = DEQ(NormedBlock(), solver=TIGHT, adjoint=EXACT).double()
    block, x = layer.block, randn(6, 4)
    assert layer.training
    assert not block.norm.training
    before = copy.deepcopy(block)
    z = layer(x)
    assert int(block.norm.num_batches_tracked) == 1
    # Independent: the statistics that one evaluation at z* moves, by their definition.
    features = (z @ block.W.weight.mT + block.W.bias).detach()
    torch.testing.assert_close(block.norm.running_mean, 0.1 * features.mean(0))
    torch.testing.assert_close(block.norm.running_var, 0.9 + 0.1 * features.var(0))
    z.sum().backward()  # the graph holds the statistics of the solve
    torch.testing.assert_close(before.eval()(z, x), z, rtol=0, atol=1e-10)
    alone = copy.deepcopy(layer)
    alone.block = before
    torch.testing.assert_close(alone(x[:2]), z[:2], rtol=0, atol=1e-10)
    layer.eval()
    layer(x)
    assert int(block.norm.num_batches_tracked) == 1
    layer.train()
    assert not block.norm.training
    layer.repeated(4)(x)
    assert int(block.norm.num_batches_tracked) == 2


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_power_iterations_move_once_a_forward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    block = TanhBlock(scale=4.0)
    if kind == "ours":
        constrain(block.W, "weight", NormBounded(bound=0.9))
    else:
        nn.utils.parametrizations.spectral_norm(block.W)
    norm = block.W.parametrizations.weight[0]
    with torch.no_grad():
        for p in block.W.parametrizations.weight.parameters():
            p.copy_(torch.randn(p.shape))
    layer, x = DEQ(block, start=(5,), solver=eq.Anderson(rtol=1e-10)).double(), randn(3, 4)
    method, moves = "_iterate" if kind == "ours" else "_power_method", []
    plain = getattr(type(norm), method)
    monkeypatch.setattr(type(norm), method, lambda self, *a: (moves.append(1), plain(self, *a))[1])
    first = layer.solve(x)
    assert len(moves) == 1
    assert bool(first.converged.all())
    first.value.sum().backward()
    layer.eval()(x)
    assert len(moves) == 1


# ---------------------------------------------------------------------- the Jacobian


def test_the_penalty_is_that_of_the_map_at_the_answer() -> None:
    layer, x = made(jacobian_weight=0.3), randn(3, 4)
    torch.manual_seed(5)
    with eq.nn.collect_penalties(layer) as found:
        z = layer(x)
    torch.manual_seed(5)
    expected = 0.3 * eq.jacobian_penalty(layer.step, z, (x,)).mean()
    torch.testing.assert_close(found.total(), expected)


def test_spectral_radius_is_the_largest_eigenvalue() -> None:
    layer, x = made(solver=TIGHT), randn(3, 4)
    z = layer(x).detach()
    w = layer.block.W.weight
    slope = 1 - torch.tanh(z @ w.mT + layer.block.U(x)).square()  # J = diag(1 − tanh²)W
    jacobians = (slope.unsqueeze(2) * w).detach().numpy()
    exact = np.abs(np.linalg.eigvals(jacobians)).max(1)
    np.testing.assert_allclose(layer.spectral_radius(x, z).numpy(), exact, rtol=1e-8)
    np.testing.assert_allclose(layer.spectral_radius(x).numpy(), exact, rtol=1e-6)


def test_a_bad_sample_moves_no_running_statistics() -> None:
    """NaN in a running mean would be every later sample's. A healthy mate is counted instead."""
    torch.manual_seed(0)
    layer = DEQ(NormedBlock(), solver=TIGHT, adjoint=EXACT).double().train()
    x = torch.randn(3, 4, dtype=torch.float64)
    copies = copy.deepcopy(layer)
    copies(x[[0, 0, 2]])
    x[1, 0] = float("nan")
    with pytest.warns(eq.ConvergenceWarning):
        layer(x)
    torch.testing.assert_close(layer.block.norm.running_mean, copies.block.norm.running_mean)
    torch.testing.assert_close(layer.block.norm.running_var, copies.block.norm.running_var)


# ---------------------------------------------------------------------- residualBlock


Array = NDArray[np.float64]


def group_norm(image: Array, groups: int, weight: Array, bias: Array) -> Array:
    cut = image.reshape(groups, -1)
    scaled = (cut - cut.mean(1, keepdims=True)) / np.sqrt(cut.var(1, keepdims=True) + 1e-5)
    return scaled.reshape(image.shape) * weight[:, None, None] + bias[:, None, None]


@pytest.mark.parametrize("size", [3, 5])
def test_the_formula_of_the_residual_block(size: int) -> None:
    torch.manual_seed(0)
    block = ResidualBlock(4, 6, groups=2, kernel_size=size, std=0.3).double()
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    z, x = randn(2, 4, 5, 6), randn(2, 4, 5, 6)
    w = {name: p.detach().numpy() for name, p in block.named_parameters()}

    def convolve(name: str, image: Array) -> Array:
        matrix = conv_matrix(torch.from_numpy(w[name]), 5, 6, padding=size // 2)
        return (matrix @ image.ravel()).reshape(-1, 5, 6)

    for i in range(2):
        a, b = z[i].numpy(), x[i].numpy()
        inner = np.maximum(convolve("conv1.weight", a), 0)
        inner = group_norm(inner, 2, w["norm1.weight"], w["norm1.bias"])
        inner = b + convolve("conv2.weight", inner)
        inner = group_norm(inner, 2, w["norm2.weight"], w["norm2.bias"])
        out = group_norm(np.maximum(a + inner, 0), 2, w["norm3.weight"], w["norm3.bias"])
        np.testing.assert_allclose(block(z, x)[i].detach().numpy(), out, rtol=1e-9, atol=1e-10)


def test_constraints_of_the_residual_block() -> None:
    plain = ResidualBlock(8, 16, affine=False, constraint=WeightNormalized())
    assert sum(p.numel() for p in plain.parameters()) == 2 * 9 * 128 + 16 + 8
    bounded = ResidualBlock(8, constraint=NormBounded(bound=0.01))
    assert float(bounded.conv1.weight.detach().norm()) < 1.0


# ---------------------------------------------------------------------- bad input


def test_a_dropout_of_nothing_is_no_dropout() -> None:
    assert DEQ(nn.Sequential(nn.Dropout(0.0))).block[0].p == 0.0


DROPPED, RIGHT = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), torch.zeros(2, 8, 3, 3)


def capturing(block: nn.Module) -> Any:
    return lambda z, x: block(z, x)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DEQ("tanh"), TypeError, r"block='tanh'.*block\(z, x\)"),  # type: ignore[arg-type]
        (lambda: made(start=[5]), TypeError, r"start=\[5\].*shape of one sample"),
        (lambda: made(start=(5, 0)), ValueError, r"start\[1\]=0.*at least 1"),
        (lambda: made().repeated(0), ValueError, r"RepeatedBlock\(repeats=0\).*at least 1"),
        (lambda: DEQ(capturing(TanhBlock())), ValueError, r"captures 'block'.*nn.Module with forw"),
        (lambda: ResidualBlock(12), ValueError, r"groups=8 .* divide channels=12, and 12 % 8 = 4"),
        (lambda: ResidualBlock(16, 12), ValueError, "must divide inner=12"),
        (lambda: ResidualBlock(8, kernel_size=4), ValueError, "odd kernel size"),
        (lambda: ResidualBlock(0), ValueError, r"channels=0\): expected an integer of at least 1"),
        (lambda: ResidualBlock(8, std=0.0), ValueError, r"std=0.*out of range"),
        (
            lambda: DEQ(DROPPED),
            ValueError,
            r"Dropout\(p=0.5.* at '1'.*new mask at every evaluation",
        ),
        (lambda: RepeatedBlock(nn.Dropout2d(0.1), repeats=2), ValueError, "no fixed point"),
        (
            lambda: DEQ(lambda z, x: z[:, :2], start=(4,))(torch.zeros(2, 4)),
            ValueError,
            r"T\(z\) and z must have one shape",
        ),
        (
            lambda: ResidualBlock(8)(RIGHT[:, :4], RIGHT),
            ValueError,
            r"takes z \[B, 8.* \(2, 4, 3, 3\)",
        ),
        (lambda: ResidualBlock(8)(RIGHT, RIGHT[..., 0]), ValueError, r"takes x \[B, 8, H, W\]"),
    ],
)
def test_bad_options(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
