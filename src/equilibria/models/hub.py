"""Networks in the conventions of the Hugging Face hub: a repository or folder is one network.

It holds model.safetensors as ``models.save`` writes it, and a card, README.md. The methods are
those of ``PyTorchModelHubMixin``, which is not used: it falls back to pickles, accepts missing
tensors, and knows neither the configuration in the file nor its checksums. Nothing is fetched
unless ``download=True``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from equilibria.engine import write_text
from equilibria.engine.optional import needs

if TYPE_CHECKING:
    from .network import Network

WEIGHTS, CARD = "model.safetensors", "README.md"


class OnHub:
    """``from_pretrained``, ``save_pretrained`` and ``push_to_hub`` of a network."""

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | os.PathLike[str],
        *,
        download: bool = False,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Self:
        """The network of a folder, or of a repository "owner/name" of the hub, by ``models.load``.

        Args:
            name_or_folder: a folder with model.safetensors (such as that of a run), that file, or
                the name of a repository.
            download: fetch model.safetensors from the hub if it is not in the local cache.
            device: where to; ``dtype``: see ``models.load``.
            options: of ``huggingface_hub.hf_hub_download``: revision, token, cache_dir.
        """
        from .weights import load

        path = Path(name_or_folder)
        file = path / WEIGHTS if path.is_dir() else path
        if not path.exists():
            file = fetch(str(name_or_folder), download=download, **options)
        model = load(file, device=device, dtype=dtype)
        if not isinstance(model, cls):
            raise TypeError(
                f"{name_or_folder} is a {type(model).__name__} ({model.config.name}), not a "
                f"{cls.__name__}: use eq.models.Network.from_pretrained."
            )
        return model

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None
    ) -> Path:
        """Write model.safetensors (``models.save``) and README.md to a folder, made if missing.

        A README.md that is there stays as it is. Returns the folder.
        """
        from .weights import save

        place, network = Path(folder), cast("Network", self)
        place.mkdir(parents=True, exist_ok=True)
        save(network, place / WEIGHTS, dtype=dtype)
        if not (place / CARD).exists():
            write_text(place / CARD, _card(network))
        return place

    def push_to_hub(
        self,
        repo: str,
        *,
        dtype: torch.dtype | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        **options: Any,
    ) -> str:
        """Upload what ``save_pretrained`` writes, the repository made if missing; its address.

        A README.md that the repository has stays. ``options`` are those of
        ``huggingface_hub.HfApi.upload_folder``: revision, commit_message, create_pr.
        """
        with needs("huggingface_hub", "push_to_hub"):
            import huggingface_hub
        api = huggingface_hub.HfApi(token=token)
        name = api.create_repo(repo, private=private, exist_ok=True).repo_id
        has_card = api.file_exists(name, CARD, revision=options.get("revision"))
        options["ignore_patterns"] = [CARD] if has_card else None
        with tempfile.TemporaryDirectory() as made:
            folder = self.save_pretrained(made, dtype=dtype)
            return str(api.upload_folder(repo_id=name, folder_path=folder, **options))


def fetch(repo: str, *, download: bool, **options: Any) -> Path:
    """model.safetensors of a repository, in the hub's cache or in ``local_dir``; no other file."""
    with needs("huggingface_hub", "A network by its name on the hub"):
        import huggingface_hub
    try:
        found = huggingface_hub.hf_hub_download(
            repo, WEIGHTS, local_files_only=not download, **options
        )
    # The client may raise the errors of the HTTP library below it, which changed over the years.
    except Exception as error:
        reason = " ".join(str(error).split())
        if download:
            raise OSError(f"{repo}: {WEIGHTS} was not fetched from the hub ({reason}).") from error
        raise FileNotFoundError(
            f"{repo} is neither a folder here nor in the cache of the hub. To fetch it: "
            f"from_pretrained(..., download=True), or `equilibria models pull {repo}`."
        ) from error
    return Path(found)


def register_timm() -> list[str]:
    """Make our classifiers known to timm: ``timm.create_model("equilibria_geq_cifar_5m")``.

    Returns their names in timm, ours after "equilibria_". ``in_chans`` and ``img_size`` are timm's
    options; the others are those of ``create``.
    """
    with needs("timm", "register_timm", extra="timm"):
        from timm.models import register_model
    from .registry import create, names

    def entry(name: str) -> Callable[..., Network]:
        def build(pretrained: bool = False, **options: Any) -> Network:
            if pretrained:
                raise ValueError(
                    f"pretrained={pretrained!r}: timm has no weights of equilibria_{name}; trained "
                    "networks are loaded by eq.models.Network.from_pretrained."
                )
            for key in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
                options.pop(key, None)
            if options.get("drop_rate") == 0:  # what timm's scripts always pass
                del options["drop_rate"]
            ours = {"in_chans": "in_channels", "img_size": "image_size"}
            return create(name, **{ours.get(key, key): value for key, value in options.items()})

        build.__name__ = f"equilibria_{name}"
        return build

    return [register_model(entry(name)).__name__ for name in names(task="classification")]


def _card(model: Network) -> str:
    """The model's card, its classes and how to load it, with the header of the hub."""
    from .registry import describe

    task = "image-classification" if model.task == "classification" else "image-segmentation"
    load = 'eq.models.Network.from_pretrained("this/repository", download=True)'
    return (
        f"---\nlibrary_name: equilibria\npipeline_tag: {task}\n---\n\n# {model.config.name}\n\n"
        f"```\n{describe(model.config.name)}\n```\n\nClasses: {', '.join(model.classes[:100])}.\n\n"
        f"```python\nimport equilibria as eq\n\nmodel = {load}\nprint(model.predict(images))\n```\n"
    )
