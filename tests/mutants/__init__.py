"""Planted faults: each ``*.patch`` here breaks one invariant of the design, and the tests that it names must notice.

A patch starts with a header and goes on as a unified diff from the root of the project:

    Invariant: 6, the objective does not depend on the layout
    Fault: every rank divides by its own tokens
    Tests: tests/molt_core/test_objective.py::test_loss_gradient_and_sums_do_not_depend_on_the_split
    Run: always

``make mutants`` plants them all. ``Run: always`` in the header adds the fault to ``make test``: one for each kind of damage,
and only where no engine has to start.
"""
