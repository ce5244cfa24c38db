"""Bad flags, fields and files, each through the public command, with what a newcomer is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFIG = "--config=configs/vit_t_digits.py"
WHOLE = "it needs to be a whole number"
NUMBER = "it needs to be a number"
SPLITS = "The splits of digits are 'train' (1,438), 'test' (359); write for example 'train'"
ALL_THREE = "several processes need all of --coordinator_address=HOST:PORT, --num_processes and"

CONFIG_FILES = {
    "syntax.py": ("x = 1\ndef get_config(:\n", "syntax.py, line 2: SyntaxError"),
    "no_function.py": ("x = 1\n", "has no attribute 'get_config'"),
    "fails.py": (
        "def get_config():\n    x = 0\n    return 1 / x\n",
        "fails.py, line 3: ZeroDivisionError: division by zero",
    ),
    "imports.py": (
        "import nopackage\n",
        "line 1: ModuleNotFoundError: No module named 'nopackage'",
    ),
    "dict.py": (
        "def get_config():\n    return {'seed': 1}\n",
        "lacks everything; start from struct",
    ),
    "none.py": (
        "def get_config():\n    pass\n",
        "lacks everything; start from structinit_jax.config",
    ),
    "short.py": (
        "from structinit_jax.config import base_config\n"
        "def get_config():\n    c = base_config()\n    del c.seed\n    return c\n",
        "lacks seed; start from structinit_jax.config.base_config(), change its fields",
    ),
    "binary.py": ("\0\0", "binary.py: SyntaxError"),
}

# Behind a good --config and --workdir, which are left out where None stands in their place.
COMMANDS = [
    # Types of fields.
    (["--config.seed=1.5"], f"flag --config.seed=1.5: {WHOLE}"),
    (["--config.batch_size=many"], f"flag --config.batch_size=many: {WHOLE}"),
    (["--config.batch_size="], f"flag --config.batch_size=: {WHOLE}"),
    (["--config.model.depth=2.5"], f"--config.model.depth=2.5: {WHOLE}"),
    (["--config.attention_init.kernel_size=three"], f"kernel_size=three: {WHOLE}"),
    (["--config.num_epochs=ten"], f"flag --config.num_epochs=ten: {NUMBER}"),
    (["--config.learning_rate=1e-3.5"], f"flag --config.learning_rate=1e-3.5: {NUMBER}"),
    (["--config.model.qk_norm=maybe"], "model.qk_norm=maybe: it needs to be true or false"),
    (["--config.model=5"], "--config.model=5: it is a section: set one of its fields"),
    (["--config.attention_init=impulse"], "such as \"{'name': 'impulse'}\""),
    (["--config.data.mean=(0.5"], "config.data.mean=('(0.5',) does not fit"),
    (["--config.data.std=('a',)"], "config.data.std=('a',) does not fit: it needs to be finite"),
    # Names of fields and flags.
    (["--config.modle.width=5"], "config has no field 'modle'; did you mean 'model'?"),
    (["--config.model.widht=5"], "config.model has no field 'widht'; did you mean 'width'?"),
    (["--config.model.depth.x=1"], "config.model.depth has no field 'x'"),
    (["--config.optimizer=adam"], "config has no field 'optimizer'"),
    (["--config.=1"], "a flag --config.FIELD=VALUE could not be read"),
    (["--config.attention_init.kernel=5"], "did you mean 'kernel_size'?"),
    (
        ["--config.attention_init={'name': 'impulse', 'size': 3}"],
        "attention_init.size: scheme 'impulse' has no such option (it takes kernel_size,",
    ),
    (["--wrokdir=x"], "Unknown command line flag 'wrokdir'. Did you mean: workdir"),
    (["-x"], "Unknown command line flag 'x'"),
    (["train"], "'train' is no flag: write --name=value"),
    (["--mode=test"], "--mode=test: value should be one of <train|eval>"),
    (["--dry_run=perhaps"], "flag --dry_run=perhaps: it needs to be true or false"),
    # Ranges.
    (["--config.seed=-1"], "config.seed=-1 does not fit: it needs to be from 0 to 2³² - 1"),
    (["--config.seed=99999999999"], "config.seed=99999999999 does not fit"),
    (
        ["--config.batch_size=0"],
        "config.batch_size=0 does not fit: it needs to be a positive whole",
    ),
    (["--config.num_epochs=0"], "config.num_epochs=0.0 does not fit: it needs to be positive, or"),
    (["--config.num_epochs=1e400"], "config.num_epochs=inf does not fit: it needs to be a finite"),
    (["--config.num_steps=-5"], "config.num_steps=-5 does not fit: it needs to be positive"),
    (["--config.learning_rate=nan"], "config.learning_rate=nan does not fit: it needs to be a fin"),
    (["--config.learning_rate=0"], "config.learning_rate=0.0 does not fit: it needs to be > 0"),
    (["--config.adam_b2=1.0"], "config.adam_b2=1.0 does not fit: it needs to be in [0, 1)"),
    (["--config.adam_epsilon=0"], "config.adam_epsilon=0.0 does not fit: it needs to be > 0"),
    (["--config.weight_decay=-1"], "config.weight_decay=-1.0 does not fit: it needs to be zero or"),
    (
        ["--config.weight_decay=inf"],
        "config.weight_decay=inf does not fit: it needs to be a finite",
    ),
    (["--config.label_smoothing=1"], "config.label_smoothing=1.0 does not fit: it needs to be in"),
    (["--config.eval_every_epochs=0"], "config.eval_every_epochs=0.0 does not fit"),
    (["--config.on_nonfinite=ignore"], "on_nonfinite='ignore' does not fit: it needs to be 'stop'"),
    (["--config.model.depth=0"], "config.model.depth=0 does not fit: it needs to be a positive wh"),
    (
        ["--config.model.drop_path=1.5"],
        "config.model.drop_path=1.5 does not fit: it needs to be a r",
    ),
    (["--config.model.mlp_ratio=0"], "config.model.mlp_ratio=0.0 does not fit: it needs to be > 0"),
    (
        ["--config.data.channels=2"],
        "config.data.channels=2 does not fit: it needs to be 1 (grey) or",
    ),
    (["--config.data.channels=3"], "it needs to be one number for each of data.channels=3"),
    (
        ["--config.data.mean=(nan,)"],
        "config.data.mean=('(nan,)',) does not fit: it needs to be finite",
    ),
    (["--config.data.std=(0.0,)"], "config.data.std=(0.0,) does not fit: it needs to be positive"),
    (["--config.data.crop_fraction=0"], "crop_fraction=0.0 does not fit: it needs to be in (0, 1]"),
    # Choices.
    (["--config.model.pool=max"], "model.pool='max': choose one of mean, class_token"),
    (["--config.model.positions=rope"], "model.positions='rope': choose one of sincos, learned"),
    (["--config.model.dtype=int8"], "model.dtype='int8': choose one of float32, bfloat16"),
    (["--config.model.remat=all"], "model.remat='all': choose one of none, full, dots"),
    (
        ["--config.attention_init.name=xavier"],
        "attention_init.name='xavier' is no scheme: there are",
    ),
    (["--config.model.name=vitt"], "model.name='vitt' is no model: "),
    (
        ["--config.model.name=vit_tiny_patch16_224"],
        "is a variant of 'vit': start the config from base_config('vit_tiny_patch16_224')",
    ),
    # Sizes that do not fit one another.
    (["--config.model.num_heads=3"], "model.width=64 is not divisible by model.num_heads=3"),
    (["--config.model.patch_size=3"], "data.image_size=8 is not divisible by model.patch_size=3"),
    (["--config.attention_init.kernel_size=4"], "kernel size must be odd and positive, such as 3"),
    (
        ["--config.attention_init.kernel_size=99"],
        "kernel_size=99 is larger than the token grid 8x8",
    ),
    # Data.
    (
        ["--config.data.name="],
        "config.data.name='' does not fit: it needs to be the name of a TFDS",
    ),
    (["--config.data.name=digitz"], "TFDS knows no such data set. Did you mean 'digits'?"),
    (["--config.data.train_split=trian"], SPLITS),
    (["--config.data.train_split=train["], SPLITS),
    (["--config.data.train_split="], SPLITS),
    (["--config.data.eval_split=test[5:5]"], "data.eval_split='test[5:5]': it holds no example"),
    (["--config.data.train_split=train[:200%]"], "percent slice boundaries should be in"),
    (
        ["--config.model.num_classes=5"],
        "the data set has 10 classes. Pass --config.model.num_class",
    ),
    (["--config.data.data_dir=FOLDER/file"], "Pass --config.data.data_dir=DIR with a folder that"),
    # Files.
    ([None, "--workdir=x"], "--config is required: the path of a config file, such as"),
    ([None, "--config"], "Missing value for flag --config"),
    (
        [None, "--config="],
        "--config=: there is no such file; the configs are in the folder configs/",
    ),
    ([None, "--config=FOLDER"], "FOLDER: there is no such file; the configs are in the folder"),
    ([None, "--config=configs/nope.py"], "--config=configs/nope.py: there is no such file"),
    (
        [None, "--config=configs/vit_2024_small.py:stl10"],
        "--config=configs/vit_2024_small.py:stl10: 'stl10' is no data set: choose one of cifar10, ",
    ),
    (
        [None, "--config", "configs/convmixer_2024.py:256,4"],
        "--config=configs/convmixer_2024.py:256,4: '4' is no kernel size: choose one of 3, 5, 8;",
    ),
    ([None, f"{CONFIG}:cifar10"], "vit_t_digits.py:cifar10: this file has no rows: leave out"),
    ([None, CONFIG], "--workdir is required: the folder for checkpoints and metrics, such as"),
    ([None, CONFIG, "--workdir="], "--workdir is required: the folder for checkpoints"),
    (["--workdir=FOLDER/file"], "FOLDER/file cannot be written to (File exists): give another"),
    (["--workdir=FOLDER/file/run"], "cannot be written to (Not a directory): give another folder"),
    (["--mode=eval"], "run holds no checkpoints: train there first"),
    *(
        ([None, f"--config=FOLDER/{name}", "--workdir=x"], message)
        for name, (_, message) in CONFIG_FILES.items()
    ),
    # Several processes.
    (["--num_processes=two"], f"flag --num_processes=two: {WHOLE}"),
    (
        ["--num_processes=2"],
        f"--coordinator_address and --process_id must be given too: {ALL_THREE}",
    ),
    (["--process_id=0"], "--coordinator_address and --num_processes must be given too"),
    (["--coordinator_address=a:1"], "--num_processes and --process_id must be given too"),
    (["--join_timeout=0"], "flag --join_timeout=0: 0 is not a positive integer"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory, data_dir):
    """Exit code, stdout and stderr of every command."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "file").write_text("")
    for name, (text, _) in CONFIG_FILES.items():
        (folder / name).write_text(text)
    common = [CONFIG, f"--workdir={folder / 'run'}", f"--config.data.data_dir={data_dir}"]
    commands = [
        arguments[1:] if arguments[0] is None else [*common, *arguments]
        for arguments, _ in COMMANDS
    ]
    text = json.dumps(commands).replace("FOLDER", str(folder))
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "tests/fork_main.py"],
        input=text,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [(*result, str(folder)) for result in json.loads(done.stdout)]


@pytest.mark.parametrize(
    "number", range(len(COMMANDS)), ids=lambda i: " ".join(map(str, COMMANDS[i][0]))
)
def test_the_command_says_what_is_wrong(results, number):
    code, _, stderr, folder = results[number]
    message = COMMANDS[number][1].replace("FOLDER", folder)
    assert code == 1
    assert stderr.startswith("error: ") or "\nerror: " in stderr
    assert message in stderr
    assert "Traceback" not in stderr
