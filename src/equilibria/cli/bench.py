"""``equilibria bench``: where the time of a network goes, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .console import fail, make_folder, output, print_json
from .flags import numbers, pairs
from .loading import Batch, Device, Json, ModelOption, Root, device_of, load, prepared


def bench(
    weights: Annotated[
        Path | None,
        typer.Argument(help="A trained network: model.safetensors, or the folder of a run."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A network by name, with weights at random, instead.")
    ] = None,
    option: ModelOption = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="Images to run on: a name or a folder; else random ones."),
    ] = None,
    root: Root = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Random images of this shape, such as 3,32,32; else the network's own."),
    ] = None,
    batch_size: Batch = 64,
    device: Device = None,
    precision: Annotated[
        str, typer.Option(help="32-true, bf16-mixed or 16-mixed, as in training.")
    ] = "32-true",
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Memory format of images and convolutions.")
    ] = False,
    compile_: Annotated[
        bool,
        typer.Option("--compile", help="Time it compiled; the parts are of the eager network."),
    ] = False,
    train: Annotated[bool, typer.Option(help="Time a training step too.")] = True,
    budget: Annotated[
        float, typer.Option(min=0.0, help="Seconds for which passes of each kind are timed.")
    ] = 5.0,
    out: Annotated[Path | None, typer.Option(help="Write bench.json into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Where the time goes: equilibrium layers, rest, backward; steps; and what would help.

    A copy of the network runs real training steps and inferences. The optimizer's rate is 0, so
    that its weights stay as they are.
    """
    import torch

    from equilibria import evaluation

    if (weights is None) == (model is None):
        raise fail("give weights or --model, one of them.", "`equilibria models` lists the names.")
    if data is not None and shape is not None:
        raise fail("--data and --shape: give one of them.")
    if root is not None and data is None:
        raise fail("--data-root goes with --data.")
    if option and model is None:
        raise fail("--option is for --model; trained weights have their options.")
    if out is not None:
        make_folder(out)
    size = None
    if shape is not None:
        wanted = "channels,height,width, such as 3,32,32"
        size = numbers("--shape", shape, int, lambda n: len(n) == 3 and min(n) > 0, wanted)
    network, x, y = _subject(weights, model, option, data, root, size, batch_size, device)
    if channels_last:
        network = network.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    if compile_:
        network = torch.compile(network)
    profile = evaluation.profile_model(
        network, x, y, train=train, budget=budget, precision=precision
    )
    written = [] if out is None else profile.save(out)
    if as_json:
        print_json(profile.to_dict())
        return
    console = output()
    for table in profile.tables():
        console.print(table)
        console.print()
    if written:
        console.print("wrote " + ", ".join(str(path) for path in written), soft_wrap=True)


def _subject(
    weights: Path | None, model: str | None, option: Any, data: Any, root: Any,
    shape: list[int] | None, batch_size: int, device: str | None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The network, a batch as it takes it, and its targets."""
    import torch

    from equilibria import data as datasets
    from equilibria import models
    from equilibria.evaluation import check_pair, model_input

    target, images = device_of(device), None
    network: Any
    if weights is not None and data is not None:
        network, images = prepared(weights, data, root, "test", device, batch_size)
    elif weights is not None:
        network = load(weights, target)
    else:
        sizes: dict[str, Any] = {}
        if data is not None:
            images = datasets.load(data, "test", root=root)
            images = images.subset(range(min(batch_size, len(images))))
            sizes = {"num_classes": len(images.classes), "in_channels": images.channels}
            sizes["image_size"] = int(images.images.shape[-1])
        elif shape is not None:
            if shape[1] != shape[2]:
                given = ",".join(map(str, shape))
                raise fail(f"--shape {given}: networks by name take square images.")
            sizes = {"in_channels": shape[0], "image_size": shape[1]}
        network = models.create(str(model), **{**sizes, **pairs("option", option or [])})
        network = network.to(target)
    if images is None:
        config, draw = network.config, torch.Generator().manual_seed(0)
        size = shape or [config.in_channels, config.image_size, config.image_size]
        # Standard normal, as normalized images are.
        return network, torch.randn(batch_size, *size, generator=draw), None
    check_pair(network, images)
    targets: Any = images.targets.long()
    if images.ignore_index is not None:
        targets = targets.masked_fill(targets == images.ignore_index, -100)
    return network, model_input(network, images, images.images), targets
