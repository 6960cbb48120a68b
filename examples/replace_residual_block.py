"""Replace a residual block by a GEQ: same shapes in and out, trained side by side.

python examples/replace_residual_block.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import equilibria as eq


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def network(block: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        block,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def patterns(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy 8×8 images of four kinds: stripes across, stripes down, checks, a disc."""
    rows = torch.arange(8).view(8, 1).expand(8, 8)
    columns = rows.T
    kinds = torch.stack(
        [
            rows % 2,
            columns % 2,
            (rows + columns) % 2,
            ((rows - 3.5) ** 2 + (columns - 3.5) ** 2 < 8),
        ]
    ).float()
    labels = torch.randint(4, (count,), generator=generator)
    noise = 0.8 * torch.randn(count, 8, 8, generator=generator)
    return (kinds[labels] + noise).unsqueeze(1), labels


def train(model: nn.Module, steps: int = 60) -> float:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        images, labels = patterns(128, generator)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    images, labels = patterns(2000, generator)
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    for name in ("residual block", "GEQ"):
        torch.manual_seed(0)
        if name == "GEQ":
            # Same channels in and out; the norm bound keeps the equilibrium unique.
            block: nn.Module = eq.nn.GEQ(
                16, 16, patch=eq.Patches(channels=8, size=2), adjoint=eq.Phantom()
            )
        else:
            block = ResidualBlock(16)
        model = network(block)
        size = sum(p.numel() for p in model.parameters())
        print(f"{name}: {size} parameters, test accuracy {100 * train(model):.1f}%")
        if isinstance(block, eq.nn.GEQ):
            features = model[:2](patterns(8, torch.Generator().manual_seed(2))[0])
            print(eq.certify(block, features.detach()))


if __name__ == "__main__":
    main()
