"""What the commands of ``equilibria theory`` share: options, networks, images, answers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Column, Table

from equilibria.cli import complain, device_of, fail, load, output, prepared, print_json

THESIS = "residual_deq"

Weights = Annotated[
    list[Path] | None,
    typer.Argument(help="Run folders or model.safetensors; several in the order of training."),
]
Model = Annotated[
    str | None, typer.Option("--model", help="A network by name, untrained, in place of WEIGHTS.")
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data", help="A name or a folder; what it was trained on if not given, or digits."
    ),
]
Split = Annotated[str, typer.Option(help="Which part of the data.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]


def narrow_table(heads: Iterable[Column | str], rows: Iterable[Iterable[str]]) -> Table:
    """Without edges seven columns and a network's whole name fit into 80."""
    table = Table(
        *heads, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
    )
    for row in rows:
        table.add_row(*row)
    return table


def answer(
    record: Any, as_json: bool, show: Callable[[], None], written: Iterable[Path] = ()
) -> None:
    """The record as JSON; or what ``show`` prints, and where files are."""
    if as_json:
        print_json(record)
        return
    show()
    if written:
        output().print("wrote " + ", ".join(map(str, written)), soft_wrap=True)


@contextmanager
def put_in_place(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    """(a folder to write into, a list of the files): moved at the end, all of them or none."""
    made: list[Path] = []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as name:
        yield Path(name), made
        made[:] = [path.replace(folder / path.name) for path in made]


def numbers_of(flag: str, text: str, example: str, *, whole: bool = False) -> list[Any]:
    """The positive numbers of a list with commas; none for an empty text."""
    kind = int if whole else float
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [0]
    if any(not 0 < n < float("inf") for n in found):
        raise fail(f"{flag} {text}: expected positive numbers with commas, such as {example}.")
    return found


def whole_numbers(flag: str, text: str, expected: str) -> list[int]:
    """The integers of a list with commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise fail(f"{flag} {text}: expected {expected}.") from None


def note(text: str) -> None:
    complain("note:", text, "yellow")


def networks(
    weights: list[Path],
    model: str | None,
    data: str | None,
    root: Path | None,
    split: str,
    device: str | None,
    seed: int,
) -> tuple[dict[str, Any], Any]:
    """The networks by name and the data; without weights a fresh network, which it says."""
    if weights and model is not None:
        raise fail("give the weights of trained networks or --model, not both.")
    if weights:
        first, dataset = prepared(weights[0], data, root, split, device)
        rest = [load(w, device_of(device)) for w in weights[1:]]
        return dict(zip(_names(weights), [first, *rest], strict=True)), dataset
    import torch

    from equilibria import data as module
    from equilibria_papers.tables.thesis import create

    name, target = model or THESIS, device_of(device)
    dataset = module.load(data or "digits", split, root=root)
    note(f"no weights were given, so this is {name} with fresh weights (seed {seed}), untrained.")
    torch.manual_seed(seed)
    return {name: create(name, dataset).to(target).eval()}, dataset


def _names(weights: list[Path]) -> list[str]:
    """A short name for each: its folder's or its file's; numbered where two are the same."""
    short = [w.parent.name if w.name == "model.safetensors" else w.stem for w in weights]
    if len(set(short)) == len(short) and all(short):
        return short
    return [f"{i + 1} {name}".strip() for i, name in enumerate(short)]


def say_if_fewer(flag: str, count: int, dataset: Any) -> None:
    """A note where more images are asked for than there are."""
    if count > len(dataset):
        there = f"{dataset.name} ({dataset.split_name}) has {len(dataset)}"
        note(f"{flag} {count}: {there}; all of them are taken.")


def images_of(
    dataset: Any, count: int, seed: int, device: str | None, flag: str = "--images"
) -> tuple[Any, Any]:
    """(x [B, C, H, W] as the networks take it, labels [B]) of images drawn by the seed."""
    import torch

    if dataset.task != "classification":
        raise fail(f"{dataset.name} is for segmentation; expected images with one class each.")
    say_if_fewer(flag, count, dataset)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    part = dataset.subset(order[:count])
    x = dataset.normalize(part.images[torch.arange(len(part))])
    target = device_of(device)
    return x.to(target), part.targets.to(target)
