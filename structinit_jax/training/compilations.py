"""Which functions JAX compiles, so that a loop that compiles again and again is told."""

import functools

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
_names: list[str] = []


def take() -> list[str]:
    """The functions compiled in this process since the call before, one entry a compilation.

    The first call starts the count.
    """
    _register()
    names = _names.copy()
    del _names[: len(names)]
    return names


def warning(names: list[str]) -> str:
    """What to tell of compilations where there should be none."""
    return (
        f"warning: {len(names)} compilations where all should be compiled, of "
        f"{', '.join(sorted(set(names)))}: a shape or a Python value differs from one call to the "
        "next, and every compilation holds the devices up"
    )


@functools.cache
def _register() -> None:
    jax.monitoring.register_event_duration_secs_listener(_listen)


def _listen(event: str, duration: float, **details) -> None:
    del duration
    if event == EVENT:
        _names.append(str(details.get("fun_name", "a function")))
