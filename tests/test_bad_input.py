"""Bad flags, fields and files, given to the public command: its message names them."""

import io
import re
import struct
import zlib

import fork_main
import pytest
from PIL import Image

CONFIG = "--config=configs/vit_t_digits.py"

# Contents of a config file, and what stderr must contain.
CONFIG_FILES = {
    "syntax.py": ("x = 1\ndef get_config(:\n", "syntax.py, line 2: SyntaxError"),
    "no_function.py": ("x = 1\n", r"no_function.py: .*get_config\(\)"),
    "fails.py": (
        "def get_config():\n    x = 0\n    return 1 / x\n",
        "fails.py, line 3: ZeroDivisionError",
    ),
    "imports.py": ("import nopackage\n", "imports.py, line 1: ModuleNotFoundError.*nopackage"),
    "dict.py": ("def get_config():\n    return {'seed': 1}\n", "dict.py: .*ConfigDict"),
    "none.py": ("def get_config():\n    pass\n", "none.py: .*ConfigDict"),
    "short.py": (
        "from structinit_jax.config import base_config\n"
        "def get_config():\n    c = base_config()\n    del c.seed\n    return c\n",
        "short.py: config lacks seed",
    ),
    "misspelled.py": (
        "from structinit_jax.config import base_config\n"
        "def get_config():\n    c = base_config()\n    c.bacth_size = 1\n    return c\n",
        "misspelled.py: config has unknown fields bacth_size: did you mean 'batch_size'",
    ),
    "binary.py": ("\0\0", "binary.py: SyntaxError"),
    # Of another type, which ml_collections lets through in a section that is set as a whole.
    **{
        f"{field}.py": (
            "from structinit_jax.config import base_config\ndef get_config():\n"
            f"    c = base_config()\n    c.augment = {{**c.augment, {field!r}: {value!r}}}\n"
            "    c.data.name = 'digits'\n    return c\n",
            rf"config\.augment\.{field}={value!r} (must be|is not) ",
        )
        for field, value in (
            ("mixup", "0.8"),
            ("color_jitter", 0.4),
            ("rand_augment", 9),
            ("mix_group", 2.5),
            ("erase_after_mixing", "yes"),
        )
    },
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


# Changes to a good folder of images: content by path; None removes the path.
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
    """Arguments that train a tiny model on one of the folders."""
    where = f"--config.data.data_dir=FOLDER/{name}"
    return [None, "--config=FOLDER/images.py", "--workdir=FOLDER/images", where, *arguments]


# Overrides of single fields. The message must name the field.
FIELDS = [
    # Types.
    "seed=1.5",
    "batch_size=many",
    "batch_size=",
    "model.depth=2.5",
    "attention_init.kernel_size=three",
    "num_epochs=ten",
    "learning_rate=1e-3.5",
    "model.qk_norm=maybe",
    "model=5",
    "attention_init=impulse",
    "attention_init={",
    "data.mean=(0.5",
    "data.mean=(nan,)",
    "data.std=('a',)",
    # Names.
    "modle.width=5",
    "model.widht=5",
    "model.depth.x=1",
    "momentum=0.9",
    "=1",
    "attention_init.kernel=5",
    # Ranges.
    "seed=-1",
    "seed=99999999999",
    "batch_size=0",
    "num_epochs=0",
    "num_epochs=1e400",
    "num_epochs=1e12",
    "num_steps=-5",
    "learning_rate=nan",
    "learning_rate=0",
    "adam_b2=1.0",
    "adam_epsilon=0",
    "weight_decay=-1",
    "weight_decay=inf",
    "label_smoothing=1",
    "eval_every_epochs=0",
    "on_nonfinite=ignore",
    "schedule=linear",
    "clip_norm=-1",
    "layer_decay=0",
    "ema_decay=1",
    "fsdp=0",
    "fsdp=3",
    "accumulate_steps=3",
    "keep_checkpoints=0",
    "model.depth=0",
    "model.drop_path=1.5",
    "model.mlp_ratio=0",
    "model.num_registers=-1",
    "data.channels=2",
    "data.channels=3",
    "data.std=(0.0,)",
    "data.crop_fraction=0",
    "augment.flip=2",
    "augment.mixup=-1",
    "augment.erasing=nan",
    "augment.crop=random",
    "augment.crop_scale=(0.5,0.1)",
    "augment.color_jitter=(1,2)",
    "augment.rand_augment=randaug",
    "augment.rand_augment=rand-m9-zz1",
    # Choices.
    "loss=hinge",
    "optimizer=sgd",
    "optimizer=no_such_module:adam",
    "model.pool=max",
    "model.positions=rotary",
    "model.dtype=int8",
    "model.remat=all",
    # Sizes that do not fit together.
    "model.num_heads=3",
    "model.patch_size=3",
    "model.width=18",
    "attention_init.kernel_size=4",
    "attention_init.kernel_size=99",
    # Data.
    "data.name=",
    "data.name=digits:9.9.9",
    *(f"data.name={x}" for x in ("../etc", "/etc/passwd", "digits/../x", "digits;ls")),
    *(f"data.name={x}" for x in ("$(ls)", "..", "a b", "~")),
    "data.train_split=trian",
    "data.train_split=train[",
    "data.train_split=",
    "data.train_split=train[:200%]",
    "data.eval_split=test[5:5]",
    "data.train_eval_split=trian",
    "data.data_dir=FOLDER/file",
]

# Arguments after a good --config and --workdir (None: without these), and what stderr must contain.
COMMANDS = [
    (["--config.modle.widht=5"], "did you mean 'model'"),
    (["--config.modle.width=5"], "did you mean --config.model.width"),
    (["--config.image_size=5"], "no field 'image_size'; did you mean --config.data.image_size"),
    (
        ["--config.name=swin"],
        "did you mean --config.attention_init.name or --config.data.name or --config.model.name",
    ),
    (["--config.model.widht=5"], "did you mean 'width'"),
    (["--config.attention_init.kernel=5"], "did you mean 'kernel_size'"),
    (["--config.attention_init=None"], "attention_init=None must be a dict"),
    (["--config.augment=None"], "augment=None must be a dict"),
    (["--config.attention_init.filters=sobel"], "filters='sobel'"),
    (["--config.data.name=digitz"], "'digits'"),
    (["--config.data.name=cifar10"], "python -m structinit_jax.data.prepare --name=cifar10"),
    (["--config.model.num_classes=5"], "--config.model.num_classes=10"),
    (["--config.attention_init={'kernel_size': 3}"], "attention_init"),
    (["--config.attention_init.name=xavier"], "attention_init.*xavier.*impulse"),
    (["--config.attention_init={'name': 'impulse', 'size': 3}"], "attention_init.*size"),
    (["--config.attention_init={'name': 'impulse', 'norm': -1.0}"], "norm=-1.0"),
    (["--config.attention_init={'name': 'impulse', 'target_mass': 2.0}"], "target_mass=2.0"),
    (["--config.attention_init={'name': 'impulse', 'kernel_size': (3, 3)}"], "kernel_size=.*layer"),
    (["--config.model.qk_norm=True"], "qk_norm"),
    (["--config.model={'name': 'vit', 'depth': 3}"], "config.model lacks .*, width"),
    (["--config.model={}"], "config.model lacks .*name"),
    (["--config.augment={'flip': 0.5, 'rotate': 1}"], "config.augment .*unknown fields rotate"),
    (["--config.model.name=vitt"], "vitt.*vit"),
    (["--config.model.name=vit_tiny_patch16_224"], "base_config.'vit_tiny_patch16_224'"),
    (["--config.model.name=swin"], "config.model lacks depths, .*unknown fields depth, "),
    # Flags.
    (["--wrokdir=x"], "wrokdir.*workdir"),
    (["--learning_rate=1"], "'learning_rate': did you mean --config.learning_rate"),
    (["-x"], "'x'"),
    (["train"], "unrecognized argument 'train'"),
    (["workdir=x"], "unrecognized argument 'workdir=x'"),
    (["--mode=test"], "--mode=test"),
    (["--dry_run=perhaps"], "--dry_run=perhaps"),
    (["--profile_steps=5"], "--profile_steps=5"),
    (["--out=x"], "'out'"),
    (["--step=best"], "--step=best .*--mode=eval"),
    (["--mode=eval", "--dry_run"], "--dry_run .*leave out --mode=eval"),
    (["--mode=eval", "--profile_steps=1:2"], "--profile_steps=1:2 .*leave out --mode=eval"),
    (["--mode=eval", "--step=last"], "--step=last must be 'newest', 'best' or"),
    # Images.
    (images("text"), "1.png.*cannot be decoded.*data.on_bad_image='skip'"),
    (images("empty"), "1.png.*cannot be decoded"),
    (images("cut_png"), "1.png.*cannot be decoded"),
    (images("cut_jpeg"), "1.jpg.*cannot be decoded"),
    (images("bomb"), "1.png.*cannot be decoded.*limit"),
    (images("no_val"), "data.eval_split='val'"),
    (images("other_class"), "val.*'b'"),
    (images("empty_class"), "train/a"),
    (images("no_class"), "train"),
    (images("no_split"), "no_split.*train, val, test"),
    (images("missing"), "missing.*no such folder"),
    (images("good", "--config.data.data_dir="), "data_dir|'folder'"),
    (images("good", "--config.model.num_classes=10"), "--config.model.num_classes=2"),
    (images("good", "--config.data.on_bad_image=ignore"), "data.on_bad_image='ignore'"),
    (
        [
            None,
            "--config=configs/vit_2025_imagenet.py",
            "--workdir=FOLDER/run",
            "--config.data.data_dir=FOLDER",
        ],
        "ILSVRC2012_img_train.tar(.|\n)*structinit_jax.data.prepare --name=imagenet2012",
    ),
    # Files and directories.
    ([None, "--workdir=x"], "--config is required"),
    ([None, "--config"], "--config"),
    ([None, "--config="], "--config=: there is no such file"),
    ([None, "--config=FOLDER"], "--config=FOLDER: there is no such file"),
    ([None, "--config=configs/nope.py"], "--config=configs/nope.py: there is no such file"),
    ([None, "--config=configs/vit_2024_small.py:stl10"], "small.py:stl10: .*'stl10'.*cifar10, "),
    (
        [None, "--config", "configs/convmixer_2024.py:convmixer_256_8,4"],
        "2024.py:convmixer_256_8,4: .*'4'.*3, 5, 8",
    ),
    ([None, f"{CONFIG}:cifar10"], "vit_t_digits.py:cifar10: .*no rows"),
    ([None, CONFIG], "--workdir is required"),
    ([None, CONFIG, "--workdir="], "--workdir is required"),
    (["--workdir=nothing://run"], "--workdir=nothing://run: use a path, gs://… or s3://…"),
    (["--mode=eval", "--workdir=nothing://run"], "--workdir=nothing://run: use a path"),
    (["--workdir=FOLDER/file"], "FOLDER/file.*File exists"),
    (["--workdir=FOLDER/file/run"], "FOLDER/file/run.*Not a directory"),
    (["--mode=eval"], "run has no complete checkpoint"),
    *(
        ([None, f"--config=FOLDER/{name}", "--workdir=x"], message)
        for name, (_, message) in CONFIG_FILES.items()
    ),
    # Several processes.
    (["--num_processes=two"], "--num_processes=two"),
    (["--num_processes=2"], "--coordinator_address and --process_id"),
    (["--process_id=0"], "--coordinator_address and --num_processes"),
    (["--coordinator_address=a:1"], "--num_processes and --process_id"),
    (
        ["--coordinator_address=host", "--num_processes=2", "--process_id=0"],
        "--coordinator_address=host",
    ),
    (
        ["--coordinator_address=a:1", "--num_processes=2", "--process_id=2"],
        "--process_id=2.*--num_processes=2",
    ),
    (["--join_timeout=0"], "--join_timeout=0"),
]
# Messages about the options of a scheme read 'config.attention_init: kernel_size=4 ...'.
ALL = [
    ([f"--config.{field}"], re.escape(field.split("=")[0]).replace("init\\.", r"init(\.|: )"))
    for field in FIELDS
] + COMMANDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Config files and folders of images that are wrong in one way each."""
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
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "pattern"), ALL, ids=[" ".join(map(str, arguments)) for arguments, _ in ALL]
)
def test_the_command_says_what_is_wrong(folder, data_dir, arguments, pattern):
    common = [CONFIG, f"--workdir={folder}/run", f"--config.data.data_dir={data_dir}"]
    arguments = arguments[1:] if arguments[0] is None else [*common, *arguments]
    arguments = [argument.replace("FOLDER", folder) for argument in arguments]
    result = fork_main.run(*arguments, timeout=60)
    assert result.returncode == 1
    assert re.search("^error: ", result.stderr, re.MULTILINE)
    assert re.search(pattern.replace("FOLDER", re.escape(folder)), result.stderr)
    assert "Traceback" not in result.stderr
