"""How small a relative residual can float32 reach on this GPU, with TF32 and without?

    python benchmarks/tf32_floor.py --out results

The default tolerance for float32 on CUDA is based on it. Writes tf32_floor.json: for GEQ and OptEq
layers and both settings of TF32 the smallest ‖T(z) − z‖/‖T(z)‖ that a solver reaches in 300 steps.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from _record import commit, parser, write

import equilibria as eq


def floor(layer: eq.nn.EquilibriumLayer, x: torch.Tensor, solver: Any) -> dict[str, float]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        found = layer.solve(x, solver=eq.BestIterate(solver))
    relative = found.stats.relative
    return {
        "best": float(relative.min()),
        "median": float(relative.median()),
        "worst": float(relative.max()),
    }


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--commit", default="", help="where the checkout has no .git")
    options = asked.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tf32_floor.py needs a CUDA device.")
    rows = []
    for tf32 in (True, False):
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for channels, pixels in ((16, 32), (64, 16), (256, 8)):
            for bound in (0.9, 1.2):
                torch.manual_seed(0)
                shared: dict[str, Any] = {"in_channels": channels, "kernel_size": 3}
                shared["constraint"] = eq.nn.NormBounded(bound=bound)
                patch = eq.Patches(channels=8, size=2)
                layers = {"GEQ": eq.nn.GEQ(channels, channels, patch=patch, **shared)}
                if bound < 1:
                    layers["OptEq"] = eq.nn.OptEq(channels, channels, **shared)
                x = torch.randn(16, channels, pixels, pixels, device="cuda")
                for kind, layer in layers.items():
                    layer = layer.cuda().eval()
                    for name, solver in {
                        "Picard 0.8": eq.Picard(rtol=1e-9, max_steps=300, damping=0.8),
                        "Anderson": eq.Anderson(rtol=1e-9, max_steps=300),
                    }.items():
                        row = {
                            "tf32": tf32,
                            "layer": kind,
                            "channels": channels,
                            "pixels": pixels,
                            "bound": bound,
                            "solver": name,
                            **floor(layer, x, solver),
                        }
                        rows.append(row)
                        print(row, flush=True)
    record = {
        "command": "python benchmarks/tf32_floor.py " + " ".join(sys.argv[1:]),
        "commit": options.commit or commit(),
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(),
        "rows": rows,
    }
    write(options.out / "tf32_floor.json", record)


if __name__ == "__main__":
    main()
