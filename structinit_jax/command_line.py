"""Code shared by the commands: flags, fields of the config, error messages, compilation cache.

Flags are defined when a command runs, so that an import defines none beside a user's own.
"""

import contextlib
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.config import Overrides
from structinit_jax.errors import InputError, StoppedError, printable

FLAGS = flags.FLAGS
# Flags that several commands share.
SHARED = {
    "config": "Config file, FILE.py or FILE.py:ROW. Required unless --workdir already holds a run. "
    "--config.FIELD=VALUE sets a field: seed, batch_size, model.depth, attention_init.name, "
    "augment.flip, data.data_dir, ...; structinit_jax/config.py lists them.",
    "workdir": "Output directory. Training resumes from the newest checkpoint that it holds. "
    "compare puts all its runs in it.",
    "step": "Checkpoint: its step, 'newest' (default) or 'best'.",
    "out": "File or directory to write: by default analysis, model (export) or batch.png (show). "
    "main --mode=eval writes its results by class only if it is set.",
    "trust_workdir": "Import Python code that the config of --workdir names.",
}
FIELD = re.compile(r"--?config\.([^=]+)=(.*)", re.DOTALL)


def run(
    main: Callable[[Overrides], None],
    define_flags: Callable[[], None] = lambda: None,
    shared: Sequence[str] = tuple(SHARED),
) -> None:
    """Runs a command and exits: with status 2 and no traceback if the user made a mistake.

    `main` is called with the fields of the config that the command line sets. `define_flags`
    defines the flags of the command alone; of those in `SHARED`, it takes the ones in `shared`.
    """
    # Tracing creates many objects that live on: to look for garbage as often as Python does by
    # default took a fifth of the time.
    gc.set_threshold(100_000)
    define_flags()
    for name in shared:
        define = flags.DEFINE_bool if name == "trust_workdir" else flags.DEFINE_string
        define(name, None, SHARED[name])
        # --help lists the flags of the command's own module only.
        FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])
    try:
        app.run(main, flags_parser=_parse_flags)
    except InputError as error:
        # Texts of other libraries may quote files. It is written at once, as processes that train
        # together write to one terminal.
        text = printable(str(error), keep="\n")
        print(f"error: {text}\n", end="", file=sys.stderr, flush=True)
        _exit_now(2)
    except StoppedError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # before the loop of training, which ends with a checkpoint
        print("interrupted", file=sys.stderr, flush=True)
        _exit_now(130)  # as shells report it


def _exit_now(status: int) -> None:
    """Exits without waiting for the other processes, or for a step that is compiling."""
    sys.stdout.flush()
    several = jax.distributed.is_initialized() and jax.process_count() > 1
    if several and jax.process_index() == 0:
        time.sleep(5)  # JAX ends the others with messages of its own once process 0 has exited
    os._exit(status)


def _parse_flags(argv: list[str]) -> Overrides:
    """Parses all flags and prepares JAX."""
    try:
        # The files of --flagfile may set fields too.
        words = FLAGS.read_flags_from_files(argv[1:], force_gnu=True)
        fields = [match.groups() for match in map(FIELD.fullmatch, words) if match]
        _, *words = FLAGS([argv[0], *(word for word in words if not FIELD.fullmatch(word))])
    except flags.Error as error:
        raise InputError(f"{error}; fields of the config are --config.FIELD=VALUE") from error
    if words:
        raise InputError(f"unrecognized argument {words[0]!r}: write --name=value")
    if FLAGS["verbosity"].using_default_value:
        FLAGS.verbosity = logging.WARNING  # JAX and TFDS log much at INFO
    use_compilation_cache()
    sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file need not be text
    return fields


def use_compilation_cache() -> None:
    """Caches compiled programs in the user's cache directory, unless JAX has a cache already."""
    if jax.config.jax_compilation_cache_dir is None:
        root = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "structinit_jax" / "xla"))
        # A start compiles a dozen small programs too.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def required_workdir() -> str:
    """Returns --workdir; `InputError` if it is not set."""
    if not FLAGS.workdir:
        raise InputError("--workdir is required: the output directory, such as /tmp/digits")
    return FLAGS.workdir


def out_path(default: str) -> Path:
    """Returns the path of --out. Expands `~`, which shells leave alone in `--out=~/folder`."""
    return Path(FLAGS.out or default).expanduser()


def out_folder(default: str) -> Path:
    """Creates the folder of --out and returns its path; `InputError` if that is not possible."""
    path = out_path(default)
    with writing_out(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def writing_out(path: Path) -> Iterator[None]:
    """Raises `InputError` if --out cannot be written inside."""
    try:
        yield
    except OSError as error:
        raise InputError(f"--out={path} cannot be written: {error}") from error


def read_config(overrides: Overrides) -> ConfigDict:
    """Returns the config of --config, or else of the run in --workdir, with the overrides."""
    if FLAGS.config is not None:
        config = config_lib.load_config(FLAGS.config)
    else:
        workdir = FLAGS.get_flag_value("workdir", None)
        if not workdir:
            raise InputError("--config or --workdir is required: a config file, or a run")
        config = config_lib.load_run_config(workdir, bool(FLAGS.trust_workdir))
    config_lib.set_fields(config, overrides)
    return config.lock()
