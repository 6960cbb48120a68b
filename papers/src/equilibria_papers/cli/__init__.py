"""The commands ``equilibria theory`` and ``equilibria reproduce``; see pyproject.toml."""
