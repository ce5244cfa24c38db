"""What the package's commands share: the --config flag, its errors, and the compilation cache."""

import difflib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from structinit_jax import config as config_lib
from structinit_jax.errors import InputError, StoppedError

_CONFIG = config_flags.DEFINE_config_file("config", help_string="Path of a config file.")


def run(main: Callable[[ConfigDict], None]) -> None:
    """Runs `main(config)`; a user's mistake ends with its message and no traceback."""

    def run_with_config(argv: list[str]) -> None:
        try:
            if len(argv) > 1:
                raise InputError(f"{argv[1]!r} is no flag: write --name=value")
            use_compilation_cache()
            main(_config())
        except InputError as error:  # before app.run would print a traceback
            sys.exit(f"error: {error}")
        except StoppedError as error:
            print(error, file=sys.stderr)
            sys.exit(error.exit_code)

    try:
        app.run(run_with_config, flags_parser=_parse_flags)
    except InputError as error:
        sys.exit(f"error: {error}")


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX is told where already."""
    if jax.config.jax_compilation_cache_dir is None:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "structinit_jax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _config() -> ConfigDict:
    config = _CONFIG.value
    if config is None:
        raise InputError(
            "--config is required: the path of a config file, such as "
            "--config=configs/vit_t_digits.py"
        )
    for field in config_lib.drop_foreign_options(config):
        print(
            f"note: attention_init.{field} has no meaning for {config.attention_init.name!r} "
            "and is left out"
        )
    return config


def _parse_flags(argv: list[str]) -> list[str]:
    """Parses flags; a config file or field that does not exist is refused by name."""
    _check_config_exists(argv)
    try:
        remaining = flags.FLAGS(argv)
    except (AttributeError, KeyError, TypeError) as error:
        _explain_unknown_field(argv)
        raise InputError(f"--config could not be read: {error}") from error
    except flags.Error as error:
        raise InputError(str(error)) from error
    if flags.FLAGS["verbosity"].using_default_value:
        flags.FLAGS.verbosity = logging.WARNING  # JAX, TFDS and orbax are chatty at INFO
    return remaining


def _config_arguments(argv: list[str]) -> list[str]:
    """The arguments that name the config file: `--config=path`, or `--config path`."""
    for i, argument in enumerate(argv):
        if re.fullmatch(r"--?config", argument):
            return argv[i : i + 2]
        if re.match(r"--?config=", argument):
            return [argument]
    return []


def _check_config_exists(argv: list[str]) -> None:
    arguments = _config_arguments(argv)
    path = arguments[-1].split("=", 1)[-1].split(":")[0] if arguments else None
    if path is not None and not Path(path).is_file():
        raise InputError(
            f"--config={path}: there is no such file; the configs are in the folder configs/"
        )


def _explain_unknown_field(argv: list[str]) -> None:
    """Raises `InputError` for the first `--config.a.b=` in argv that the config does not have."""
    # A flag set of its own, so that the file is read without the overrides that failed.
    values = flags.FlagValues()
    arguments = [argv[0], *_config_arguments(argv)]
    holder = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    values(arguments)
    for argument in argv[1:]:
        match = re.match(r"--?(?:no)?config\.([^=]+)", argument)
        section, path = holder.value, []
        for name in match.group(1).split(".") if match else ():
            fields = list(section) if hasattr(section, "keys") else []
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise InputError(
                    f"--config.{match.group(1)}: {'.'.join(['config', *path])} has no field "
                    f"{name!r}; {hint}it has {', '.join(fields) or 'no fields'}"
                )
            section = section[name]
            path.append(name)
