"""Spread, races, and the peak of live memory against sums by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.evaluation.timing.measuring import Spread, cuda_waits, peak_memory, race
from equilibria.evaluation.timing.timeline import Timeline

CPU = torch.device("cpu")


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30))
def test_a_spread_is_what_sorting_gives(values: list[float]) -> None:
    found = Spread.of(values)
    exact = torch.quantile(
        torch.tensor(values, dtype=torch.float64), torch.tensor([0.25, 0.5, 0.75]).double()
    )
    torch.testing.assert_close(
        torch.tensor([found.low, found.median, found.high], dtype=torch.float64), exact
    )
    assert found.count == len(values)


def test_a_race_runs_all_in_every_round_and_rotates() -> None:
    order: list[str] = []
    runs = {name: (lambda name=name: order.append(name)) for name in "abc"}
    found = race(runs, CPU, 3)
    assert "".join(order) == "abcbcacab"
    assert all(len(times) == 3 for times in found.values())


def test_the_peak_counts_what_is_alive_at_once() -> None:
    x = torch.zeros(1000)

    def chain() -> None:
        a = x * 2  # 4000 bytes
        b = a * 2  # 8000
        del a
        c = b + 1  # 8000 again
        c.add_(1)  # in place: nothing new
        d = c.view(10, 100)  # a view: nothing new
        del b, c
        torch.cat([d.flatten(), d.flatten()])  # 4000 + 8000

    found = peak_memory(chain, CPU, held=7)
    assert found.peak == 12000
    assert found.held == 7
    assert "trace" in found.method


def test_memory_of_a_backward_pass_is_seen() -> None:
    weight = torch.ones(100, requires_grad=True)

    def step() -> None:
        y = (weight.exp() * 1.0).exp()  # exp saves its output, twice
        y.sum().backward()
        weight.grad = None

    # At the end of the forward pass: two outputs that are saved (400 bytes each).
    assert peak_memory(step, CPU, held=0).peak >= 1200


def test_no_waits_are_counted_without_a_gpu() -> None:
    assert cuda_waits(lambda: None, CPU) is None


def test_a_timeline_gives_every_moment_to_one_part() -> None:
    line = Timeline(CPU)
    line.to(("", "a"))
    before = line.to(("x", "b"))
    assert before == ("", "a")
    line.to(before)
    line.to(("", "end"))
    found = line.seconds()
    assert set(found) == {("", "a"), ("x", "b")}
    assert all(seconds >= 0.0 for seconds in found.values())
