"""Networks in the conventions of the Hugging Face hub: a repository or folder is one network.

It holds model.safetensors as ``models.save`` writes it, and a card, README.md. The methods are
those of ``PyTorchModelHubMixin``, which is not used: it falls back to pickles, accepts missing
tensors, and knows neither the configuration in the file nor its checksums. Nothing is fetched
unless ``download=True``.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Self

import torch

from equilibria.engine import write_text
from equilibria.engine.optional import needs

WEIGHTS, CARD = "model.safetensors", "README.md"


class OnHub:
    """``from_pretrained``, ``save_pretrained`` and ``push_to_hub`` of a network."""

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | os.PathLike[str],
        *,
        download: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Self:
        """The network of a folder, or of a repository "owner/name" of the hub, by ``models.load``.

        Args:
            name_or_folder: a folder with model.safetensors (such as that of a run), that file, or
                the name of a repository.
            download: fetch model.safetensors from the hub if it is not in the local cache.
            revision: a branch, tag or commit of the repository; None: its main branch.
            token: for private repositories; None: the one that `hf auth login` saved.
            device: where to.
            dtype: see ``models.load``.
        """
        from .weights import load

        path = Path(name_or_folder)
        file = path / WEIGHTS if path.is_dir() else path
        if not path.exists():
            file = fetch(str(name_or_folder), download=download, revision=revision, token=token)
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

        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        network: Any = self
        save(network, place / WEIGHTS, dtype=dtype)
        if not (place / CARD).exists():
            write_text(place / CARD, _card(network))
        return place

    def push_to_hub(
        self,
        repo: str,
        *,
        dtype: torch.dtype | None = None,
        card: str | os.PathLike[str] | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload a network",
    ) -> str:
        """Upload what ``save_pretrained`` writes, the repository made if missing; its address.

        ``card`` is a Markdown file to upload as README.md. None keeps the one of the repository;
        where it has none, one is made of what is known of the network.
        """
        text = None if card is None else Path(card).read_text(encoding="utf-8")
        with needs("huggingface_hub", "push_to_hub"):
            import huggingface_hub
        api = huggingface_hub.HfApi(token=token)
        name = api.create_repo(repo, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as made:
            folder = self.save_pretrained(made, dtype=dtype)
            if text is not None:
                write_text(folder / CARD, text)
            keep = text is None and api.file_exists(name, CARD, revision=revision)
            done = api.upload_folder(
                repo_id=name,
                folder_path=folder,
                commit_message=commit_message,
                revision=revision,
                ignore_patterns=[CARD] if keep else None,
            )
        return str(done)


def fetch(
    repo: str,
    *,
    download: bool,
    revision: str | None = None,
    token: str | bool | None = None,
    folder: Path | None = None,
) -> Path:
    """model.safetensors of a repository, in the hub's cache or in ``folder``; no other file."""
    with needs("huggingface_hub", "A network by its name on the hub"):
        import huggingface_hub
    how: dict[str, Any] = {"revision": revision, "token": token, "local_dir": folder}
    try:
        found = huggingface_hub.hf_hub_download(repo, WEIGHTS, local_files_only=not download, **how)
    # The client may raise the errors of the HTTP library below it, which changed over the years.
    except Exception as error:
        reason = " ".join(str(error).split())
        if download:
            raise OSError(f"{repo}: {WEIGHTS} was not fetched from the hub ({reason}).") from error
        raise FileNotFoundError(
            f"{repo} is neither a folder here nor in the cache of the hub, and the network is only "
            "used when asked: from_pretrained(..., download=True), or `equilibria models pull "
            f"{repo}`."
        ) from error
    return Path(found)


def _card(model: Any) -> str:
    """What is known of a network, in Markdown with the hub's header."""
    from .registry import describe

    what, config = describe(model.config.name), model.config
    task = "image-classification" if model.task == "classification" else "image-segmentation"
    rows = {
        "input": f"{config.in_channels} × {config.image_size} × {config.image_size}",
        "classes": ", ".join(model.classes[:20]) + (" …" if config.num_classes > 20 else ""),
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "paper": what.paper,
        **{key: model.extra[key] for key in ("data", "metrics") if model.extra.get(key)},
    }
    table = "\n".join(f"| {key} | {str(value).replace('|', '/')} |" for key, value in rows.items())
    return (
        f"---\nlibrary_name: equilibria\npipeline_tag: {task}\n---\n\n# {config.name}\n\n"
        f"{what.text}\n\n| | |\n|---|---|\n{table}\n\n"
        "```python\nimport equilibria as eq\n\n"
        'model = eq.models.Network.from_pretrained("this/repository", download=True)\n'
        "print(model.predict(images))\n```\n"
    )
