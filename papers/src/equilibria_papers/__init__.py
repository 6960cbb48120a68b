"""The study of the papers: their propositions, their theory and their tables, as code.

``claims`` holds every proposition with its numerical verdict, ``theory`` what the papers prove as
functions to call on your own model, ``tables`` the papers' tables and figures. What is useful
without the papers belongs to ``equilibria``.
"""
