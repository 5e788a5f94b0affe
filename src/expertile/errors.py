"""Every error that expertile raises on purpose, with the value that was wrong and what to do about it."""


class ExpertileError(Exception):
    """Base of all errors raised on purpose: `except ExpertileError` catches exactly these."""


class ShapeError(ExpertileError, ValueError):
    """A tensor's shape, stride, dtype or device does not fit the others, or an option has no valid value."""


class UnsupportedProblem(ExpertileError):
    """No backend, or not the backend that was asked for, can run this problem; the message lists the reasons."""


class Recompiled(ExpertileError):
    """A kernel would be compiled after the guard was sealed; the message names the argument to blame."""


class MissingExtra(ExpertileError, ImportError):
    """An optional dependency is not installed; the message says which extra brings it."""
