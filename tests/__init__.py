"""Tests, laid out as ``src/equilibria`` is; ``tests.contracts`` holds the shared batteries."""

import pytest

# The batteries are not test modules by name, so their asserts need asking for explanations.
pytest.register_assert_rewrite("tests.contracts")
