"""What the package's commands share: the --config flag, its errors, and the compilation cache."""

import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from structinit_jax import config as config_lib
from structinit_jax.errors import InputError, StoppedError

# absl's words for a value of the wrong type, and ours.
NEEDS = {
    r"invalid literal for int\(\) with base 10: .*": "it needs to be a whole number",
    r"could not convert string to float: .*": "it needs to be a number",
    r"\('Non-boolean argument to boolean flag', .*": "it needs to be true or false",
    r"Failed to parse .* as a ConfigDict: .*": "it is a section: set one of its fields, or write "
    "all of it as a dict, such as \"{'name': 'impulse'}\"",
}

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
    config = _read_config_file(argv)
    try:
        remaining = flags.FLAGS(argv)
    except flags.Error as error:
        text = str(error)
        for pattern, need in NEEDS.items():
            text = re.sub(pattern, need, text)
        raise InputError(text) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _explain_unknown_field(argv, config)
        raise InputError(f"a flag --config.FIELD=VALUE could not be read: {error}") from error
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


def _read_config_file(argv: list[str]) -> ConfigDict | None:
    """The config as its file has it, without the flags that change fields; None without --config.

    Raises:
      InputError: if the file is missing, fails, or returns no config of this package.
    """
    arguments = _config_arguments(argv)
    if not arguments or arguments[-1].lstrip("-") == "config":  # absl says what is missing
        return None
    value = arguments[-1].split("=", 1)[-1]
    path, _, row = value.partition(":")
    if not Path(path).is_file():
        raise InputError(
            f"--config={path}: there is no such file; the configs are in the folder configs/"
        )
    # A flag set of its own, so that nothing here is parsed twice.
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=[argv[0]])
    try:
        values([argv[0], *arguments])
    except Exception as error:  # the file is the user's program: anything may happen in it
        raise _explain_failed_file(path, row, error) from error
    config = holder.value
    missing = (
        [field for field in config_lib.base_config() if field not in config]
        if isinstance(config, ConfigDict)
        else ["everything"]
    )
    if missing:
        raise InputError(
            f"--config={path}: what its get_config() returns lacks {', '.join(missing)}; start "
            "from structinit_jax.config.base_config(), change its fields and return it"
        )
    return config


def _explain_failed_file(path: str, row: str, error: BaseException) -> InputError:
    """The error that a config file raised, with its place in the file."""
    while "Error whilst parsing config file" in str(error):  # as ml_collections and absl wrap it
        error = error.__context__
    if isinstance(error, InputError):
        return InputError(f"--config={path}{row and f':{row}'}: {error}")
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == path
    ]
    if row and not lines and isinstance(error, TypeError):  # of the call of get_config itself
        return InputError(f"--config={path}:{row}: this file has no rows: leave out ':{row}'")
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    place = f", line {line}" if line else ""
    return InputError(f"--config={path}{place}: {type(error).__name__}: {error}")


def _explain_unknown_field(argv: list[str], config: ConfigDict | None) -> None:
    """Raises `InputError` for the first `--config.a.b=` in argv that the config does not have."""
    for argument in argv[1:]:
        match = re.match(r"--?(?:no)?config\.([^=]+)", argument)
        section, path = config, []
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
