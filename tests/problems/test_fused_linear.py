"""The fused path of the linear kernel, z = (1/ν)Wᵀσ(Wz + c), against dense algebra in float64.

W is written out as a matrix here, and the series of the gradient as products of matrices.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria import models
from equilibria.engine.result import Result
from equilibria.ops import gaussian_steps
from equilibria.ops.convolutions import convolve_add_relu
from tests.ops import on_gpu
from tests.problems.test_fused import fixed, watched

STATE, MID, SIZE = 5, 7, (3, 4)


def series(terms: int) -> eq.Phantom:
    return eq.Phantom(steps=terms, damping=1.0, form="neumann")


def layer(steps: int = 6, terms: int = 3, tau: float | None = 1.0, **changes: Any) -> eq.nn.OptEq:
    torch.manual_seed(0)
    options = {"kernel_size": 3, "solver": fixed(steps, tau), "adjoint": series(terms), **changes}
    return eq.nn.OptEq(STATE, MID, in_channels=3, **options).double().eval()


def images(batch: int = 3) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 3, *SIZE, dtype=torch.float64)


def states(batch: int = 3) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(batch, STATE, *SIZE, dtype=torch.float64)


def solved(module: Any, x: Tensor, weight: Tensor, z0: Tensor | None = None) -> list[Tensor]:
    """The value, and the gradients of x and of all parameters."""
    given = x.clone().requires_grad_()
    value = module.solve(given, z0).value
    grads = torch.autograd.grad((value * weight).sum(), [given, *module.parameters()])
    return [value.detach(), *grads]


def dense(module: eq.nn.OptEq, x: Tensor) -> tuple[Tensor, Tensor]:
    """W as a matrix [MID·n, STATE·n] and c [B, MID·n]."""
    w = module.W.weight.detach()
    eye = torch.eye(STATE * SIZE[0] * SIZE[1], dtype=w.dtype)
    columns = torch.nn.functional.conv2d(eye.view(-1, STATE, *SIZE), w, padding=1)  # type: ignore[arg-type]
    return columns.flatten(1).T, module.U(x).detach().flatten(1)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("steps", "tau", "nu"), [(1, 1.0, 1.0), (2, 0.9, 1.0), (6, 1.3, 1.7), (3, None, 2.0)]
)
def test_steps_and_gradients(
    steps: int, tau: float | None, nu: float, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps and the series by dense algebra, and all gradients against the general path.

    The general path evaluates T once more, at its answer: its gradient is that of a step later.
    """
    made, x, g = layer(steps, 3, tau, nu=nu), images(), states().flip(0)
    z0 = states() if given else None
    seen = watched(monkeypatch)
    found = solved(made, x, g, z0)
    solution = made.solve(x, z0)
    assert seen == [True, True]
    W, c = dense(made, x)
    size = made.solver.for_problem(lambda: made.nominal_bounds(None)).tau  # type: ignore[arg-type, return-value, union-attr]
    z = states().flatten(1) if given else torch.zeros(3, W.shape[1], dtype=W.dtype)
    for _ in range(steps):
        z, before = (1 - size) * z + size / nu * (z @ W.T + c).relu() @ W, z
    torch.testing.assert_close(found[0].flatten(1), z, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(solution.stats.residual, (z - before).norm(dim=1))
    assert set(solution.result.tolist()) == {int(Result.fixed_steps)}
    mask = (before @ W.T + c > 0).double()
    d = u = g.flatten(1)
    for _ in range(2):
        d = (1 - size) * d + size / nu * (mask * (d @ W.T)) @ W
        u = u + d
    dc = size / nu * mask * (u @ W.T)
    bias = dc.view(3, MID, -1).sum((0, 2))
    names = ["x", *(name for name, _ in made.named_parameters())]
    torch.testing.assert_close(found[1 + names.index("U.bias")], bias, rtol=1e-10, atol=1e-12)
    watched(monkeypatch, general=True)
    torch.testing.assert_close(found[0], made.solve(x, z0).value, rtol=1e-9, atol=1e-11)
    if steps > 1:
        for a, b in zip(
            found[1:], solved(eq.nn.set_steps(made, steps - 1), x, g, z0)[1:], strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_many_terms_are_the_implicit_gradient(layout: Any) -> None:
    """Of c, W and x, at the equilibrium, by a dense linear system."""
    made, g = layer(400, 400, 1.0), states().flip(0)
    x = images().to(memory_format=layout)
    found = solved(made, x, g)
    W, c = dense(made, x)
    z = found[0].flatten(1)
    mask = (z @ W.T + c > 0).double()
    J = torch.einsum("mi,bm,mj->bij", W, mask, W)
    system = torch.eye(W.shape[1], dtype=W.dtype) - J
    u = torch.linalg.solve(system, g.flatten(1).unsqueeze(-1)).squeeze(-1)
    dc = (mask * (u @ W.T)).view(3, MID, *SIZE)
    given = x.clone().requires_grad_()
    right = torch.autograd.grad(made.U(given), given, dc)[0]
    torch.testing.assert_close(found[1], right, rtol=1e-8, atol=1e-10)
    direct = layer(400, 400, adjoint=eq.Implicit(solver=eq.GMRES(rtol=1e-12)))
    for a, b in zip(found, solved(direct, x, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"adjoint": eq.Phantom(steps=3, damping=1.0)},
        {"adjoint": eq.Phantom(steps=3, damping=0.8, form="neumann")},
        {"solver": eq.Anderson(rtol=0.0, atol=0.0, max_steps=4)},
        {"prior": eq.SoftThreshold(0.1)},
        {"form": "hidden"},
    ],
)
def test_the_rest_takes_the_general_path(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watched(monkeypatch)
    layer(4, **changes)(images())
    assert seen == [False]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
def test_nan_stays_in_its_sample(
    steps: int, hide: bool, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the fused ReLU of a device turns NaN into 0, and with NaN in the gradient."""

    def hiding(*args: Any, keep_nan: bool = False) -> Tensor:
        found = convolve_add_relu(*args)
        return found if keep_nan else found.nan_to_num(0.0)

    if hide:
        monkeypatch.setattr(gaussian_steps, "convolve_add_relu", hiding)
    made, x, g = layer(steps, 3, 1.0), images(), states().flip(0)
    z0, good = (states() if given else None), [0, 2]
    right = solved(made, x[good], g[good], None if z0 is None else z0[good])
    x[1, 0, 0, 0], g[1] = float("nan"), float("nan")
    solution = made.solve(x, z0)
    assert solution.result.tolist()[1] == int(Result.nonfinite)
    start = states()[1] if given else torch.zeros_like(states()[1])
    assert torch.equal(solution.value[1].detach(), start)
    found = solved(made, x, g, z0)
    assert float(found[1][1].abs().max()) == 0.0
    for a, b in zip([found[0][good], found[1][good], *found[2:]], right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_divergence_is_told() -> None:
    made = layer(30, 2, 6.0)
    made.solver = eq.ProximalGradient(
        rtol=0.0, atol=0.0, max_steps=30, accelerate=False, tau=6.0, divergence=10.0
    )
    solution = made.solve(images())
    assert set(solution.result.tolist()) == {int(Result.diverged)}
    assert float(solution.value.detach().abs().max()) == 0.0
    for g in torch.autograd.grad(solution.value.sum(), list(made.parameters())):
        assert float(g.abs().max()) == 0.0


def test_bfloat16_is_near() -> None:
    made, x, g = layer(4, 3, 0.9).float(), images().float(), states().float()
    right = solved(made, x, g)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = solved(made, x, g)
    assert found[0].dtype == torch.bfloat16
    for a, b in zip(found, right, strict=True):
        assert float((a.float() - b).norm() / b.norm()) < 0.03


def test_autocast_around_the_backward_pass_alone() -> None:
    """A solve in float32 has its gradients in float32, as torch's convolutions have."""
    made, x, g = layer(4, 3, 0.9).float(), images().float(), states().float()
    loss = (made(x) * g).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(loss, list(made.U.parameters()))
    right = torch.autograd.grad((made(x) * g).sum(), list(made.U.parameters()))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reading", ["chain", "parallel"])
def test_six_branches_train_through_it(reading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The papers' solver stays on the general path."""
    small = {"channels": 8, "mids": (4, 4, 4, 4, 8, 8), "image_size": 16, "reading": reading}
    quick = {"solver": fixed(40, 0.9), "adjoint": series(2)}
    seen, x = watched(monkeypatch), torch.randn(2, 3, 16, 16)
    papers = {
        "solver": eq.Anderson(rtol=0.0, atol=0.0, max_steps=10),
        "adjoint": eq.Phantom(steps=5),
    }
    models.create("mopteq_cifar_5m", **small, **papers)(x)
    assert seen == [False] * 6
    torch.manual_seed(0)
    net = models.create("mopteq_cifar_5m", **small, **quick)
    twin = copy.deepcopy(net)
    labels = torch.tensor([1, 2])
    found = torch.autograd.grad(
        torch.nn.functional.cross_entropy(net(x), labels), list(net.parameters())
    )
    assert seen[6:] == [True] * 6
    watched(monkeypatch, general=True)
    loss = torch.nn.functional.cross_entropy(twin(x), labels)
    for a, b in zip(found, torch.autograd.grad(loss, list(twin.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@on_gpu
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("tau", [1.0, 0.9])
@pytest.mark.parametrize("cast", [False, True])
def test_on_the_gpu(cast: bool, tau: float, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, g = layer(6, 3, tau, nu=1.2), states().flip(0)
    x, z0 = (t.to(memory_format=torch.channels_last) for t in (images(), states()))
    right = solved(made, x, g, z0 if given else None)
    device = copy.deepcopy(made).float().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    start = z0.float().cuda() if given else None
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=cast):
        found = solved(device, x.float().cuda(), g.float().cuda(), start)
    for a, b in zip(found, right, strict=True):
        off = float((a.double().cpu() - b).norm() / b.norm())
        assert off < (0.15 if cast else 1e-4), off


@on_gpu
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("gaussian", [False, True])
def test_nan_on_the_gpu(gaussian: bool, given: bool) -> None:
    options: dict[str, Any] = {"solver": fixed(4, 1.0), "adjoint": series(3)}
    torch.manual_seed(0)
    if gaussian:
        cut, gamma = eq.Patches(channels=8, size=2), eq.FixedGamma(0.3)
        made: Any = eq.nn.GEQ(8, 8, in_channels=3, patch=cut, hidden=8, gamma=gamma, **options)
    else:
        made = eq.nn.OptEq(8, 8, in_channels=3, kernel_size=3, **options)
    made = made.cuda().to(memory_format=torch.channels_last)
    x = torch.randn(3, 3, 4, 4, device="cuda").to(memory_format=torch.channels_last)
    x[1, 0, 0, 0] = float("nan")
    z0 = torch.rand(3, 8, 4, 4, device="cuda").to(memory_format=torch.channels_last)
    solution = made.solve(x, z0 if given else None)
    codes = [int(Result.fixed_steps), int(Result.nonfinite), int(Result.fixed_steps)]
    assert solution.result.tolist() == codes
    for g in torch.autograd.grad(solution.value.sum(), list(made.parameters())):
        assert bool(g.isfinite().all())
