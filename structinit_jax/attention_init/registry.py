"""Finds schemes by name and checks their options.

An implementation is a function `(rng, site, *, options…) -> weights` under `@register(name, site
type)`. Its keyword arguments are the options that apply to that kind of site; any other option is
refused.
"""

import difflib
import inspect
import re
from collections.abc import Callable

import jax
import numpy as np

from structinit_jax.attention_init import kernels
from structinit_jax.attention_init.minimize import make_optimizer
from structinit_jax.attention_init.pseudo_input import PSEUDO_INPUTS
from structinit_jax.attention_init.report import warn_if_out_of_reach
from structinit_jax.attention_init.sites import AttentionInit, Weights
from structinit_jax.attention_init.value_out import VO_INITS
from structinit_jax.errors import InputError, is_count, is_reference, load_reference

SCHEMES: dict[str, dict[type, Callable[..., Weights]]] = {}
"""Implementations by scheme and type of site."""


def _is_number(x):
    """Whether x is one finite real number."""
    return np.ndim(x) == 0 and _is_finite(np.asarray(x), "iuf")


def _are_counts(x):
    return all(map(is_count, np.ravel(x).tolist()))


def _is_finite(array: np.ndarray, kinds: str) -> bool:
    """Whether an array holds finite numbers of these kinds of NumPy's types."""
    return array.dtype.kind in kinds and bool(np.isfinite(array).all())


def _one_of(choices):
    return f"one of {', '.join(choices)}", lambda x: isinstance(x, str) and x in choices


# What a value must be, as far as can be told without a site, the test for it, and the options.
NEEDS = [
    ("True or False", lambda x: isinstance(x, bool), "same_layers keep_positions"),
    (
        "a positive number",
        lambda x: _is_number(x) and x > 0,
        "sigma variance norm learning_rate position_scale patch_scale query_key_norm",
    ),
    ("a number between 0 and 1", lambda x: _is_number(x) and 0 < x < 1, "target_mass"),
    ("a number, 0 or more", lambda x: _is_number(x) and x >= 0, "mlp_scale"),
    ("a number", _is_number, "query_key_scale value_out_scale"),
    ("a positive whole number", is_count, "max_steps taps num_filters"),
    ("a positive whole number, or one per layer", _are_counts, "dilation"),
    (*_one_of(kernels.ORDERS), "offsets"),
    (*_one_of(VO_INITS), "vo_init"),
    (*_one_of(PSEUDO_INPUTS), "first_input following_input"),
]
# Options that have an effect only with some filters, and those filters.
EFFECTS = {
    "dilation": ("impulse",),
    "sigma": ("gaussian", "difference_of_gaussians"),
}


def register(name: str, *site_types: type) -> Callable[[Callable], Callable]:
    """Registers the decorated function as a scheme's implementation for types of sites.

    The values of options that have a name in `NEEDS` or `EFFECTS` are checked by these rules.
    """

    def decorate(function):
        SCHEMES.setdefault(name, {}).update(dict.fromkeys(site_types, function))
        return function

    return decorate


def by_name(name: str, **options) -> AttentionInit:
    """Returns a scheme by its name: `by_name("impulse", kernel_size=5)`.

    Args:
      name: Name of a scheme, or 'module:function' for your own function, which is called with the
        options and returns the initializer `(rng, site) -> weights`.
      **options: Options of the scheme. None stands for the default, but is passed to your function.

    Raises:
      InputError: There is no such scheme, or it does not take an option or its value. The returned
        initializer raises it for sites that the scheme or one of the options does not support.
    """
    known = scheme_options(name)
    if is_reference(name):
        function = load_reference(name, "attention_init.name")
        try:
            inspect.signature(function).bind(**options)
        except TypeError as error:
            raise InputError(
                f"name={name!r} does not take these options: {error}. It is called with the options"
                " alone, and returns the initializer (rng, site) -> weights"
            ) from error
        return function(**options)
    options = {k: _to_python(value) for k, value in options.items() if value is not None}
    for option, value in options.items():
        if option not in known:
            hint = _did_you_mean(option, known)
            raise _refused(option, value, f"not an option of {name!r};{hint}", known)
        _check_value(option, value)
    _check_effects(options)

    def init(rng, site):
        kind = type(site).__name__
        if isinstance(rng, int):
            raise InputError(f"rng={rng}: needs a random key, such as jax.random.key({rng})")
        if type(site) not in SCHEMES[name]:
            fitting = ", ".join(sorted(n for n, sites in SCHEMES.items() if type(site) in sites))
            if not fitting:
                known = sorted({t.__name__ for sites in SCHEMES.values() for t in sites})
                raise InputError(
                    f"the second argument of a scheme is a {kind}, not a site: call it as "
                    f"(rng, site), with one of {', '.join(known)}"
                )
            raise InputError(f"name={name!r} does not support a {kind}: use one of {fitting}")
        implementation = SCHEMES[name][type(site)]
        takes = _options_of(implementation)
        for option, value in options.items():
            if option not in takes:
                raise _refused(option, value, f"does not apply to {name!r} on a {kind};", takes)
        weights = implementation(rng, site, **options)
        warn_if_out_of_reach(getattr(weights, "report", None))
        return weights

    return init


def scheme(name: str) -> Callable[..., AttentionInit]:
    """Returns a registered scheme as a documented function of its options.

    `scheme("impulse")(norm=1.0)` is `by_name("impulse", norm=1.0)`.
    """
    _check_name(name)

    def function(*args, **options):
        if args:
            raise InputError(
                f"{name} takes its options by name, and returns the initializer: call "
                f"{name}()(rng, site)"
            )
        return by_name(name, **options)

    sites = {}  # types of sites by implementation
    for site_type in sorted(SCHEMES[name], key=lambda site_type: site_type.__name__):
        sites.setdefault(SCHEMES[name][site_type], []).append(site_type.__name__)
    options = {}
    for implementation in sites:
        for option, parameter in _options_of(implementation).items():
            options.setdefault(option, parameter)
    function.__name__ = function.__qualname__ = name
    texts = [f"{', '.join(types)}: {_without_call(f)}" for f, types in sites.items()]
    function.__doc__ = "\n\n".join([f"Returns {name} as `(rng, site) -> weights`.", *texts])
    function.__signature__ = inspect.Signature(options.values())
    return function


def _without_call(implementation: Callable) -> str:
    """Returns the docstring of a scheme without the two arguments that are not options."""
    text = inspect.getdoc(implementation) or ""
    text = re.sub(r"^ +(rng|site): .*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\n\nArgs:\s*(?=\n\n|$)", "", text)


def scheme_options(name: str) -> tuple[str, ...]:
    """Returns the names of all options of a scheme, or of your own 'module:function'.

    Raises:
      InputError: There is no such scheme.
    """
    if is_reference(str(name)):
        return tuple(_options_of(load_reference(name, "attention_init.name")))
    return tuple(inspect.signature(scheme(name)).parameters)


def _check_name(name):
    if name not in SCHEMES:
        raise InputError(
            f"name={name!r}: unknown scheme;{_did_you_mean(name, SCHEMES)} choose one of "
            f"{', '.join(sorted(SCHEMES))}, or name your own as 'module:function'"
        )


def _options_of(function):
    parameters = inspect.signature(function).parameters.items()
    no_options = ("rng", "site")
    return {k: p for k, p in parameters if k not in no_options and p.kind != p.VAR_KEYWORD}


def _did_you_mean(word, known):
    near = difflib.get_close_matches(str(word), known, n=1)
    return f" did you mean {near[0]!r}?" if near else ""


def _refused(option, value, reason, takes):
    return InputError(f"{option}={value!r}: {reason} it takes {', '.join(takes) or 'no options'}")


def _to_python(value):
    """Returns an array without axes as a number, which can be a static argument of a program."""
    is_scalar = isinstance(value, np.generic | np.ndarray | jax.Array) and np.ndim(value) == 0
    return value.item() if is_scalar else value


def _check_effects(options):
    """Raises `InputError` for options that have no effect with the `filters` among them."""
    filters = options.get("filters", "impulse")
    for option, fitting in EFFECTS.items():
        fits = isinstance(filters, str) and filters in fitting
        is_neutral = option == "dilation" and np.all(np.equal(options.get(option), 1))
        if option in options and not fits and not is_neutral:
            given = repr(filters) if isinstance(filters, str) else "an array"
            raise InputError(
                f"{option}={options[option]!r} has no effect with filters={given}, only with "
                f"{', '.join(fitting)}: leave it out"
            )


def _check_value(option, value):
    """Checks an option's value as far as possible without a site."""
    for text, holds, options in NEEDS:
        if option in options.split() and not holds(value):
            raise InputError(f"{option}={value!r}: must be {text}")
    if option == "filters":
        _check_filters(value)
    elif option == "kernel_size":
        for size in np.ravel(value).tolist():
            kernels.check_kernel_size(size)
    elif option == "optimizer":
        make_optimizer(value, learning_rate=1e-2)


def _check_filters(value):
    if isinstance(value, str):
        if value not in kernels.FILTERS:
            raise InputError(
                f"filters={value!r}: must be an array, or one of {', '.join(kernels.FILTERS)}"
            )
        return
    array = np.asarray(value)
    if array.ndim != 3 or 0 in array.shape or not _is_finite(array, "biuf"):
        raise InputError(
            f"filters has shape {array.shape} and type {array.dtype}: needs kernels [F, f, f] "
            "or maps [F, N, N] of finite numbers"
        )
