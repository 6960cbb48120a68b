"""A number as a paper prints it: ``94.8 ± 0.1%`` is 94.8 with a spread of 0.1, in percent."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Published"]

_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_FORM = re.compile(
    rf"(?P<sign>[<>]?)\s*(?P<value>-?{_NUMBER})\s*(?:±\s*(?P<spread>{_NUMBER}))?\s*"
    r"(?P<unit>%|s|/s|M|k)?"
)


@dataclass(frozen=True)
class Published:
    """What stands in the paper, and the number that it is; units are those of the table."""

    text: str
    value: float
    spread: float | None = None
    """What follows ±, if anything does."""
    limit: str = ""
    """">" or "<" where the paper prints no more than a limit."""

    @classmethod
    def read(cls, text: str) -> Published:
        """From the printed text: ``95.2 ± 0.2``, ``93.5 ± 0.2%``, ``> 5``, ``1.22e-02``."""
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"{text!r} is no printed number: expected such as '94.8 ± 0.1%', '> 5', '1.3 s'."
            )
        spread = found["spread"]
        return cls(
            text.strip(),
            float(found["value"]),
            None if spread is None else float(spread),
            found["sign"],
        )

    def __str__(self) -> str:
        return self.text
