"""As for the library's own tests."""

from tests.conftest import pytest_collection_finish, pytest_configure

__all__ = ["pytest_collection_finish", "pytest_configure"]
