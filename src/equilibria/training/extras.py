"""Packages that training needs beyond torch, imported where they are used."""

from __future__ import annotations

from types import ModuleType


def need(name: str) -> ModuleType:
    """The module ``name``, or an error that says what to install."""
    try:
        match name:
            case "lightning":
                import lightning.pytorch

                return lightning.pytorch
            case "rich":
                import rich

                return rich
            case "safetensors":
                import safetensors.torch

                return safetensors.torch
            case "tensorboard":
                import torch.utils.tensorboard

                return torch.utils.tensorboard
            case "torchmetrics":
                import torchmetrics.classification

                return torchmetrics.classification
            case "torchmetrics.aggregation":
                import torchmetrics.aggregation

                return torchmetrics.aggregation
            case "yaml":
                import yaml  # type: ignore[import-untyped, unused-ignore]

                return yaml  # type: ignore[no-any-return, unused-ignore]
    except ImportError as error:
        raise ImportError(
            f"equilibria.training needs {name}, which is not installed ({error}). Install it "
            'with: pip install "equilibria[train]"'
        ) from error
    raise ValueError(f"need({name!r}): not a package that training uses.")
