"""Planted faults: each ``*.patch`` here breaks one invariant of the design, and the tests that it names must notice.

A patch starts with a header and goes on as a unified diff from the root of the project:

    Invariant: 6, the objective does not depend on the layout
    Fault: every rank divides by its own tokens
    Tests: tests/molt_core/test_objective.py::test_one_global_denominator

``Engine: yes`` in the header marks tests that start a vLLM engine: ``make mutants`` runs them, ``make test`` does not.
"""
