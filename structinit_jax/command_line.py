"""Code shared by the commands: flags, fields of the config, error messages, compilation cache.

`ml_collections.config_flags` does not parse `--config=FILE.py:ROW` and `--config.FIELD=VALUE`: it
prints a traceback for a missing file, an unknown field or a value of the wrong type.
"""

import ast
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.errors import InputError, StoppedError, suggest

CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Config file, FILE.py or FILE.py:ROW. Required unless --workdir already holds a run. "
    "--config.FIELD=VALUE sets a field: seed, batch_size, model.depth, attention_init.name, "
    "augment.flip, data.data_dir, ...; structinit_jax/config.py lists them.",
)
WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Output directory. Training resumes from the newest checkpoint that it holds. compare and "
    "reproduce put all their runs in it.",
)
STEP = flags.DEFINE_string(
    "step",
    None,
    "Checkpoint: its step, 'newest' (default) or 'best'. For show: a training step, from 1 "
    "(default).",
)
OUT = flags.DEFINE_string(
    "out",
    None,
    "File or directory to write: by default analysis, model (export) or batch.png (show).",
)
TRUST = flags.DEFINE_bool(
    "trust_workdir", False, "Import Python code that the config of --workdir names."
)
SHARED = ("config", "workdir", "step", "out", "trust_workdir")
Overrides = Sequence[tuple[str, str]]  # path and text of each --config.FIELD=VALUE


def run(main: Callable[[Overrides], None], shared: Sequence[str] = SHARED) -> None:
    """Runs a command and exits: with status 2 and no traceback if the user made a mistake.

    `main` is called with the fields of the config that the command line sets. Of the flags in
    `SHARED`, the command takes those in `shared`.
    """
    for name in SHARED:
        if name in shared:  # --help lists the flags of the command's own module only
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
        else:
            delattr(flags.FLAGS, name)
    try:
        app.run(main, flags_parser=_parse_flags)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if jax.distributed.is_initialized() and jax.process_count() > 1:
            time.sleep(5 * (jax.process_index() == 0))  # until the others have reported the same
        os._exit(2)  # a normal exit would wait for the others, and for a step that is compiling
    except StoppedError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # before the loop of training, which ends with a checkpoint
        print("interrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(130)  # as shells report it


def _parse_flags(argv: list[str]) -> Overrides:
    """Parses all flags and prepares JAX."""
    fields = [word for word in argv if word.startswith(("--config.", "-config.")) and "=" in word]
    try:
        _, *words = flags.FLAGS([word for word in argv if word not in fields])
    except SystemExit as error:  # absl has printed the help, and ends with status 1
        raise SystemExit(0) from error
    except flags.Error as error:
        raise InputError(f"{error}; fields of the config are --config.FIELD=VALUE") from error
    if words:
        raise InputError(f"unrecognized argument {words[0]!r}: write --name=value")
    if flags.FLAGS["verbosity"].using_default_value:
        flags.FLAGS.verbosity = logging.WARNING  # JAX and TFDS log much at INFO
    use_compilation_cache()
    sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file need not be text
    return [tuple(word.lstrip("-").removeprefix("config.").split("=", 1)) for word in fields]


def use_compilation_cache() -> None:
    """Caches compiled programs in the user's cache directory, unless JAX has a cache already."""
    if jax.config.jax_compilation_cache_dir is None:
        root = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "structinit_jax" / "xla"))
        # A start compiles a dozen small programs too.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def out_path(default: str) -> Path:
    """Returns the path of --out. Expands `~`, which shells leave alone in `--out=~/folder`."""
    return Path(OUT.value or default).expanduser()


def read_config(overrides: Overrides) -> ConfigDict:
    """Returns the config of --config, or else of the run in --workdir, with the overrides."""
    if CONFIG.value is not None:
        config = config_lib.load_config(CONFIG.value)
    elif WORKDIR.value:
        config = config_lib.load_run_config(WORKDIR.value, TRUST.value)
    else:
        raise InputError("--config is required, such as --config=configs/vit_t_digits.py")
    set_fields(config, overrides)
    return config.lock()


def set_fields(config: ConfigDict, overrides: Overrides) -> None:
    """Sets fields as the command line does; for errors see `set_field`."""
    # The options of a scheme can be set once its name is.
    for path, text in sorted(overrides, key=lambda override: override[0] != "attention_init.name"):
        set_field(config, path, text)


def set_field(config: ConfigDict, path: str, text: str) -> None:
    """Sets a field, such as 'model.depth', as `--config.FIELD=VALUE` does.

    Options of the scheme need not be in `attention_init` yet. The scheme's name is set by
    `config.set_scheme`, which changes other fields too. Raises `InputError` if there is no such
    field, or if the value has another type.
    """
    if path == "attention_init.name":
        return config_lib.set_scheme(config, text)
    fields = flatten_dict(config.to_dict(), sep=".")
    if path.startswith("attention_init."):
        options = config_lib.scheme_options(config.attention_init.name)
        fields = dict.fromkeys(f"attention_init.{option}" for option in options) | fields
    if path not in fields:
        if path.startswith("attention_init."):
            config_lib.refuse_former_option(path.removeprefix("attention_init."))
        raise InputError(f"config.{path} does not exist: {suggest(path, fields)}")
    section, _, name = path.rpartition(".")
    try:
        with config.unlocked():
            (config[section] if section else config)[name] = _read(text, fields[path])
    except (TypeError, ValueError) as error:
        kind = f"{type(fields[path]).__name__}, such as {fields[path]}"
        raise InputError(f"config.{path}={text} must be of type {kind}") from error


def _read(text: str, old: Any) -> Any:
    """Converts the text of a field to the type of its old value."""
    if isinstance(old, str):
        return text
    if isinstance(old, bool):
        return flags.BooleanParser().parse(text)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return (value,) if isinstance(old, tuple) and not isinstance(value, tuple | list) else value
