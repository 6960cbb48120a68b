"""Batteries that every solver and every adjoint inherits, and the problems they share.

A test file names its subject and gets every test::

    class TestPicard(SolverContract):
        def solver(self, **options):
            return Picard(**options)
"""
