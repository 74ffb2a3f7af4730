"""Settings that all tests share: property tests draw the same cases in every run and have no time limit of their own."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
