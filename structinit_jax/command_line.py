"""Code shared by the commands: flags, config files, error messages, compilation cache.

`--config=FILE:ROW` and `--config.FIELD=VALUE` are parsed here because `ml_collections.config_flags`
prints a traceback for a missing or failing file, an unknown field or a value of the wrong type.
"""

import ast
import contextlib
import difflib
import gc
import inspect
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
from absl import app, flags, logging
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.attention_init import scheme_options
from structinit_jax.errors import InputError, StoppedError
from structinit_jax.training import remote

CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Config file, FILE.py or FILE.py:ROW. Required unless --workdir already holds a run. "
    "--config.FIELD=VALUE sets a field.",
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
    "Checkpoint: its step, 'newest' (default) or 'best'. For data.show: a training step, "
    "from 1 (default).",
)
OUT = flags.DEFINE_string(
    "out",
    None,
    "File or directory to write: by default analysis, model.safetensors (export) or batch.png "
    "(data.show).",
)
SHARED = ("workdir", "step", "out")
INTERRUPTED_EXIT_CODE = 130  # of a program that Ctrl-C ended, as shells report it


def run(
    main: Callable[[Any], None],
    shared: Sequence[str] = SHARED,
    with_config: bool = True,
    of_a_run: bool = True,
) -> None:
    """Runs a command and exits. A user's mistake is printed without a traceback.

    Args:
      main: The command, called with the config.
      shared: Which of the flags --workdir, --step and --out the command takes.
      with_config: False for a command that takes no --config because it has its own configs. It is
        called with the field and the text of each --config.FIELD=VALUE.
      of_a_run: False for a command whose --workdir is not that of a run. It is called with None if
        there is no --config.
    """
    own = [*(["config"] if with_config else []), *shared]
    for name in {"config", *SHARED}.difference(own):
        delattr(flags.FLAGS, name)
    for name in own:  # --help lists the flags of the command's own module only
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

    def run_main(parsed: Any) -> None:
        use_compilation_cache()
        # Collections would walk the imported modules again and again while programs are traced.
        gc.freeze()
        gc.enable()
        main(parsed)

    def parse(argv: list[str]) -> Any:
        overrides = _parse_flags(argv)
        return _make_config(overrides, of_a_run) if with_config else overrides

    sys.stdout, sys.stderr = _Output(sys.stdout), _Output(sys.stderr)
    try:
        app.run(run_main, flags_parser=parse)
    except InputError as error:
        sys.exit(f"error: {error}")
    except StoppedError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except (AssertionError, RuntimeError):
        _check_platforms()
        raise
    except KeyboardInterrupt:  # before the loop of training, which ends with a checkpoint
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT_CODE)


def _check_platforms():
    """Exits with a message if JAX_PLATFORMS names devices that JAX cannot use."""
    if not (platforms := jax.config.jax_platforms):
        return
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # JAX has no text for a missing plugin of CUDA
        sys.exit(
            f"error: JAX_PLATFORMS={platforms}: JAX cannot use these devices"
            f"{f' ({error})' if str(error) else ''}. Install the package for them, such as "
            "'.[train,cuda12]', or unset JAX_PLATFORMS to train on those that JAX finds."
        )


class _Output:
    """A standard stream that drops what cannot be written.

    A closed pipe (`| head`) or a log file on a full disk must not end a run.
    """

    def __init__(self, stream: TextIO | None):
        # None if the descriptor is closed, which a file of the run would take over.
        self._stream = stream or Path(os.devnull).open("w")  # noqa: SIM115

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # the name of a file need not be text
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def out_path(default: str) -> Path:
    """Returns --out, in which a shell leaves `~` as it is."""
    return Path(OUT.value or default).expanduser()


def use_compilation_cache() -> None:
    """Caches compiled programs in the user's cache directory, unless JAX has a cache already."""
    if jax.config.jax_compilation_cache_dir is None:
        root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "structinit_jax" / "xla"))
        # A start compiles a dozen small programs too.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def load_config(location: str) -> ConfigDict:
    """Runs a config file and returns its config.

    Args:
      location: Path of the file, optionally with a table row: 'configs/vit_2025_small.py:food101'.

    Raises:
      InputError: The file is missing, fails, or does not return a config of this package.
    """
    path, _, row = location.partition(":")
    if not Path(path).is_file():
        place = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        raise InputError(
            f"--config={path}: there is no such file{place}; configs/ of a checkout has the recipes"
        )
    try:
        get_config = runpy.run_path(path).get("get_config")
        if get_config is None:
            raise InputError("the file does not define get_config()")
        if row and not inspect.signature(get_config).parameters:
            raise InputError(f"the file has no rows: leave out ':{row}'")
        config = get_config(row) if row else get_config()
        if not isinstance(config, ConfigDict):
            raise InputError(
                f"get_config() returns {type(config).__name__}, not a ConfigDict: end it with "
                "`return config`, where config starts as structinit_jax.config.base_config()"
            )
        config_lib.check_fields(config)
        _drop_foreign_options(config)
    except InputError as error:
        raise InputError(f"--config={location}: {error}") from error
    except Exception as error:  # the file is the user's program: anything may happen in it
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
        place = f"{path}, line {line}" if line else path
        raise InputError(f"--config={place}: {type(error).__name__}: {error}") from error
    return config


def load_run_config(workdir: str | Path) -> ConfigDict:
    """Reads the resolved config of a run from its output directory.

    Raises:
      InputError: There is none, or it is not one of this package.
    """
    path = remote.readable(workdir, "config.json") / "config.json"
    try:
        fields = _with_tuples(json.loads(path.read_text()))
        config = config_lib.base_config(fields["model"]["name"])
        # The options depend on the scheme, so those of the default are not kept.
        config.attention_init = ConfigDict(fields.pop("attention_init"))
        config.update(fields)
        config_lib.check_fields(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--workdir={workdir}: config.json cannot be read ({error}): pass the output directory "
            "of a run, or --config with its config file"
        ) from error
    return config


def _with_tuples(value):
    """Undoes what JSON does to tuples."""
    if isinstance(value, dict):
        return {name: _with_tuples(part) for name, part in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _parse_flags(argv: list[str]) -> list[tuple[str, str]]:
    """Parses all flags and returns the fields of the config that they set, as text."""
    words, overrides = [], []
    try:
        unread = iter(flags.FLAGS.read_flags_from_files(argv, force_gnu=False))
        for word in unread:
            if word.startswith(("--config.", "-config.")):
                path, equals, text = word.split(".", 1)[1].partition("=")
                overrides.append((path, text if equals else next(unread, "")))
            else:
                words.append(word)
        remaining = flags.FLAGS(words)
    except SystemExit as error:  # absl has printed the help, and ends with status 1
        raise SystemExit(0) from error
    except flags.UnrecognizedFlagError as error:
        hint = _suggest_sections(config_lib.base_config(), error.flagname)
        raise InputError(f"{error}: {hint}" if hint else str(error)) from error
    except flags.Error as error:
        raise InputError(str(error)) from error
    if flags.FLAGS["verbosity"].using_default_value:
        flags.FLAGS.verbosity = logging.WARNING  # JAX, TFDS and orbax log much at INFO
    if len(remaining) > 1:
        raise InputError(f"unrecognized argument {remaining[1]!r}: write --name=value")
    return overrides


def _make_config(overrides: Sequence[tuple[str, str]], of_a_run: bool) -> ConfigDict | None:
    """Returns the config that --config and its fields describe."""
    workdir = WORKDIR.value if "workdir" in flags.FLAGS else None
    if CONFIG.value is not None:
        config = load_config(CONFIG.value)
    elif not of_a_run:
        return None
    elif workdir and (remote.readable(workdir, "config.json") / "config.json").is_file():
        config = load_run_config(workdir)
    else:
        why = (
            f": --workdir={workdir} holds no run, that is, no config.json (runs of a comparison "
            "are in SETTING/seed_K)"
            if workdir
            else ", unless --workdir is that of a run"
        )
        raise InputError(f"--config is required, such as --config=configs/vit_t_digits.py{why}")
    for path, text in overrides:
        override(config, path, text)
    if config_lib.set_base_init(config):
        print("note: kaiming_uniform applies to the whole model: config.model.base_init='pytorch'")
    return config.lock()


def override(config: ConfigDict, path: str, text: str, flag: str = "config") -> None:
    """Sets a field, such as 'model.depth', as `--config.FIELD=VALUE` does.

    Options of the scheme need not be in `attention_init`. Another 'attention_init.name' removes
    those that its scheme does not take.

    Args:
      config: Config to change.
      path: The field.
      text: Its value.
      flag: What the user typed before the field, for messages.
    """
    node, place = config, "config"
    for name in path.split("."):
        fields = list(node) if isinstance(node, ConfigDict) else []
        if place == "config.attention_init":
            fields += [o for o in scheme_options(config.attention_init.name) if o not in fields]
        if name not in fields:
            hint = _suggest_sections(config, path.split(".")[-1], flag)
            if not hint and (near := difflib.get_close_matches(name, fields, n=1)):
                hint = f"did you mean {near[0]!r}?"
            known = f"it has {', '.join(fields) or 'no fields'}"
            text = f"{hint} {known}" if hint else known
            raise InputError(f"--{flag}.{path}: {place} has no field {name!r}; {text}")
        section, node, place = node, node.get(name), f"{place}.{name}"
    read, need = READERS.get(type(node), (_read_literal, "a Python literal"))
    try:
        with config.unlocked():
            section[name] = read(text)
    except (TypeError, ValueError, SyntaxError) as error:
        raise InputError(f"--{flag}.{path}={text} must be {need}") from error
    if path == "attention_init.name":
        _drop_foreign_options(config)


def _suggest_sections(config, name, flag="config"):
    """Returns 'did you mean --config.SECTION.NAME?' for the sections with such a field, or ''."""
    paths = flatten_dict(config.to_dict(), sep=".")
    found = sorted(f"--{flag}.{path}" for path in paths if path.split(".")[-1] == name)
    return f"did you mean {' or '.join(found)}?" if found else ""


def check_schemes(schemes: Sequence[str]) -> None:
    """Raises `InputError` if one of --schemes does not exist or appears twice."""
    flag = f"--schemes={','.join(schemes)}"
    if len({*schemes}) < len(schemes):
        raise InputError(f"{flag}: a scheme appears twice: give each once")
    try:
        for scheme in schemes:
            scheme_options(scheme)
    except InputError as error:
        raise InputError(f"{flag}: {error}") from error


def _drop_foreign_options(config):
    for option in config_lib.drop_foreign_options(config):
        name = config.attention_init.name
        print(f"note: attention_init.{option} is not an option of {name!r} and is left out")


def _read_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _read_tuple(text: str) -> tuple[float, ...]:
    value = ast.literal_eval(text)
    value = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(x, int | float) for x in value):
        raise TypeError
    return tuple(value)


def _read_dict(text: str) -> dict[str, Any]:
    value = ast.literal_eval(text)
    if not isinstance(value, dict):
        raise TypeError
    return value


# Type of a field -> how its text is read, and what it must be.
READERS = {
    bool: (flags.BooleanParser().parse, "true or false"),
    int: (flags.IntegerParser().parse, "a whole number"),
    float: (flags.FloatParser().parse, "a number"),
    str: (str, "a string"),
    tuple: (_read_tuple, "one or more numbers, such as (0.5, 0.5)"),
    ConfigDict: (_read_dict, "a dict; or set its fields one by one"),
}
