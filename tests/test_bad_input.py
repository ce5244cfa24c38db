"""Bad flags, fields and files, each through the public command, with what a newcomer is told."""

import io
import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from PIL import Image

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


def picture(side=8, image_format="PNG"):
    file = io.BytesIO()
    Image.effect_noise((side, side), 50).convert("RGB").save(file, image_format)
    return file.getvalue()


def bomb():
    """A PNG of a few bytes that claims to be 60,000 pixels wide and high."""

    def chunk(name, content):
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"0")), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


# What is put into a good folder of images: content by path, None where something is taken out.
IMAGE_FOLDERS = {
    "text": {"train/a/1.png": b"no image"},
    "empty": {"train/a/1.png": b""},
    "cut_png": {"train/a/1.png": picture(64)[:2000]},
    "cut_jpeg": {"train/a/1.jpg": picture(64, "JPEG")[:1000]},
    "bomb": {"train/a/1.png": bomb()},
    "no_val": {"val": None},
    "other_class": {"val/b": None, "val/c/1.png": picture()},
    "empty_class": {"train/a/1.png": None},
    "no_class": {"train/a": None, "train/b": None, "val/a": None, "val/b": None},
    "no_split": {"train": None, "val": None},
    "good": {},
}
LAYOUT = "Wanted: DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg"
SKIP = "Replace or delete it, or leave such images out with data.on_bad_image='skip'"


IMAGES_CONFIG = """
from structinit_jax.config import base_config

def get_config():
    config = base_config()
    config.batch_size = 2
    config.model.update(num_classes=2, width=8, depth=1, num_heads=1, patch_size=8)
    config.attention_init = {"name": "default"}
    config.data.update(name="folder", eval_split="val", image_size=8)
    return config
"""


def images(name, *arguments):
    """Arguments that train the smallest model there is on one of the folders."""
    where = f"--config.data.data_dir=FOLDER/{name}"
    return [None, "--config=FOLDER/images.py", "--workdir=FOLDER/images", where, *arguments]


NO_NAME = "is no name of a data set: write it as TFDS does, such as 'cifar10' or"

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
    (["--config.attention_init={"], "it is a section: set one of its fields, or write all of it"),
    (["--config.attention_init={'kernel_size': 3}"], "attention_init.name='' is no scheme: there"),
    (
        ["--config.model={'name': 'vit', 'depth': 3}"],
        "config.model lacks attention_implementation, drop_path, dropout, dtype, layer_scale,",
    ),
    (["--config.model={}"], "model.name='' is not a known model: choose from vit, swin, mixer"),
    (["--config.augment={'flip': 0.5, 'rotate': 1}"], "and has no field 'rotate': keep the sec"),
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
    (["--config.fsdp=0"], "config.fsdp=0 does not fit: it needs to be a positive whole number"),
    (["--config.fsdp=3"], "config.fsdp=3 does not divide the 1 devices: choose a number that does"),
    (["--config.clip_norm=-1"], "config.clip_norm=-1.0 does not fit: it needs to be zero or more"),
    (["--config.layer_decay=0"], "layer_decay=0.0 does not fit: it needs to be in (0, 1]"),
    (["--config.ema_decay=1"], "config.ema_decay=1.0 does not fit: it needs to be in [0, 1)"),
    (["--config.accumulate_steps=3"], "in config.accumulate_steps=3: for example 63 or 66"),
    (["--config.num_epochs=1e12"], "makes 22,468,750,000,000 steps; no more than 2,147,483,647"),
    (["--config.keep_checkpoints=0"], "keep_checkpoints=0 does not fit: it needs to be a positive"),
    (["--config.model.num_registers=-1"], "num_registers=-1 does not fit: it needs to be zero or"),
    # Augmentation.
    (["--config.augment.flip=2"], "augment.flip=2.0 does not fit: it needs to be a probability in"),
    (["--config.augment.mixup=-1"], "augment.mixup=-1.0 does not fit: it needs to be zero or more"),
    (["--config.augment.erasing=nan"], "augment.erasing=nan does not fit: it needs to be a prob"),
    (["--config.augment.crop=random"], "it needs to be one of none, pad, resized"),
    (["--config.augment.crop_scale=(0.5,0.1)"], "it needs to be two numbers, the lower first"),
    (["--config.augment.color_jitter=(1,2)"], "it needs to be three numbers of zero or more"),
    (
        ["--config.augment.rand_augment=randaug"],
        "is not understood: it needs to be 'rand' followed by any of -mM (magnitude), -mstdS",
    ),
    (["--config.augment.rand_augment=rand-m9-zz1"], "'rand-m9-zz1' is not understood: it needs"),
    # Choices.
    (["--config.model.pool=max"], "model.pool='max': choose one of mean, class_token"),
    (["--config.model.positions=rope"], "model.positions='rope': choose one of sincos, learned"),
    (["--config.model.dtype=int8"], "model.dtype='int8': choose one of float32, bfloat16"),
    (["--config.model.remat=all"], "model.remat='all': choose one of none, full, dots"),
    (
        ["--config.attention_init.name=xavier"],
        "attention_init.name='xavier' is no scheme: there are",
    ),
    (["--config.model.name=vitt"], "model.name='vitt' is not a known model: "),
    (
        ["--config.model.name=vit_tiny_patch16_224"],
        "is a variant of 'vit': start the config from base_config('vit_tiny_patch16_224')",
    ),
    (
        ["--config.model.name=swin"],
        "config.model lacks depths, window_size and has no field 'depth', 'layer_scale', 'num_regi",
    ),
    # Options of the schemes.
    (["--config.attention_init={'name': 'impulse', 'norm': -1.0}"], "norm=-1.0: it must be posit"),
    (["--config.attention_init={'name': 'impulse', 'share': 2.0}"], "share of attention lies in"),
    (
        ["--config.attention_init={'name': 'impulse', 'filters': 'sobel'}"],
        "attention_init.filters='sobel': choose one of impulse, gaussian, difference_of_gaussians",
    ),
    (
        ["--config.attention_init={'name': 'impulse', 'kernel_size': (3, 3)}"],
        "attention_init.kernel_size=(3, 3) has 2 values for 4 layers: give one for each layer",
    ),
    (["--config.model.qk_norm=True"], "model.qk_norm=True does not fit this attention_init"),
    # Sizes that do not fit one another.
    (["--config.model.num_heads=3"], "model.width=64 is not divisible by config.model.num_heads=3"),
    (["--config.model.patch_size=3"], "data.image_size=8 is not divisible by config.model.patch_s"),
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
    *(
        ([f"--config.data.name={name}"], f"data.name={name!r} {NO_NAME}")
        for name in ("../etc", "/etc/passwd", "digits/../x", "digits;ls", "$(ls)", "..", "a b", "~")
    ),
    (["--config.data.name=digits:9.9.9"], "TFDS knows no such data set. Did you mean 'digits'?"),
    (["--config.data.name=cifar10"], "is not prepared: there is no "),
    # Images.
    (images("text"), f"1.png): cannot be decoded (no known image format). {SKIP}"),
    (images("empty"), f"1.png): cannot be decoded (no known image format). {SKIP}"),
    (images("cut_png"), f"1.png): cannot be decoded (image file is truncated). {SKIP}"),
    (images("cut_jpeg"), "1.jpg): cannot be decoded (Premature end of JPEG file)"),
    (images("bomb"), "1.png): cannot be decoded (Image size (3600000000 pixels) exceeds limit"),
    (images("no_val"), "data.eval_split='val': Unknown split 'val'. The splits of folder are"),
    (images("other_class"), f"train has 1 classes that val does not have: 'b'. {LAYOUT}"),
    (images("empty_class"), "the class train/a holds no image (a file ending in .jpg, .jpeg,"),
    (images("no_class"), f"the folder train holds no class, that is no folder. {LAYOUT}"),
    (images("no_split"), f"no_split': it holds none of the folders train, val, test. {LAYOUT}"),
    (images("missing"), f"missing': there is no such folder. {LAYOUT}"),
    (images("good", "--config.data.data_dir="), f"'folder' needs the folder. {LAYOUT}"),
    (images("good", "--config.model.num_classes=10"), "the data set has 2 classes. Pass --config"),
    (images("good", "--config.data.on_bad_image=ignore"), "='ignore': must be 'stop' or 'skip'"),
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
    (["--workdir=gs://bucket/run"], "gs://bucket/run is the address of a store, and needs to be a"),
    (["--mode=eval", "--workdir=gs://bucket/run"], "mount the store on every host (a bucket of"),
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
    (
        ["--coordinator_address=host", "--num_processes=2", "--process_id=0"],
        "--coordinator_address=host needs a host and a port, such as 10.0.0.1:1234",
    ),
    (
        ["--coordinator_address=a:1", "--num_processes=2", "--process_id=2"],
        "--process_id=2 needs to be from 0 to 1, since --num_processes=2",
    ),
    (["--profile_steps=5"], "--profile_steps=5 needs to be the first and the last step to trace"),
    (["--join_timeout=0"], "flag --join_timeout=0: 0 is not a positive integer"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory, data_dir):
    """Exit code, stdout and stderr of every command."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "file").write_text("")
    for name, (text, _) in CONFIG_FILES.items():
        (folder / name).write_text(text)
    (folder / "images.py").write_text(IMAGES_CONFIG)
    for name, changes in IMAGE_FOLDERS.items():
        good = {f"{s}/{c}/1.png": picture() for s in ("train", "val") for c in "ab"}
        paths = {k: v for k, v in good.items() if not any(k.startswith(c) for c in changes)}
        for path, content in (paths | changes).items():
            path = folder / name / path
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                path.write_bytes(content)
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
