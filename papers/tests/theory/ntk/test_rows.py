"""When vmap is trusted and when plain autograd takes over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import equilibria as eq
from equilibria.engine.transforms import functorch_active
from equilibria.nn import NormBounded
from equilibria_papers.theory import empirical_ntk
from equilibria_papers.theory.ntk.rows import following, make_plan, readable


class Branching(nn.Module):
    """Reads a number from the data: no vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out if float(x.sum()) > 0 else 2 * out


class Deceiving(nn.Module):
    """Another function inside torch.func than outside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return 3 * out if functorch_active() else out


def test_autograd_takes_over_where_vmap_cannot_follow() -> None:
    model, x = Branching(), torch.tensor([[1.0, 2, 3], [-1, -2, -3]]).double()
    found = empirical_ntk(model, x)
    assert found.method == "autograd"
    scale = torch.tensor([1.0, 2.0]).double()
    expected = torch.outer(scale, scale) * (x @ x.mT + 1)
    torch.testing.assert_close(found.kernel[:, :, 0, 0], expected)
    with pytest.raises(RuntimeError, match=r"vmap|item"):
        empirical_ntk(model, x, method="vmap")


def test_autograd_takes_over_where_vmap_gives_another_gradient() -> None:
    model, x = Deceiving(), torch.randn(2, 3, dtype=torch.float64)
    found = empirical_ntk(model, x)
    assert found.method == "autograd"
    torch.testing.assert_close(found.kernel[:, :, 1, 1], x @ x.mT + 1)


def test_norm_bounds_follow_moving_weights_only_inside() -> None:
    torch.manual_seed(0)
    layer = eq.nn.OptEq(8, 8, in_channels=3, constraint=NormBounded(bound=0.9))
    model = layer.double().eval()
    with torch.no_grad():
        original = layer.W.parametrizations.weight.original
        original.copy_(torch.randn(8, 8) * 3)
        stale = float(torch.linalg.matrix_norm(layer.W.weight, 2))
        with following(model):
            for _ in range(30):
                weight = layer.W.weight
        assert float(torch.linalg.matrix_norm(weight, 2)) == pytest.approx(0.9, rel=1e-2)
    assert stale > 1.0
    assert not any(m.training for m in model.modules())


# Budgets are kept: by the plan's own arithmetic, and by the tensors that are alive.


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.dictionaries(st.text(min_size=1), st.integers(1, 5000), min_size=1, max_size=8),
    samples=st.integers(1, 300),
    outputs=st.integers(1, 12),
    spare=st.integers(0, 10**8),
    batch=st.one_of(st.none(), st.integers(1, 64)),
)
def test_a_plan_covers_every_parameter_once_and_fits(
    sizes: dict[str, int], samples: int, outputs: int, spare: int, batch: int | None
) -> None:
    memory = 1000 + 4 * outputs * 4 * max(sizes.values()) + spare
    plan = make_plan(
        sizes,
        samples=samples,
        outputs=outputs,
        itemsize=4,
        memory=memory,
        held=1000,
        batch_size=batch,
    )
    assert [n for names in plan.passes for n in names] == list(sizes)
    assert 1 <= plan.chunk <= min(samples, batch or samples)
    largest = max(sum(sizes[n] for n in names) for names in plan.passes)
    rows = plan.chunk * outputs * largest * 4
    # Kept chunks, and the new one three times: as gradients, inside autograd, as a matrix.
    kept = min(plan.resident, -(-samples // plan.chunk))
    assert 1000 + (kept + 3) * rows <= memory


class Live(TorchDispatchMode):
    """The most bytes that tensors made inside held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[Any, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        self.sizes = {ref: n for ref, n in self.sizes.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out


def test_live_tensors_stay_within_the_budget() -> None:
    """Rows of all samples would take four times the budget; the model itself is small."""
    model = nn.Sequential(nn.Linear(8, 400), nn.ReLU(), nn.Linear(400, 4))
    x = torch.randn(60, 8)
    whole = 60 * 4 * sum(p.numel() for p in model.parameters()) * 4
    budget = 1_250_000
    assert whole > 3 * budget
    with Live() as seen:
        found = empirical_ntk(model, x, memory=budget, batch_size=2, method="vmap")
    assert found.matrix.numel() * 4 < seen.peak < 1.05 * budget


def test_bytes_are_readable() -> None:
    assert readable(512) == "512 bytes"
    assert readable(3 * 2**19) == "1.5 MiB"
    assert readable(5 * 2**40) == "5120 GiB"
