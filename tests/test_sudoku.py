"""examples/sudoku.py: its puzzles against enumeration, and a small training run."""

from __future__ import annotations

import json
from importlib import import_module
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("safetensors")


@pytest.fixture
def sudoku(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    return import_module("sudoku")


def boards() -> tuple[np.ndarray, np.ndarray]:
    """All boards of 4 × 4 whose rows are in order, [24⁴, 4, 4], and which are solved: 288."""
    rows = np.array(list(permutations(range(4))))
    found = rows[np.indices((24,) * 4).reshape(4, -1).T]
    boxes = found.reshape(-1, 2, 2, 2, 2).swapaxes(2, 3).reshape(-1, 4, 4)
    columns_of_boxes = np.stack([found.swapaxes(1, 2), boxes], 1)
    return found, ((1 << columns_of_boxes).sum(3) == 15).all((1, 2))


def test_a_puzzle_has_one_solution_and_needs_each_clue(sudoku: Any) -> None:
    found, solved = boards()
    grids = found[solved].reshape(-1, 16)
    assert len(grids) == 288
    for seed in range(12):
        solution, clues = (np.array(part) for part in sudoku.puzzle(seed, 2))
        fits = (grids == solution)[:, clues > 0]
        assert (grids[fits.all(1)] == solution).all(1).tolist() == [True]
        for k in range(fits.shape[1]):
            assert np.delete(fits, k, 1).all(1).sum() > 1


def test_the_rules_are_those_of_sudoku(sudoku: Any) -> None:
    found, solved = boards()
    few = solved | (np.arange(len(solved)) % 40 == 0)
    free = torch.zeros(int(few.sum()), 4, 4, 4, 2)
    digits = torch.from_numpy(found[few])
    assert (sudoku.obeys(digits, free).numpy() == solved[few]).all()
    free[:, 0, 0, 3, 0] = 1.0  # a clue
    assert sudoku.obeys(digits, free).sum() == 288 // 4


def test_no_test_grid_is_a_training_grid_in_disguise(sudoku: Any) -> None:
    rng = np.random.default_rng(0)
    grid = np.array(sudoku.puzzle(3, 3)[0]).reshape(9, 9)
    numbers = set()
    for _ in range(20):
        bands = [3 * band + rng.permutation(3) for band in rng.permutation(3)]
        stacks = [3 * stack + rng.permutation(3) for stack in rng.permutation(3)]
        other = rng.permutation(9)[grid][np.concatenate(bands)][:, np.concatenate(stacks)]
        other = other.T if rng.random() < 0.5 else other
        numbers.add(int(sudoku.pairs(torch.from_numpy(other.copy())[None])))
    assert len(numbers) == 1
    learn, test = sudoku.puzzles(60, 2, seed=1)
    assert min(len(learn[0]), len(test[0])) > 5
    assert not set(sudoku.pairs(learn[0]).tolist()) & set(sudoku.pairs(test[0]).tolist())


def test_renamed_digits_and_exchanged_rows_are_the_same_puzzle(sudoku: Any) -> None:
    torch.manual_seed(0)
    cell = sudoku.Cell(4, 6).double()
    z, x = torch.randn(2, 9, 9, 9, 4).double(), torch.rand(2, 9, 9, 9, 2).double()
    rows, columns, digits = (
        [5, 3, 4, 0, 2, 1, 6, 7, 8],
        [8, 7, 6, 0, 1, 2, 4, 5, 3],
        range(8, -1, -1),
    )

    def disguised(t: torch.Tensor) -> torch.Tensor:
        return t[:, rows][:, :, columns][:, :, :, list(digits)].transpose(1, 2)

    found = cell(disguised(z), disguised(x))
    torch.testing.assert_close(found, disguised(cell(z, x)))
    wrong = cell(z.roll(1, 1), x.roll(1, 1)).roll(-1, 1)  # rows leave their boxes
    assert not torch.allclose(wrong, cell(z, x), atol=1e-3)


@pytest.mark.slow
def test_a_small_network_learns_to_solve_puzzles(sudoku: Any, tmp_path: Path) -> None:
    out = tmp_path / "sudoku.json"
    given = {"device": "cpu", "steps": 0, "count": 0, "seed": 0}
    found = sudoku.main(**given, quick=True, out=str(out))
    hardest = found["test"][0]
    assert hardest["solved of these"] >= 0.9 * hardest["puzzles"] >= 30
    assert hardest["solved after"][8] <= hardest["solved after"][256]
    assert json.loads(out.read_text("utf-8"))["test"][0]["puzzles"] == hardest["puzzles"]
    assert out.with_suffix(".safetensors").stat().st_size > 4 * found["parameters"]
