"""ViTs on CIFAR-10, CIFAR-100 and SVHN: tables 2, 3, 5 and 7 of the 2024 paper.

    python -m structinit_jax.main --config=configs/vit_2024_small.py:cifar100,vit_small_patch2_32 \
        --workdir=DIR

Paper: "Structured Initialization for Attention in Vision Transformers" (2024), section 5.2. Pass
the row after a colon: the data set, cifar10, cifar100 or svhn_cropped; then the model,
vit_tiny_patch2_32 (the default), vit_tiny_h8_patch2_32, vit_small_patch2_32,
vit_small_h16_patch2_32, or of depth 8 vit_wD_hH_patch2_32 with width D of 64, 128, 256 or 512 and
H of 4, 8, 16 or 32 heads. The initializations of the tables:

    impulse-3          no flag; the paper's scheme, `impulse_2024`
    impulse-5          --config.attention_init.kernel_size=5
    mimetic            --config.attention_init.name=mimetic
    truncated normal   --config.attention_init.name=default
    Kaiming uniform    --config.attention_init.name=kaiming_uniform
    ours               --config.attention_init.name=impulse

Hardware: one GPU. Time: not measured.
Accuracy to expect (published, top-1 in percent; not run here):

    ViT-T, ViT-S        CIFAR-10  SVHN    CIFAR-100
    width, heads        T/h3      T/h3    T/h3    T/h8    S/h6    S/h16
    impulse-3           91.62     97.21   68.81   70.79   75.97   75.40
    impulse-5           90.67     97.23   70.46   70.86   73.49   74.27
    mimetic             91.16     97.53   70.40   69.93   73.86   72.72
    truncated normal    88.63     93.20   66.50   66.48   66.81   67.25
    Kaiming uniform     86.36     94.51   63.50   63.09   66.06   64.61

    depth 8, CIFAR-10   width 64                       width 128
    heads               4      8      16     32        4      8      16     32
    impulse-3           82.73  84.12  81.59  79.39     88.49  87.75  87.63  84.42
    impulse-5           83.43  82.66  80.80  79.11     87.82  88.02  87.57  84.79
    mimetic             84.59  82.78  81.78  79.71     87.90  87.49  85.51  83.68
    truncated normal    81.57  82.12  81.57  80.40     86.19  86.00  85.39  84.37
    Kaiming uniform     81.26  80.76  80.71  79.89     84.46  83.83  83.05  82.70

    depth 8, CIFAR-10   width 256                      width 512
    heads               4      8      16     32        4      8      16     32
    impulse-3           89.95  90.67  90.59  88.69     91.55  91.75  91.49  91.18
    impulse-5           90.08  90.38  90.61  89.14     90.92  91.67  91.87  90.84
    mimetic             90.52  89.45  88.97  86.83     90.94  90.75  90.35  89.27
    truncated normal    87.27  87.10  87.30  86.71     87.49  87.03  87.74  87.39
    Kaiming uniform     85.71  85.16  84.62  84.24     87.28  86.50  85.07  84.17
"""

from structinit_jax.config import base_config, parse_row

NUM_CLASSES = {"cifar10": 10, "cifar100": 100, "svhn_cropped": 10}
DEPTH_8 = [f"vit_w{d}_h{h}_patch2_32" for d in (64, 128, 256, 512) for h in (4, 8, 16, 32)]
COLUMNS = {
    "data set": tuple(NUM_CLASSES),
    "model": (
        "vit_tiny_patch2_32",
        "vit_tiny_h8_patch2_32",
        "vit_small_patch2_32",
        "vit_small_h16_patch2_32",
        *DEPTH_8,
    ),
}


def get_config(row=""):
    dataset, model = parse_row(row, COLUMNS)
    config = base_config(model)
    config.num_epochs = 200.0
    config.batch_size = 512
    config.learning_rate = 1e-3
    config.warmup_epochs = 10.0
    config.final_learning_rate = 1e-6
    config.weight_decay = 0.01
    config.adam_epsilon = 1e-3
    config.clip_norm = 3.0
    config.eval_every_epochs = 10.0

    config.model.num_classes = NUM_CLASSES[dataset]
    config.model.positions = "sincos"
    config.model.pool = "mean"
    config.attention_init.name = "impulse_2024"

    config.augment.flip = 0.5
    config.augment.rand_augment = "rand-m9-mstd0.5-inc1"

    config.data.name = dataset
    config.data.image_size = 32
    return config
