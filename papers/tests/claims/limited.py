"""Audits that try as much on a slow machine as on a fast one."""

from __future__ import annotations

import dataclasses
import itertools

from equilibria_papers.claims import Claim


def limited(claim: Claim, searches: int) -> Claim:
    """With the first trials of each adversary alone; the command tries them in full."""
    variants = []
    for variant in claim.variants:
        search = variant.adversarial
        if search is not None:
            few = lambda draw, search=search: itertools.islice(search(draw), searches)
            variant = dataclasses.replace(variant, adversarial=few)
        variants.append(variant)
    return dataclasses.replace(claim, variants=tuple(variants))
