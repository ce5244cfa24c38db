"""Swin and MLP-Mixer on small data sets: "Structured Initialization for ViTs" (2025), table 3.

    python -m structinit_jax.main --workdir=DIR \
        --config=configs/swin_mixer_2025_small.py:cifar10,swin_tiny_patch4_window7_224

Pass the row after a colon: the data set, cifar10, cifar100, stl10, oxford_flowers102,
oxford_iiit_pet or food101; then the model, swin_tiny_patch4_window7_224 (the default),
swin_base_patch4_window7_224, mixer_s16_224 or mixer_b16_224. The paper trains its Mixer on CIFAR-10
only; its size is not known to us.

The paper's closed form is for attention with positions; we do not know how the authors applied it
to these two families. The scheme here is our own: `impulse` in Swin's relative position bias
and in Mixer's token-mixing MLPs. Others: --config.attention_init.name=default, mimetic or
kaiming_uniform. The recipe is that of vit_2025_small.py, except that
all three start from timm's base initialization (`model.base_init`), since we do not know which one
the authors used here.

Hardware: one GPU or more. Time: not measured.
Accuracy to expect: the published figures are in the paper. Not run here.
"""

from structinit_jax.config import base_config, parse_row

# Data set -> number of classes, training split, test split.
DATASETS = {
    "cifar10": (10, "train", "test"),
    "cifar100": (100, "train", "test"),
    "stl10": (10, "train", "test"),
    "oxford_flowers102": (102, "train+validation", "test"),
    "oxford_iiit_pet": (37, "train", "test"),
    "food101": (101, "train", "validation"),
}
COLUMNS = {
    "data set": tuple(DATASETS),
    "model": (
        "swin_tiny_patch4_window7_224",
        "swin_base_patch4_window7_224",
        "mixer_s16_224",
        "mixer_b16_224",
    ),
}


def get_config(row=""):
    dataset, model = parse_row(row, COLUMNS)
    num_classes, train_split, eval_split = DATASETS[dataset]
    config = base_config(model)
    config.num_epochs = 300.0
    config.batch_size = 512
    config.label_smoothing = 0.1
    config.schedule = "timm_cosine"
    config.learning_rate = 2e-3
    config.warmup_epochs = 50.0
    config.warmup_learning_rate = 1e-6
    config.final_learning_rate = 1e-6
    config.weight_decay = 0.05
    config.clip_norm = 0.0
    config.eval_every_epochs = 10.0

    config.attention_init = dict(name="impulse", kernel_size=3)
    config.model.num_classes = num_classes
    config.model.drop_path = 0.1
    config.model.dtype = "bfloat16"

    config.augment.crop = "resized"
    config.augment.flip = 0.5
    config.augment.rand_augment = "rand-m9-mstd0.5-inc1"  # color jitter has no effect beside it
    config.augment.erasing = 0.25
    config.augment.erase_after_mixing = True
    config.augment.mixup = 0.8
    config.augment.cutmix = 1.0
    config.augment.mix_group = 64  # one lambda for the images of one process, as in the program

    config.data.name = dataset
    config.data.train_split = train_split
    config.data.eval_split = eval_split
    config.data.drop_remainder = True
    config.data.image_size = 224
    config.data.crop_fraction = 0.875
    return config
