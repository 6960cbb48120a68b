"""A network whose labels have a proven radius: python examples/certified_labels.py

Trains a monotone DEQ of 40 units on the digits (or on MNIST: --data mnist --root FOLDER), certifies
every test image, and attacks it: no attack may get below the certified accuracy. About ten seconds.
The larger m, the smaller the network's slope: more labels are proven, fewer are right.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import equilibria as eq
from equilibria import evaluation


def train(model: nn.Module, data: eq.data.ImageData, epochs: int) -> None:
    x, y = data.normalize(data.images[:]), data.targets
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(128):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()


def main(data: str = "digits", root: str | None = None, m: float = 20.0, epochs: int = 60) -> None:
    torch.manual_seed(0)
    seen, test = (eq.data.load(data, split, root=root) for split in ("train", "test"))
    layer = eq.nn.MonotoneDEQ(40, in_channels=seen.images[0].numel(), m=m)
    model = nn.Sequential(nn.Flatten(), layer, nn.Linear(40, 10))
    train(model, seen, epochs)

    found = evaluation.certified_accuracy(model, test, batch_size=1000)
    print(f"Lipschitz constant of the logits, per pixel from 0 to 1: {found.lipschitz:.4f}")
    print(f"radius 0       right {found.accuracy:.1%}")
    for radius in (0.1, 36 / 255, 72 / 255):
        attacked = evaluation.attacked_accuracy(model, test, radius, batch_size=1000)
        print(f"radius {radius:.4f}  proven {found.at(radius):.1%}  under attack {attacked:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="digits", help="digits or mnist")
    parser.add_argument("--root", help="the folder that holds the data")
    parser.add_argument("--m", type=float, default=20.0, help="modulus of the monotone layer")
    parser.add_argument("--epochs", type=int, default=60)
    main(**vars(parser.parse_args()))
