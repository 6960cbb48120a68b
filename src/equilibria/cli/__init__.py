"""The command line, ``equilibria``: parse, call, print."""
