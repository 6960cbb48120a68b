"""Messages of the library in the words of the command line: flags in place of keywords."""

from __future__ import annotations

import dataclasses
import re
import shlex

from equilibria.training.config import TrainConfig

__all__ = ["as_flags", "help_text"]

_NAMES = {field.name for field in dataclasses.fields(TrainConfig)}
_KEYWORDS = "|".join(sorted(_NAMES | {"resume", "overwrite"}, key=len, reverse=True))
_TEXT = r"(?:'[^']*'|\"[^\"]*\")"
_VALUE = rf"{_TEXT}|\.\.\.|…|[\w+-]+(?:\.\w+)?"

_PHRASES = (
    # On a line of its own, without a full stop: it is there to be copied.
    (rf" fit\(TrainConfig\.from_yaml\({_TEXT}\), (resume={_TEXT})\)\.", r"\n  equilibria train \1"),
    (r"^\[Errno \d+\] ", ""),
    (r"\bA folder may hold", "A folder (--root; for train --data-root) may hold"),
    (r"Weights alone \((.*?)\) are loaded with models\.load", r"\1 holds weights alone"),
    (r"pass download=True to fetch it from there", "`equilibria data download NAME` fetches it"),
    (r" \(modules with is_equilibrium = True\)", ""),
    (r"\bpredict_files names one class an image", "`predict` names one class an image"),
    (r"'?models\.names\(\)'?", "`equilibria models`"),
    (r"'?data\.names\(\)'?", "`equilibria data list`"),
    (r"(?<![\w.])names\(\) lists", "`equilibria models` lists"),
    (r"\bAuto\(rtol=([^()]*)\)", r"--converged \1"),
)


def _flag(name: str, value: str = "") -> str:
    """``--lr 0.1`` for ("lr", "0.1"); a switch has no value."""
    text = "--" + name.replace("_", "-")
    if value in ("", "True"):
        return text
    if value == "False":
        return f"--no-{text[2:]}"
    quoted = value[:1] in ("'", '"') and value[:1] == value[-1:]
    return f"{text} {shlex.quote(value[1:-1]) if quoted else value}"


def as_flags(text: str) -> str:
    """The message with ``lr=0.1`` as ``--lr 0.1``, and commands in place of functions."""
    for pattern, words in _PHRASES:
        text = re.sub(pattern, words, text)
    text = re.sub(
        rf"\bTrainConfig\(({_KEYWORDS})=(.*?)\)(?=:| is out of range)",
        lambda found: _flag(found[1], "" if found[2] == "..." else found[2]),
        text,
    )
    return re.sub(
        rf"(?<![\w.-])({_KEYWORDS})=({_VALUE})", lambda found: _flag(found[1], found[2]), text
    )


def help_text(text: str) -> str:
    """A field's description as help of its flag: other fields as flags, None as "not given"."""
    text = re.sub(r"\bNone: ", "not given: ", as_flags(text))
    return re.sub(
        r"'(\w+)'", lambda found: _flag(found[1]) if found[1] in _NAMES else found[0], text
    )
