"""Exceptions for mistakes of the user and for runs that end early."""


class InputError(ValueError):
    """A flag, config field, file or argument cannot be used.

    The message names the field, its value, what is needed and the fix. Commands print it without a
    traceback; in a library it can be caught as a `ValueError`.
    """


class StoppedError(RuntimeError):
    """A run ended early and can be resumed.

    Args:
      message: Why the run ended and how to resume it.
      exit_code: Exit status of the command.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code
