"""The empirical tangent kernel against closed forms, differences and its own other routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import equilibria as eq
from equilibria.engine.transforms import functorch_active
from equilibria_papers.theory import empirical_ntk
from equilibria_papers.theory.ntk import kernel

TIGHT: dict[str, Any] = {"solver": eq.Anderson(rtol=1e-12, max_steps=400)}


def mlp(inputs: int = 4, hidden: int = 6, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(),
        nn.Linear(hidden, outputs),
    ).double()  # fmt: skip


def dense_jacobian(model: nn.Module, x: Tensor, step: float = 1e-6) -> Tensor:
    """∂f/∂θ by central differences, one parameter's entry after the other, [N·K, P]."""
    columns = []
    with torch.no_grad():
        for p in model.parameters():
            flat = p.view(-1)
            for i in range(flat.numel()):
                old = float(flat[i])
                flat[i] = old + step
                above = model(x).flatten()
                flat[i] = old - step
                below = model(x).flatten()
                flat[i] = old
                columns.append((above - below) / (2 * step))
    return torch.stack(columns, dim=1)


def by_jacrev(model: nn.Module, x: Tensor) -> Tensor:
    """J Jᵀ from torch's own Jacobian of the whole batch, [N·K, N·K]."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    parts = jacrev(lambda p: functional_call(model, p, (x,)).flatten())(parameters)
    rows = torch.cat([part.flatten(1) for part in parts.values()], dim=1)
    return rows @ rows.mT


def test_a_deep_linear_model() -> None:
    """f = BAx: K(x, x′) = (x·x′)BBᵀ + (Ax·Ax′)I, its parts those of A and of B."""
    a, b = nn.Linear(5, 4, bias=False).double(), nn.Linear(4, 3, bias=False).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    left = torch.einsum("ij,ab->ijab", x @ x.mT, b.weight @ b.weight.mT)
    h = x @ a.weight.mT
    right = torch.einsum("ij,ab->ijab", h @ h.mT, torch.eye(3, dtype=x.dtype))
    found = empirical_ntk(nn.Sequential(a, b), x, layers=True)
    torch.testing.assert_close(found.kernel, (left + right).detach())
    torch.testing.assert_close(found.parts["0"], left.permute(0, 2, 1, 3).reshape(18, 18).detach())


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    return {
        "opteq": eq.nn.OptEq(4, 6, in_channels=3, **TIGHT),
        "geq": eq.nn.GEQ(4, 6, in_channels=3, hidden=4, gamma=0.3, **TIGHT),
        "monotone": eq.nn.MonotoneDEQ(4, in_channels=3),
        "deep": eq.nn.DeepOptEq(4, (5, 3), in_channels=3, **TIGHT),
    }


@pytest.mark.parametrize("name", ["opteq", "geq", "monotone", "deep"])
def test_equilibrium_layers_against_central_differences(name: str) -> None:
    layer: Any = layers()[name]
    model = nn.Sequential(layer, nn.Linear(4, 2)).double().eval()
    if name == "monotone":
        layer.solver = eq.PeacemanRachford(rtol=1e-12, max_steps=2000)
    layer.adjoint = eq.Implicit(solver=eq.GMRES(rtol=1e-12))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)  # off the bounds of the norms, which are kinks
    x = torch.randn(3, 3, dtype=torch.float64)
    jacobian = dense_jacobian(model, x, 1e-5)
    expected = jacobian @ jacobian.mT
    for method in ("auto", "autograd"):
        found = empirical_ntk(model, x, method=method)  # type: ignore[arg-type]
        torch.testing.assert_close(found.matrix, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["geq_digits", "explicit_digits"])
def test_named_networks_by_both_routes(name: str) -> None:
    torch.manual_seed(0)
    model = eq.models.create(name)
    x = torch.randn(3, 1, 8, 8)
    quick = empirical_ntk(model, x, outputs=[0, 7])
    assert quick.method == "vmap"
    plain = empirical_ntk(model, x, outputs=[0, 7], method="autograd")
    torch.testing.assert_close(quick.matrix, plain.matrix, rtol=1e-3, atol=1e-5)


def test_choices_of_outputs_are_parts_of_the_full_kernel() -> None:
    model, x = mlp(), torch.randn(4, 4, dtype=torch.float64)
    full = empirical_ntk(model, x).kernel
    traced = full.diagonal(0, 2, 3).mean(-1)
    torch.testing.assert_close(empirical_ntk(model, x, outputs="trace").matrix, traced)
    torch.testing.assert_close(empirical_ntk(model, x).traced, traced)
    torch.testing.assert_close(empirical_ntk(model, x, outputs="sum").matrix, full.sum((2, 3)) / 3)
    torch.testing.assert_close(empirical_ntk(model, x, outputs=-1).matrix, full[:, :, 2, 2])
    two = empirical_ntk(model, x, outputs=[2, 0]).kernel
    torch.testing.assert_close(two, full[:, :, [2, 0]][..., [2, 0]])


def test_the_kernel_of_two_sets_is_a_block_of_the_kernel_of_their_union() -> None:
    model, x = mlp(), torch.randn(7, 4, dtype=torch.float64)
    whole = empirical_ntk(model, x).kernel
    cross = empirical_ntk(model, x[:3], x[3:], batch_size=2).kernel
    torch.testing.assert_close(cross, whole[:3, 3:])


def test_layers_sum_to_the_kernel_and_their_shares_to_one() -> None:
    model, x = mlp(), torch.randn(4, 4, dtype=torch.float64)
    found = empirical_ntk(model, x, layers=True)
    assert list(found.parts) == ["0", "2", "4"]
    assert dict(found.sizes) == {"0": 30, "2": 42, "4": 21}
    torch.testing.assert_close(sum(found.parts.values()), found.matrix)
    assert sum(found.shares().values()) == pytest.approx(1.0)
    alone = empirical_ntk(model, x, parameters="2.*")
    assert alone.parameters == 42
    torch.testing.assert_close(found.parts["2"], alone.matrix)


def test_parametrized_weights_belong_to_their_layer() -> None:
    found = empirical_ntk(eq.models.create("opteq_digits"), torch.randn(2, 1, 8, 8), layers=True)
    assert "stages.0.layer.W" in found.parts
    assert not any("parametrizations" in name for name in found.parts)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    samples=st.integers(1, 9),
    chunk=st.one_of(st.none(), st.integers(1, 5)),
    held=st.integers(1, 40_000),
    choice=st.sampled_from(["all", "trace", "sum", 1, (0, 2)]),
)
def test_however_much_is_held_the_kernel_is_the_same(
    samples: int, chunk: int | None, held: int, choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From gradients that all fit to one chunk at a time."""
    model = mlp()
    x = torch.randn(samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dense = empirical_ntk(model, x, outputs=choice)
    calls: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_HELD", held)
        tight = empirical_ntk(
            model, x, outputs=choice, batch_size=chunk, progress=lambda *done: calls.append(done)
        )
        cross = empirical_ntk(model, x, x[:2], outputs=choice, batch_size=chunk)
    torch.testing.assert_close(tight.matrix, dense.matrix)
    torch.testing.assert_close(cross.matrix, dense.matrix[:, : cross.matrix.shape[1]])
    assert torch.equal(tight.matrix, tight.matrix.mT)
    assert calls[-1][0] == calls[-1][1]
    if choice == "all":
        torch.testing.assert_close(dense.matrix, by_jacrev(model, x))


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model[1].eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    random = torch.get_rng_state()
    first = empirical_ntk(model, x := torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(random, torch.get_rng_state())
    assert [m.training for m in model] == [True, False, True, True]
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(first.matrix, empirical_ntk(model.eval(), x).matrix)


def test_float32_keeps_its_digits_with_a_million_parameters() -> None:
    x = 0.3 + torch.randn(4, 1_000_000, generator=torch.Generator().manual_seed(0))
    found = empirical_ntk(nn.Linear(1_000_000, 1), x).matrix
    exact = x.double() @ x.double().mT + 1
    assert float((found - exact).norm() / exact.norm()) < 1e-6


def test_half_precision_is_contracted_in_float32() -> None:
    model = mlp().to(torch.bfloat16)
    found = empirical_ntk(model, torch.randn(3, 4).bfloat16())
    assert found.matrix.dtype == torch.float32


def test_parameters_without_a_part_and_shared_ones() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3, bias=False).double()
            self.two = nn.Linear(3, 3, bias=False).double()
            self.two.weight = self.one.weight
            self.unused = nn.Parameter(torch.zeros(7, dtype=torch.float64))
            self.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.two(torch.tanh(self.one(x))) * self.frozen
            return out

    model, x = Odd(), torch.randn(2, 3, dtype=torch.float64)
    # Central differences visit the shared weight once, like the kernel, and the frozen one too.
    assert [n for n, _ in model.named_parameters()] == ["unused", "frozen", "one.weight"]
    jacobian = dense_jacobian(model, x)
    jacobian[:, 7:10] = 0
    for method in ("vmap", "autograd"):
        found = empirical_ntk(model, x, method=method)  # type: ignore[arg-type]
        assert found.parameters == 16
        torch.testing.assert_close(found.matrix, jacobian @ jacobian.mT, rtol=1e-6, atol=1e-8)


def test_a_layer_that_is_used_twice_keeps_its_weights() -> None:
    shared = nn.Linear(3, 3).double()
    weight, x = shared.weight, torch.randn(2, 3, dtype=torch.float64)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    jacobian = dense_jacobian(model, x)
    for method in ("vmap", "autograd", "auto"):
        found = empirical_ntk(model, x, method=method)  # type: ignore[arg-type]
        torch.testing.assert_close(found.matrix, jacobian @ jacobian.mT, rtol=1e-6, atol=1e-8)
        assert shared.weight is weight
        assert found.method == ("autograd" if method == "autograd" else "vmap")


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"outputs": "mean"}, "'all', 'trace', 'sum'"),
        ({"outputs": 3}, "3 outputs, 0 to 2"),
        ({"outputs": []}, "an index or several"),
        ({"outputs": [0.5]}, "an index or several"),
        ({"parameters": "tail.*"}, "fits none of 6 parameters"),
        ({"parameters": [3]}, "a pattern"),
        ({"layers": "head"}, "True or False"),
        ({"method": "fast"}, "'auto', 'vmap' or 'autograd'"),
        ({"batch_size": 0}, "positive integer"),
        ({"x2": torch.zeros(2, 5)}, "x and x2 differ"),
    ],
)
def test_bad_options_say_what_is_allowed(given_: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        empirical_ntk(mlp(), torch.zeros(2, 4, dtype=torch.float64), **given_)


def test_bad_models_and_inputs_say_what_is_wrong() -> None:
    x = torch.zeros(2, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got function"):
        empirical_ntk(lambda x: x, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x must be a tensor"):
        empirical_ntk(mlp(), [1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="N ≥ 1"):
        empirical_ntk(mlp(), x[:0])
    with pytest.raises(ValueError, match="no parameter that needs a gradient"):
        empirical_ntk(mlp().requires_grad_(False), x)
    with pytest.raises(TypeError, match="one tensor"):
        empirical_ntk(nn.LSTM(4, 3).double(), x)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        empirical_ntk(mlp(), torch.zeros(2, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match="layers=True"):
        empirical_ntk(mlp(), x).shares()


# When vmap is trusted and when plain autograd takes over.


class Twofold(nn.Module):
    """Twice as large where ``test`` of the input says so."""

    def __init__(self, test: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.test = test

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return 2 * out if self.test(x) else out


def test_autograd_takes_over_where_vmap_cannot_follow() -> None:
    """It reads a number from the data."""
    model, x = (
        Twofold(lambda x: float(x.sum()) < 0),
        torch.tensor([[1.0, 2, 3], [-1, -2, -3]]).double(),
    )
    found = empirical_ntk(model, x)
    assert found.method == "autograd"
    scale = torch.tensor([1.0, 2.0]).double()
    expected = torch.outer(scale, scale) * (x @ x.mT + 1)
    torch.testing.assert_close(found.kernel[:, :, 0, 0], expected)
    with pytest.raises(RuntimeError, match=r"vmap|item"):
        empirical_ntk(model, x, method="vmap")


def test_autograd_takes_over_where_vmap_gives_another_gradient() -> None:
    model, x = Twofold(lambda x: functorch_active()), torch.randn(2, 3, dtype=torch.float64)
    found = empirical_ntk(model, x)
    assert found.method == "autograd"
    torch.testing.assert_close(found.kernel[:, :, 1, 1], x @ x.mT + 1)
