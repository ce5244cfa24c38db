"""Code shared by the commands: flags, config fields, error messages, compilation cache.

Flags are defined when a command runs, so importing this module adds none to a user's own.
"""

import contextlib
import gc
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict

from structinit_jax import config as config_lib
from structinit_jax.config import Overrides
from structinit_jax.errors import FullDiskError, InputError, StoppedError, printable

FLAGS = flags.FLAGS
# Flags that several commands share.
SHARED = {
    "config": "Config file, FILE.py or FILE.py:ROW. Required unless --workdir already holds a run "
    "or, in compare, --table is given. "
    "--config.FIELD=VALUE sets a field: seed, batch_size, model.depth, attention_init.name, "
    "augment.flip, data.data_dir, ...; structinit_jax/config.py lists them.",
    "workdir": "Output directory. Training resumes from the newest checkpoint that it holds. "
    "compare puts all its runs in it.",
    "step": "Checkpoint to use: 'newest' (default), 'best' or a step.",
    "out": "File or directory to write: by default analysis, model (export) or batch.png (show). "
    "main --mode=eval writes per-class results only if --out is set.",
    "trust_workdir": "Import Python code that the config of --workdir names.",
}
FIELD = re.compile(r"--?config\.([^=]+)=(.*)", re.DOTALL)


def run(
    main: Callable[[Overrides], None],
    define_flags: Callable[[], None] = lambda: None,
    shared: Sequence[str] = tuple(SHARED),
) -> None:
    """Runs a command and exits. Our own errors exit with their `exit_code` and no traceback.

    `main` is called with the config fields that the command line sets. `define_flags` defines the
    flags specific to the command; `shared` lists the flags of `SHARED` that it also takes.
    """
    # Tracing creates many long-lived objects: at Python's default threshold, garbage collection
    # took a fifth of the time.
    gc.set_threshold(100_000)
    # JAX loads SciPy's LAPACK later. On a busy CPU, its threads wait for each other: `mimetic` took
    # up to 100 times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    define_flags()
    for name in shared:
        define = flags.DEFINE_bool if name == "trust_workdir" else flags.DEFINE_string
        define(name, None, SHARED[name])
        # --help lists only the flags of the command's own module.
        FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])
    try:
        app.run(main, flags_parser=_parse_flags)
    except (InputError, FullDiskError) as error:
        # Messages of other libraries can quote files, so the text is escaped. It is written in one
        # piece because processes that train together share a terminal.
        text = printable(str(error), keep="\n")
        print(f"error: {text}\n", end="", file=sys.stderr, flush=True)
        _exit_now(error.exit_code)
    except StoppedError as error:
        print(printable(str(error), keep="\n"), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # not the first Ctrl-C in the training loop, which saves a checkpoint
        print("interrupted", file=sys.stderr, flush=True)
        _exit_now(130)  # as shells report it


def _exit_now(status: int) -> None:
    """Exits without waiting for the other processes, or for a step that is compiling."""
    sys.stdout.flush()
    several = jax.distributed.is_initialized() and jax.process_count() > 1
    if several and jax.process_index() == 0:
        time.sleep(5)  # once process 0 exits, JAX ends the others with its own messages
    os._exit(status)


def _parse_flags(argv: list[str]) -> Overrides:
    """Parses all flags and prepares JAX."""
    try:
        # A --flagfile can set fields too.
        words = FLAGS.read_flags_from_files(argv[1:], force_gnu=True)
        fields = [match.groups() for match in map(FIELD.fullmatch, words) if match]
        _, *words = FLAGS([argv[0], *(word for word in words if not FIELD.fullmatch(word))])
    except flags.Error as error:
        raise InputError(f"{error}; set config fields with --config.FIELD=VALUE") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--flagfile must be a text file in UTF-8: {error}") from error
    if words:
        raise InputError(f"unrecognized argument {words[0]!r}: write --name=value")
    if FLAGS["verbosity"].using_default_value:
        FLAGS.verbosity = logging.WARNING  # JAX and TFDS log a lot at INFO
    use_compilation_cache()
    sys.stdout.reconfigure(errors="backslashreplace")  # file names are not always valid text
    return fields


def use_compilation_cache() -> None:
    """Caches compiled programs in the user's cache directory, unless JAX has a cache already."""
    if jax.config.jax_compilation_cache_dir is None:
        root = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "structinit_jax" / "xla"))
        # Startup also compiles a dozen small programs.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def required_workdir() -> str:
    """Returns --workdir; raises `InputError` if it is not set."""
    if not FLAGS.workdir:
        raise InputError("--workdir is required: the output directory, such as /tmp/digits")
    return FLAGS.workdir


def out_path(default: str) -> Path:
    """Returns the path of --out. Expands `~`, which shells leave alone in `--out=~/folder`."""
    return Path(FLAGS.out or default).expanduser()


def out_folder(default: str) -> Path:
    """Creates the --out folder and returns its path; raises `InputError` on failure."""
    path = out_path(default)
    with writing_out(path):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()  # An existing folder may not be writable.
    return path


@contextlib.contextmanager
def writing_out(path: Path) -> Iterator[None]:
    """Turns an `OSError` raised inside the context into an `InputError` about --out."""
    try:
        yield
    except OSError as error:
        raise InputError(f"--out={path} cannot be written: {error}") from error


def read_config(overrides: Overrides) -> ConfigDict:
    """Returns the config of --config, or else of the run in --workdir, with overrides applied."""
    if FLAGS.config is not None:
        config = config_lib.load_config(FLAGS.config)
    elif FLAGS.workdir:
        config = config_lib.load_run_config(FLAGS.workdir, bool(FLAGS.trust_workdir))
    else:
        raise InputError("--config or --workdir is required: a config file or a run directory")
    config_lib.set_fields(config, overrides)
    return config.lock()
