"""Moved to ``equilibria_papers.tables``, of the distribution ``equilibria-papers``."""

raise ImportError(
    "equilibria.experiments is now equilibria_papers.tables: pip install equilibria-papers"
)
