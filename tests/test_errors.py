"""Behaviour common to all errors and warnings."""

from __future__ import annotations

import sys
import types
import warnings

from offload.errors import warn


def test_a_warning_names_the_line_of_the_user() -> None:
    """The user line is the test, behind frames in the package and in torch."""
    between = types.FunctionType(compile("def f(g): g()", "between.py", "exec").co_consts[0], {"__name__": "torch.nn"})
    within = types.FunctionType(between.__code__, {"__name__": "offload.engine"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        within(lambda: between(types.FunctionType(_warns.__code__, {"__name__": "offload.x", "warn": warn})))
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, line)]


def _warns() -> None:
    warn("something")
