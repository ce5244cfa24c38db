"""The initialization schemes by name."""

import difflib
import inspect

from structinit_jax import plugins
from structinit_jax.attention_init.baselines import default, kaiming_uniform, mimetic
from structinit_jax.attention_init.papers import impulse_2024, impulse_2025
from structinit_jax.attention_init.sites import AttentionInit
from structinit_jax.attention_init.tokens import impulse
from structinit_jax.errors import InputError

SCHEMES = {
    "default": default,
    "kaiming_uniform": kaiming_uniform,
    "mimetic": mimetic,
    "impulse_2024": impulse_2024,
    "impulse_2025": impulse_2025,
    "impulse": impulse,
}


def scheme_options(name: str) -> tuple[str, ...]:
    """The names of the options of a scheme."""
    if plugins.is_reference(name):
        return tuple(inspect.signature(plugins.load(name, "attention_init.name")).parameters)
    if name not in SCHEMES:
        near = difflib.get_close_matches(str(name), SCHEMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(
            f"attention_init.name={name!r} is no scheme: {hint}there are {', '.join(SCHEMES)}"
        )
    return tuple(inspect.signature(SCHEMES[name]).parameters)


def by_name(name: str, **options) -> AttentionInit:
    """The scheme of that name, such as `by_name('impulse', kernel_size=5)`.

    Raises:
      InputError: if there is no such scheme, or it does not take one of the options.
    """
    known = scheme_options(name)
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            takes = ", ".join(known) if known else "no options"
            raise InputError(
                f"attention_init.{option}: scheme {name!r} has no such option{hint} "
                f"(it takes {takes})"
            )
    if plugins.is_reference(name):
        return plugins.load(name, "attention_init.name")(**options)
    return SCHEMES[name](**options)
