"""Moved to ``equilibria_papers.theory``, of the distribution ``equilibria-papers``."""

raise ImportError(
    "equilibria.theory is now equilibria_papers.theory (equilibria.theory.audit: "
    "equilibria_papers.claims): pip install equilibria-papers"
)
