"""Schemes by name: the table of their implementations, the checks of their options, and the API.

A scheme has one implementation for each kind of site that it supports, a function
`(rng, site, *, options…) -> weights` under `@register(name, site type)`. Its keyword arguments are
the options that have a meaning for that kind of site; any other option is refused.
"""

import difflib
import inspect
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import PRNGKeyArray

from structinit_jax import plugins
from structinit_jax.attention_init import kernels
from structinit_jax.attention_init.positions import PSEUDO_INPUTS
from structinit_jax.attention_init.sites import AttentionInit, Site, Weights
from structinit_jax.attention_init.solve import make_optimizer
from structinit_jax.errors import InputError

SCHEMES: dict[str, dict[type, Callable[..., Weights]]] = {}
"""Implementations by scheme and type of site."""


def register(name: str, *site_types: type) -> Callable[[Callable], Callable]:
    """Registers the decorated function as the implementation of a scheme for types of sites.

    Args:
      name: Name of the scheme, new or existing.
      *site_types: `AttentionSite`, `WindowSite`, `TokenMixingSite` or `ConvSite`.
    """

    def decorate(function):
        for site_type in site_types:
            SCHEMES.setdefault(name, {})[site_type] = function
        return function

    return decorate


def scheme_options(name: str) -> tuple[str, ...]:
    """Returns the names of all options of a scheme, for any kind of site.

    Args:
      name: Name of a scheme, or your own as 'module:function'.

    Raises:
      InputError: There is no such scheme.
    """
    if plugins.is_reference(str(name)):
        return _options(plugins.load(name, "attention_init.name"))
    if name not in SCHEMES:
        near = difflib.get_close_matches(str(name), SCHEMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(
            f"name={name!r}: unknown scheme; {hint}choose one of {', '.join(sorted(SCHEMES))}, or "
            "name your own as 'module:function'"
        )
    return tuple(dict.fromkeys(o for f in SCHEMES[name].values() for o in _options(f)))


def by_name(name: str, **options) -> AttentionInit:
    """Returns a scheme by its name: `by_name("impulse", kernel_size=5)`.

    Args:
      name: Name of a scheme, or your own as 'module:function'. That function is called with the
        options and returns the initializer `(rng, site) -> weights`.
      **options: Options of the scheme. None stands for the default.

    Raises:
      InputError: There is no such scheme, or it does not take one of the options or its value. The
        initializer raises it for a site that the scheme or one of the options does not support.
    """
    known = scheme_options(name)
    if plugins.is_reference(name):
        function = plugins.load(name, "attention_init.name")
        try:
            inspect.signature(function).bind(**options)
        except TypeError as error:
            raise InputError(f"name={name!r} does not take these options: {error}") from error
        return function(**options)
    options = {option: value for option, value in options.items() if value is not None}
    for option, value in options.items():
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(
                f"{option}={value!r}: scheme {name!r} has no such option{hint} "
                f"(it takes {', '.join(known) or 'no options'})"
            )
        if option in CHECKS:
            CHECKS[option](option, value)

    def init(rng: PRNGKeyArray, site: Site) -> Weights:
        site_type = type(site)
        if site_type not in SCHEMES[name]:
            fitting = sorted(n for n in SCHEMES if site_type in SCHEMES[n])
            raise InputError(
                f"name={name!r}: this scheme does not support a {site_type.__name__}; use one of "
                f"{', '.join(fitting)}"
            )
        implementation = SCHEMES[name][site_type]
        takes = _options(implementation)
        for option, value in options.items():
            if option not in takes:
                raise InputError(
                    f"{option}={value!r}: has no meaning for a {site_type.__name__}, for which "
                    f"{name!r} takes {', '.join(takes) or 'no options'}"
                )
        return implementation(rng, site, **options)

    return init


def _options(function) -> tuple[str, ...]:
    """Names of the arguments of a function that can be options."""
    if not callable(function):
        raise InputError(f"name: {function!r} is not a function that returns a scheme")
    parameters = inspect.signature(function).parameters.values()
    return tuple(
        p.name for p in parameters if p.name not in ("rng", "site") and p.kind != p.VAR_KEYWORD
    )


# -- checks of values, by the name of the option ---------------------------------------------------


def _one_of(*choices: str) -> Callable[[str, str], None]:
    def check(option, value):
        if value not in choices:
            raise InputError(f"{option}={value!r}: choose one of {', '.join(choices)}")

    return check


def _positive(option, value):
    if not np.all(np.asarray(value) > 0):
        raise InputError(f"{option}={value!r}: must be positive")


def _fraction(option, value):
    if not 0 < value < 1:
        raise InputError(f"{option}={value!r}: must be between 0 and 1")


def _kernel_size(option, value):
    for size in np.ravel(value):
        kernels.check_kernel_size(int(size))


def _filters(option, value):
    if isinstance(value, str):
        _one_of(*kernels.FILTERS)(option, value)
    elif np.ndim(value) != 3:
        raise InputError(
            f"filters has shape {np.shape(value)}: needs kernels [F, f, f] or maps [F, N, N]"
        )


CHECKS: dict[str, Callable] = {
    "kernel_size": _kernel_size,
    "filters": _filters,
    "sigma": _positive,
    "dilation": _positive,
    "offsets": _one_of(*kernels.ORDERS),
    "norm": _positive,
    "target_mass": _fraction,
    "vo_init": _one_of("balanced", "mimetic", "default"),
    "optimizer": lambda option, value: make_optimizer(value, 1e-2),
    "learning_rate": _positive,
    "max_steps": _positive,
    "first_input": _one_of(*PSEUDO_INPUTS),
    "following_input": _one_of(*PSEUDO_INPUTS),
}


# -- the schemes as functions ----------------------------------------------------------------------


def default() -> AttentionInit:
    """Default initialization of timm: truncated normal of standard deviation 0.02.

    The filters of a convolution get PyTorch's default, which timm keeps. Token-mixing MLPs keep the
    initialization of their model, which is timm's.
    """
    return by_name("default")


def kaiming_uniform() -> AttentionInit:
    """Default initialization of PyTorch: uniform between ±(inputs)^-1/2.

    This is what He et al.'s Kaiming uniform comes to in PyTorch's call with a = 5^1/2. The filters
    of a depthwise convolution have f² inputs.
    """
    return by_name("kaiming_uniform")


def mimetic() -> AttentionInit:
    """Mimetic initialization (Trockman & Kolter 2023, arXiv:2305.09828).

    Each head's Q Kᵀ is close to 0.7 I plus noise, and V Proj is close to -0.4 I plus noise; both
    are factored by singular value decomposition. A token-mixing MLP gets the map 0.7 I plus noise
    (`token_mixing.mimetic`). Convolutions are not supported.
    """
    return by_name("mimetic")


def impulse_2024(
    kernel_size: int | None = None,
    *,
    same_layers: bool | None = None,
    first_input: str | None = None,
    following_input: str | None = None,
    max_steps: int | None = None,
    learning_rate: float | None = None,
) -> AttentionInit:
    """Algorithm 1 of "Structured Initialization for Attention in Vision Transformers" (2024).

    Adam on the full Q and K of every head, against the mean squared error of its map (equation 8);
    every 100 steps each column is rescaled to the mean column norm at the start. V and projection
    keep the model's initialization. For comparison: `impulse` gets closer to the same targets,
    thousands of times faster.

    Supports attention with positions, and depthwise convolutions, whose channels get an impulse at
    a place drawn independently (table 4). Convolutions take no options.

    Args:
      kernel_size: Kernel size f, odd, 3 by default. Each head draws one of the f² offsets, with
        replacement.
      same_layers: Whether all layers share their Q and K, as in the paper's main results. True by
        default.
      first_input: Pseudo input of the first layer (table 6): 'positions' (default), 'uniform',
        'gaussian', 'positions+uniform' or 'positions+gaussian'.
      following_input: Pseudo input of the other layers.
      max_steps: Number of Adam steps, 10,000 by default.
      learning_rate: Adam's learning rate, 1e-4 by default.
    """
    return by_name("impulse_2024", **locals())


def impulse_2025(kernel_size: int | None = None) -> AttentionInit:
    """The closed form of "Structured Initialization for Vision Transformers" (arXiv:2505.19985).

    Q and K from the pseudo-inverse of the normalized position encoding, which is multiplied by 18
    if it is learned; V and projection as in `mimetic`. Details are in `papers.impulse_2025`.
    Supports attention with positions.

    Args:
      kernel_size: Kernel size f, odd, 3 by default and in the paper.
    """
    return by_name("impulse_2025", **locals())


def impulse(
    kernel_size: int | Sequence[int] | None = None,
    *,
    filters: str | np.ndarray | None = None,
    sigma: float | None = None,
    dilation: int | Sequence[int] | None = None,
    offsets: str | None = None,
    same_layers: bool | None = None,
    norm: float | None = None,
    target_mass: float | None = None,
    vo_init: str | None = None,
    keep_positions: bool | None = None,
    optimizer: str | None = None,
    learning_rate: float | None = None,
    max_steps: int | None = None,
) -> AttentionInit:
    """Impulse initialization: layers that start as convolutions with one filter per head.

    - Attention with positions (`AttentionSite`): query and key are solved against the position
      encoding, once per distinct filter (`tokens.impulse`). Takes all options.
    - Attention within windows (`WindowSite`): filters go into the relative position bias, without
      a solve (`windows.impulse`).
    - Token-mixing MLPs (`TokenMixingSite`): one filter per layer, without a solve
      (`token_mixing.impulse`).
    - Depthwise convolutions (`ConvSite`): one filter per channel, at any place of the model's own
      kernel (`convolution.impulse`).

    An option that has no meaning for the site is refused. None stands for the default.

    Args:
      kernel_size: Kernel size f, odd, at most the grid's shorter side; or one per layer. 3 by
        default. Not for convolutions, whose filters fill the model's kernel.
      filters: What is at the f² offsets of the kernel. 'impulse' (default): one token. 'gaussian':
        a Gaussian of standard deviation `sigma`. 'difference_of_gaussians': the positive part of a
        Gaussian minus one twice as wide; not for convolutions. 'box': the mean over the whole
        kernel, a single filter. Or an array of kernels [F, f, f] (f odd, rows of the maps scaled
        to sum 1), or of maps [F, N, N], which windows and convolutions do not take.
      sigma: Standard deviation of Gaussians in tokens, 0.7 by default.
      dilation: Tokens between neighboring offsets of 'impulse'; or one per layer. 1 by default. Not
        for convolutions.
      offsets: How filters are assigned to heads (or channels, or the layers of token mixing).
        'even' (default) uses all equally often, as far as the heads of all layers allow; 'random'
        draws each head's independently (2024 paper); 'center_first' goes outwards by head number,
        the same in every layer (2025 paper).
      same_layers: Whether all layers get equal weights. False by default.
      norm: Root mean square norm of the columns of Q and K, which limits how sharp the maps are.
        3^-1/2 by default, as at the start of the 2024 paper's algorithm 1. Only for attention with
        positions.
      target_mass: Attention mass wanted on target, between 0 and 1. For attention with positions it
        replaces `norm`; within windows it is 0.5 by default. Only for attention.
      vo_init: Value and projection. 'mimetic': V Proj near -0.4 I, as in `mimetic` (2025 paper).
        'balanced' (default): the same product without the decomposition, so that heads are equally
        strong instead of sorted by singular values. 'default': the model's own. Only for attention.
      keep_positions: Whether value and projection leave the encoding's row space alone, True by
        default. Otherwise every layer subtracts 0.4 of the encoding from the residual stream, and
        with it the input of the later layers' maps. Only for attention with positions.
      optimizer: 'lbfgs' (default) or the name of another optax optimizer. This and the following
        are only for attention with positions.
      learning_rate: Learning rate of an optimizer other than L-BFGS, 0.01 by default.
      max_steps: Maximum number of steps of a solve, 400 by default.

    Raises:
      InputError: An option is out of range, or the initializer meets a site that it does not fit.
    """
    return by_name("impulse", **locals())
