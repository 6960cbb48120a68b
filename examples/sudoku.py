"""Sudoku by an equilibrium network: iterate until the state stands still, then read the digits.

python examples/sudoku.py           writes sudoku.json, .md, .safetensors (two minutes on a GPU)
python examples/sudoku.py --quick   4 × 4 boards, seconds on a CPU

The state z has features of every (row, column, digit). One small cell is iterated to a fixed point
z = f(z, puzzle). Its relative residual ‖f(z) − z‖/‖f(z)‖ is the halting rule: harder puzzles take
more steps, and the answer of a state that never stands still is not to be trusted.
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
from rich.progress import Progress, track
from safetensors.torch import save_file
from torch import Tensor, nn

import equilibria as eq

SEGMENTS = 16  # of two to five steps each: the time that a puzzle has in training
HALT = 1e-2  # the relative residual of a state that stands still
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
    clues, test = clues.bool(), pairs(grids) % 12 == 0
    return (grids[~test], clues[~test]), (grids[test], clues[test])


def pose(grids: Tensor, clues: Tensor, wanted: Tensor) -> Tensor:
    """What the network sees, [B, n, n, n, 2]: whether a digit is given in a cell, or another is.
    To the clues more of the solution is added at random, up to ``wanted`` [B] cells in all."""
    score = torch.rand(clues.shape, device=clues.device).masked_fill(clues, -1.0).flatten(1)
    known = clues | (score.argsort(1).argsort(1).view_as(clues) < wanted[:, None, None])
    given = nn.functional.one_hot(grids, grids.shape[-1]).bool() & known[..., None]
    return torch.stack([given, known[..., None] & ~given], -1).float()


class Block(nn.Module):
    """z + W₂ gelu(W₁z + messages): what is known of the same cell, row, column and box.

    Of a digit in a cell there are four such houses, each to hold exactly one: a message is a sum
    over a house. Weights are shared by all cells and digits, so that renaming digits or exchanging
    rows changes nothing else, and boards may have any size.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.own = nn.Linear(width, 2 * width)
        self.messages = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(4))
        self.out = nn.Linear(2 * width, width)

    def forward(self, z: Tensor) -> Tensor:
        h, b = self.norm(z), round(z.shape[1] ** 0.5)
        sums = [h.sum(dim, keepdim=True) for dim in (1, 2, 3)]
        sums.append(h.unflatten(2, (b, b)).unflatten(1, (b, b)).sum((2, 4)))  # [B, b, b, n, width]
        column, row, cell, box = (f(s / b) for f, s in zip(self.messages, sums, strict=True))
        box = box.repeat_interleave(b, 1).repeat_interleave(b, 2)
        return z + self.out(nn.functional.gelu(self.own(h) + column + row + cell + box))


class Cell(nn.Module):
    """The map f(z, x) of the equilibrium; ``logits`` reads the digits from z."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inject = nn.Linear(2, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.blocks(z + self.inject(x)))

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.head.in_features)

    def logits(self, z: Tensor) -> Tensor:
        return self.head(z).squeeze(-1).float()  # [B, n, n, n], the last dimension for digits


def train(cell: Cell, data: Data, clues: range, batch: int, seconds: float, most: int) -> list[Any]:
    """Deep supervision and refill; returns [step, seconds, loss, share solved] every 25 steps.

    A few steps towards the equilibrium, a gradient step there, on from there without the graph.
    A puzzle that is solved and stands still, or has had its time, makes place for a new one."""
    device, begin, done = data[0].device, time.perf_counter(), 0.0
    optimizer = torch.optim.AdamW(cell.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    gradient = eq.Phantom(steps=4, damping=1.0)

    def fresh() -> tuple[Tensor, Tensor]:
        pick = torch.randint(len(data[0]), (batch,), device=device)
        wanted = torch.randint(clues.start, clues.stop, (batch,), device=device)
        return data[0][pick], pose(data[0][pick], data[1][pick], wanted)

    y, x = fresh()
    z = cell.start(x)
    age = torch.randint(SEGMENTS, (batch,), device=device)  # so that not all leave at once
    sums, curve = torch.zeros(3, device=device), []
    with Progress() as progress:
        bar = progress.add_task("training", total=1.0)
        for step in range(1, most + 1):
            rate = 5e-4 * (1 + math.cos(math.pi * done))  # falls from 1e-3 to 0
            optimizer.param_groups[0]["lr"] = rate * min(1.0, step / 50)
            few = eq.Picard(rtol=0, atol=0, max_steps=2 + step % 4)  # else cycles go unseen
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                solution = eq.fixed_point(cell, z, (x,), solver=few, adjoint=gradient)
                logits, again = cell.logits(solution.value), cell(solution.value, x)
            right = (logits.argmax(-1) == y).flatten(1).all(1)
            moves = (again - solution.value).square().flatten(1).mean(1)  # a solution stands still
            loss = nn.functional.cross_entropy(logits.movedim(-1, 1), y) + (right * moves).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(cell.parameters(), 1.0)
            optimizer.step()
            age += 1
            leaves = (right & (solution.stats.relative < 2e-2)) | (age >= SEGMENTS)
            age = torch.where(leaves, 0, age)
            sums += torch.stack([loss.detach(), (leaves & right).sum(), leaves.sum()])
            new_y, new_x = fresh()
            y = torch.where(leaves[:, None, None], new_y, y)
            x = torch.where(leaves[:, None, None, None, None], new_x, x)
            z = torch.where(leaves[:, None, None, None, None], 0.0, solution.value.detach())
            if step % 25 == 0:
                total, solved, count = sums.tolist()
                spent = time.perf_counter() - begin
                done = min(1.0, max(step / most, spent / seconds))
                curve.append([step, spent, total / 25, solved / max(count, 1.0)])
                progress.update(bar, completed=done, description=f"solved {curve[-1][-1]:.1%}")
                sums.zero_()
                if done == 1.0:
                    break
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
    halting = eq.Picard(rtol=HALT, max_steps=BUDGETS[-1], patience=BUDGETS[-1])
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
    heads = ["clues", *(f"{k} steps" for k in BUDGETS), "stood still", "of these solved"]
    lines = [[*heads, "of the others", "steps: median, 90%"], ["---:"] * (len(heads) + 2)]
    for row in rows:
        line = [f"{row['clues']:.1f}", *(f"{share:.1%}" for share in row["solved after"].values())]
        line += [f"{row[k]}" for k in ("stood still", "solved of these", "solved of the others")]
        line[-3] += f" of {row['puzzles']}"
        lines.append([*line, "{:.0f}, {:.0f}".format(*row["steps"]) if row["steps"] else "–"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(
    device: str, minutes: float, clues: int, count: int, seed: int, quick: bool, out: str
) -> dict[str, Any]:
    record: dict[str, Any] = {"options": dict(locals()), "torch": torch.__version__}
    torch.manual_seed(seed)
    b, batch, most, width = (2, 32, 150, 16) if quick else (3, 256, 10**9, 64)
    clues, count = (6, 600) if quick else (clues, count)
    learn, test = ([t.to(device) for t in part] for part in puzzles(count, b, seed))
    cell = Cell(width).to(device)
    record["parameters"] = sum(p.numel() for p in cell.parameters())
    record["training"] = train(cell, learn, range(clues - 4, clues + 9), batch, 60 * minutes, most)
    record["test"] = [examine(cell, test, k) for k in (0, clues - 4, clues, clues + 4)]
    Path(out).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    save_file(cell.state_dict(), Path(out).with_suffix(".safetensors"))
    Path(out).with_suffix(".md").write_text(table(record["test"]), "utf-8")
    return record


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=1.6, help="of training")
    parser.add_argument("--clues", type=int, default=32, help="trained from 4 less to 8 more")
    parser.add_argument("--count", type=int, default=6000, help="puzzles; about 1/12 for the test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="4 × 4 boards, a few seconds")
    parser.add_argument("--out", default="sudoku.json", help="a table and the weights go beside it")
    main(**vars(parser.parse_args()))
