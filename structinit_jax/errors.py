"""Exceptions for user mistakes and for runs that end early."""


class InputError(ValueError):
    """A flag, config field, file or argument cannot be used.

    The message names it, its value, what is needed and the fix. Commands print no traceback.
    """


class StoppedError(RuntimeError):
    """A run ended early; the message says why and how to resume it."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code
