"""The errors that a user's model, option or input can cause.

Every message is one line: what was got, what is supported, what to do. The command line prints it
and leaves with exit code 2. A failed ``assert`` elsewhere is a defect of ours.
"""

from __future__ import annotations


class OptiFXError(Exception):
    """Base class: the user's model, option, input or environment is the problem."""


class ModelError(OptiFXError):
    """The model can't be read or imported (missing, truncated, unsupported operator, shapes)."""


class InputError(OptiFXError):
    """Arguments given to a compiled model don't fit its signature."""


class TargetError(OptiFXError):
    """The target is unknown, or the device it names is not here."""


class OutputError(OptiFXError):
    """A result can't be written where it was asked for."""


class OptionError(OptiFXError):
    """An option has a value that is not supported."""
