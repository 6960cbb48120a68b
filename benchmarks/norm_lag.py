"""How far does ‖W‖ exceed its bound during training, by the number of power iterations per step?

    python benchmarks/norm_lag.py --out results

Three epochs of small networks on the digits under NormBounded(bound=0.95): the largest proven norm
of a W, measured every eighth step, and the solves that missed their tolerance. Writes
norm_lag.json. The default of NormBounded.steps is based on it.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from _record import parser, save

import equilibria as eq
from equilibria.problems.norms import convolution_norm_upper


def train(name: str, steps: int, optimizer: str, epochs: int = 3) -> dict[str, Any]:
    digits = eq.data.load("digits", "train")
    torch.manual_seed(0)
    model = eq.models.create(name, constraint=eq.nn.NormBounded(bound=0.95, steps=steps))
    layers: list[Any] = list(eq.nn.equilibrium_layers(model).values())
    made: torch.optim.Optimizer
    if optimizer == "adamw":
        made = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    worst, missed, solves, count, began = 0.0, 0, 0, 0, time.process_time()
    for _ in range(epochs):
        for index in torch.randperm(len(digits)).split(64):
            with eq.nn.observe(model) as seen:
                logits = model(digits.normalize(digits.images[index]))
                loss = torch.nn.functional.cross_entropy(logits, digits.targets[index])
            for found in seen.solutions.values():
                tested = [each for each in found if each.stats.syncs]  # not fixed steps
                missed += sum(int((~each.converged).sum()) for each in tested)
                solves += sum(len(each.result) for each in found)
            made.zero_grad()
            loss.backward()
            made.step()
            count += 1
            if count % 8 == 0:
                model.eval()  # the norm as it is, without another power iteration
                with torch.no_grad():
                    worst = max(worst, *(convolution_norm_upper(x.W.weight) for x in layers))
                model.train()
    return {
        "network": name,
        "optimizer": optimizer,
        "steps": steps,
        "worst_norm": worst,
        "missed": missed,
        "solves": solves,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def main() -> None:
    options = parser(__doc__).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name in ("opteq_digits", "geq_digits"):
        for optimizer in ("adamw", "sgd"):
            for steps in (1, 2, 4):
                rows.append(train(name, steps, optimizer))
                print(rows[-1], flush=True)
    save("norm_lag", options.out, machine="two-core CPU, one thread", bound=0.95, rows=rows)


if __name__ == "__main__":
    main()
