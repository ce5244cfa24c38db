"""The one exception type for a user's mistakes."""


class InputError(ValueError):
    """A flag, config field, file or argument is not usable as given.

    The message names the field, what it got, what it needs and the fix. `structinit_jax.main`
    prints it without a traceback; library callers catch it as the `ValueError` that it is.
    """
