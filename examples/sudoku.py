"""Sudoku by an equilibrium network: iterate until the state stands still, then read the digits.

python examples/sudoku.py           writes sudoku.json, .md, .safetensors (ten minutes on a CPU)
python examples/sudoku.py --quick   4 × 4 boards, seconds on a CPU

The state z has features of every (row, column, digit). One small cell is iterated to a fixed point
z = f(z, puzzle). It stops when the relative residual ‖f(z) − z‖/‖f(z)‖ is small: harder puzzles
take more steps. Do not trust the answer of a state that never stands still.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor, nn

import equilibria as eq

RATE = 5e-3  # of learning, at first
HALT = 5e-4  # the relative residual of a state that stands still
BUDGETS = (8, 16, 32, 64, 128, 256)  # steps
Data = tuple[Tensor, Tensor]  # solutions and clues, [M, n, n] each
# A board has n = b·b rows. While searching, digits are bits (1, 2, 4, …); 0 is empty.


def houses(b: int) -> list[tuple[int, int, int]]:
    """The row, the column and the box of each cell, numbered from 0 to 3n − 1."""
    n = b * b
    return [(i // n, n + i % n, 2 * n + i // n // b * b + i % n // b) for i in range(n * n)]


def put(cells: list[int], used: list[int], at: Any, cell: int, bit: int) -> Any:
    """Copies of a board and of the digits in its houses, with this digit in the cell."""
    before, cells, used = cells[cell], cells.copy(), used.copy()
    cells[cell] = bit
    for house in at[cell]:
        used[house] ^= before | bit  # one of the two is 0
    return cells, used


def fill(cells: list[int], used: list[int], at: Any, rng: random.Random) -> list[int] | None:
    """The completed board, or None if there is none. The cell with fewest choices goes first."""
    n = len(used) // 3
    least, best, choices = n + 1, -1, 0
    for cell, digit in enumerate(cells):
        if not digit:
            row, column, box = at[cell]
            free = ~(used[row] | used[column] | used[box]) & (1 << n) - 1
            if free.bit_count() < least:
                least, best, choices = free.bit_count(), cell, free
                if least < 2:
                    break
    if best < 0:
        return cells
    bits = [1 << i for i in rng.sample(range(n), n) if choices >> i & 1]
    tried = (fill(*put(cells, used, at, best, bit), at, rng) for bit in bits)
    return next((board for board in tried if board), None)


def puzzle(seed: int, b: int) -> tuple[list[int], list[int]]:
    """A solution, and the clues of a puzzle that has no other. Without any one clue it has."""
    rng, at, n = random.Random(seed), houses(b), b * b
    solution = fill([0] * n**2, [0] * 3 * n, at, rng) or []
    clues, used = solution, [(1 << n) - 1] * 3 * n
    for cell in rng.sample(range(n**2), n**2):
        clues, used = put(clues, used, at, cell, 0)
        taken = solution[cell] | used[at[cell][0]] | used[at[cell][1]] | used[at[cell][2]]
        bits = [1 << i for i in range(n) if not taken >> i & 1]
        if any(fill(*put(clues, used, at, cell, bit), at, rng) for bit in bits):
            clues, used = put(clues, used, at, cell, solution[cell])  # this clue is needed
    return [d.bit_length() - 1 for d in solution], clues


def pairs(grids: Tensor) -> Tensor:
    """How many rectangles of a grid [M, n, n] have equal digits across both diagonals, [M]. The
    number stays if digits are renamed, rows or columns exchanged, or the grid is transposed."""
    found = torch.zeros(len(grids), dtype=torch.long)
    for i, j in combinations(range(grids.shape[1]), 2):
        same = grids[:, i, :, None] == grids[:, j, None, :]
        found += (same & same.mT).sum((1, 2)) // 2
    return found


def puzzles(count: int, b: int, seed: int) -> tuple[Data, Data]:
    """Puzzles to train with and to test with. The number of ``pairs`` decides which, so that no
    grid of one set is one of the other with other names of digits or another order of rows."""
    make, seeds = partial(puzzle, b=b), range(seed * 10**9, seed * 10**9 + count)
    if count < 1000:
        made = [make(s) for s in seeds]
    else:
        with ProcessPoolExecutor() as pool:
            made = list(track(pool.map(make, seeds, chunksize=16), "puzzles", total=count))
    grids, clues = torch.tensor(made).unflatten(2, (b * b, -1)).unbind(1)
    clues, test = clues.bool(), pairs(grids) % 6 == 0
    return (grids[~test], clues[~test]), (grids[test], clues[test])


def pose(grids: Tensor, clues: Tensor, wanted: Tensor) -> Tensor:
    """What the network sees, [B, n, n, n, 2]: whether a digit is given in a cell, or another is.
    To the clues more of the solution is added at random, up to ``wanted`` [B] cells in all."""
    score = torch.rand(clues.shape, device=clues.device).masked_fill(clues, -1.0).flatten(1)
    known = clues | (score.argsort(1).argsort(1).view_as(clues) < wanted[:, None, None])
    given = nn.functional.one_hot(grids, grids.shape[-1]).bool() & known[..., None]
    return torch.stack([given, known[..., None] & ~given], -1).float()


class Cell(nn.Module):
    """The map f(z, x) = (z + tanh(own state + clues + messages))/2; ``logits`` reads the digits.

    A house is a row, a column or a box with one digit, or a cell with all digits: one of its n
    states is to be true. What a house knows is the sum of its states, and a small network turns it
    into a message to all of them. Another does so for the b states that a box shares with a row or
    a column, from their sum and those of both houses. Weights are shared by all: renamed digits or
    exchanged rows are the same puzzle to the network, and boards may have any size.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.own, self.clues = nn.Linear(width, width), nn.Linear(2, width, bias=False)
        self.house = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.part, self.line, self.box = (nn.Linear(width, hidden) for _ in range(3))
        self.shared = nn.Sequential(nn.GELU(), nn.Linear(hidden, width))
        self.head = nn.Linear(width, 1)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        b = round(z.shape[1] ** 0.5)
        grid = z.unflatten(2, (b, b)).unflatten(1, (b, b))  # band, its rows, stack, its columns
        across, down = grid.sum(4, keepdim=True), grid.sum(2, keepdim=True)
        row, column = across.sum(3, keepdim=True) / b, down.sum(1, keepdim=True) / b
        box, cell = across.sum(2, keepdim=True) / b, grid.sum(5, keepdim=True) / b
        u = (self.own(z) + self.clues(x)).view_as(grid)
        for house in (row, column, box, cell):
            u = u + self.house(house)
        for part, line in ((across, row), (down, column)):
            u = u + self.shared(self.part(part) + self.line(line) + self.box(box))
        return torch.lerp(z, u.tanh().view_as(z), 0.5)

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.head.in_features)

    def logits(self, z: Tensor) -> Tensor:
        return self.head(z).squeeze(-1)  # [B, n, n, n], the last dimension for digits


def train(cell: Cell, data: Data, batch: int, steps: int) -> list[Any]:
    """Deep supervision and refill; returns [step, seconds, loss, share solved] every 25 steps.

    A few steps towards the equilibrium, a gradient step there, on from there without the graph.
    The first puzzles have many clues. By chance some make place for new ones, more likely those
    that are solved and stand still."""
    device, begin, cells = data[0].device, time.perf_counter(), data[0][0].numel()
    optimizer = torch.optim.AdamW(cell.parameters(), betas=(0.9, 0.95), weight_decay=0.01)

    def fresh(done: float) -> tuple[Tensor, Tensor]:
        pick = torch.randint(len(data[0]), (batch,), device=device)
        share = max(0.25, 0.6 - 0.7 * done) + 0.3 * torch.rand(batch, device=device)
        return data[0][pick], pose(data[0][pick], data[1][pick], share * cells)

    y, x = fresh(0.0)
    z = cell.start(x)
    sums, curve = torch.zeros(3, device=device), []
    for step in track(range(1, steps + 1), "training"):
        rate = RATE * (1 + math.cos(math.pi * step / steps)) / 2  # falls to 0
        optimizer.param_groups[0]["lr"] = rate * min(1.0, step / 50)
        few = eq.Picard(rtol=0, atol=0, max_steps=3 + step % 4)
        solution = eq.fixed_point(cell, z, (x,), solver=few, adjoint=eq.Unrolled())
        again = cell(solution.value, x)
        both = [cell.logits(state).movedim(-1, 1) for state in (solution.value, again)]
        right = (both[0].argmax(1) == y).flatten(1).all(1)
        moves = (again - solution.value).flatten(1).norm(dim=1) / again.flatten(1).norm(dim=1)
        loss = sum(nn.functional.cross_entropy(logits, y) for logits in both) / 2
        optimizer.zero_grad()
        (loss + (right * moves).mean()).backward()  # a solution stands still
        nn.utils.clip_grad_norm_(cell.parameters(), 1.0)
        optimizer.step()
        chance = torch.where(right & (moves < HALT), 1 / 4, 1 / 20)  # few stay for 100 segments
        leaves = torch.rand_like(moves) < chance
        sums += torch.stack([loss.detach(), (leaves & right).sum(), leaves.sum()])
        new_y, new_x = fresh(step / steps)
        y = torch.where(leaves[:, None, None], new_y, y)
        x = torch.where(leaves[:, None, None, None, None], new_x, x)
        z = torch.where(leaves[:, None, None, None, None], 0.0, again.detach())
        if step % 25 == 0:
            total, solved, count = sums.tolist()
            spent = time.perf_counter() - begin
            curve.append([step, spent, total / 25, solved / max(count, 1.0)])
            sums.zero_()
    return curve


def obeys(digits: Tensor, x: Tensor) -> Tensor:
    """Whether digits [B, n, n] keep the clues and the rules of Sudoku, [B]."""
    n, b = digits.shape[1], round(digits.shape[1] ** 0.5)
    one = nn.functional.one_hot(digits, n)
    boxes = one.unflatten(2, (b, b)).unflatten(1, (b, b)).sum((2, 4))
    rules = torch.stack([one.sum(1), one.sum(2), boxes.flatten(1, 2)], 1) == 1
    return rules.flatten(1).all(1) & ((x[..., 0] == 0) | (one == 1)).flatten(1).all(1)


@torch.no_grad()
def examine(cell: Cell, data: Data, wanted: int) -> dict[str, Any]:
    """The share solved over steps; and whether the residual tells solved from unsolved."""
    x = pose(*data, torch.full_like(data[0][:, 0, 0], wanted))
    after: dict[int, float] = {}

    def note(step: int, z: Tensor, _: Tensor) -> None:
        if step - 1 in BUDGETS:  # evaluations that led to z
            after[step - 1] = obeys(cell.logits(z).argmax(-1), x).float().mean().item()

    fixed = eq.Picard(rtol=0, atol=0, max_steps=BUDGETS[-1] + 1)
    last = eq.fixed_point(cell, cell.start(x), (x,), solver=fixed, callback=note)
    right = obeys(cell.logits(last.value).argmax(-1), x)
    low, high = last.stats.relative[right], last.stats.relative[~right]
    most = BUDGETS[-1]
    halting = eq.Picard(rtol=HALT, max_steps=most, patience=most, compact=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)  # some never stand still
        found = eq.fixed_point(cell, cell.start(x), (x,), solver=halting)
    right, still = obeys(cell.logits(found.value).argmax(-1), x), found.converged
    taken = found.stats.steps[still].double()
    return {
        "clues": x[..., 0].sum().item() / len(x),
        "puzzles": len(x),
        "solved after": after,
        "stood still": still.sum().item(),
        "solved of these": (right & still).sum().item(),
        "solved of the others": (right & ~still).sum().item(),
        "steps": taken.quantile(taken.new_tensor([0.5, 0.9])).tolist() if len(taken) else None,
        "last residual of solved, 90%": low.quantile(0.9).item() if len(low) else None,
        "last residual of unsolved, 10%": high.quantile(0.1).item() if len(high) else None,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """What ``examine`` found, as Markdown."""
    heads = ["clues", "stood still", "of these solved", "of the others", "steps: median, 90%"]
    shown = [str(k) for k in BUDGETS[1::2]]
    lines = [[*heads, f"solved after {', '.join(shown)} steps"], ["---:"] * (len(heads) + 1)]
    for row in rows:
        after = {str(k): share for k, share in row["solved after"].items()}
        steps = "{:.0f}, {:.0f}".format(*row["steps"]) if row["steps"] else "–"
        line = [f"{row['clues']:.1f}", f"{row['stood still']} of {row['puzzles']}"]
        line += [f"{row[k]}" for k in ("solved of these", "solved of the others")]
        lines.append([*line, steps, ", ".join(f"{after[k]:.1%}" for k in shown)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(device: str, steps: int, count: int, seed: int, quick: bool, out: str) -> dict[str, Any]:
    record: dict[str, Any] = {"options": dict(locals()), "torch": torch.__version__}
    torch.manual_seed(seed)
    b, width, hidden, steps, count = (2, 12, 24, 400, 600) if quick else (3, 24, 64, steps, count)
    learn, test = ([t.to(device) for t in part] for part in puzzles(count, b, seed))
    cell = Cell(width, hidden).to(device)
    record["parameters"] = sum(p.numel() for p in cell.parameters())
    record["training"] = train(cell, learn, 16, steps)
    record["test"] = [examine(cell, test, k) for k in ((0, 6, 7, 8) if quick else (0, 28, 32, 36))]
    Path(out).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    save_file(cell.state_dict(), Path(out).with_suffix(".safetensors"))
    Path(out).with_suffix(".md").write_text(table(record["test"]), "utf-8")
    return record


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=3000, help="of training")
    parser.add_argument("--count", type=int, default=1600, help="puzzles; about 1/6 for the test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="4 × 4 boards, a few seconds")
    parser.add_argument("--out", default="sudoku.json", help="a table and the weights go beside it")
    main(**vars(parser.parse_args()))
