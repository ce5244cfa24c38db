"""The exception types: one for a user's mistakes, one for a run that ends early."""


class InputError(ValueError):
    """A flag, config field, file or argument is not usable as given.

    The message names the field, what it got, what it needs and the fix. `structinit_jax.main`
    prints it without a traceback; library callers catch it as the `ValueError` that it is.
    """


class StoppedError(RuntimeError):
    """A run ended early and can be continued; the message says why and how.

    Args:
      message: for the user.
      exit_code: what `structinit_jax.main` exits with.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code
