"""``python -m equilibria`` is the command line."""

from equilibria.cli.entry import run

if __name__ == "__main__":
    run()
