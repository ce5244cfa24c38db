"""ViT-B/16 on ImageNet-1K: "Structured Initialization for Vision Transformers" (NeurIPS 2025).

    python -m structinit_jax.main --config=configs/vit_b_imagenet.py --workdir=DIR \
        --config.data.data_dir=DIR

The paper's optimizer and schedule: 300 epochs and 10 more at the final rate, batch 1024. The paper
reports 81.83 % top-1 with impulse, 81.24 % with default and 80.56 % with mimetic initialization,
with augmentation that this package does not have yet. Hardware: 8 or more data-centre GPUs or TPUs.
"""

from structinit_jax.config import base_config


def get_config():
    config = base_config("vit_base_patch16_224")
    config.batch_size = 1024
    config.num_epochs = 310.0
    config.learning_rate = 5e-4 * config.batch_size / 512
    config.warmup_epochs = 5.0
    config.warmup_learning_rate = 1e-6
    config.final_learning_rate = 1e-5
    config.cooldown_epochs = 10.0
    config.weight_decay = 0.05
    config.clip_norm = 0.0
    config.label_smoothing = 0.1
    config.eval_every_epochs = 5.0
    config.checkpoint_every_steps = 1250
    config.log_every_steps = 50

    config.model.drop_path = 0.1
    config.model.dtype = "bfloat16"

    config.data.name = "imagenet2012"
    config.data.eval_split = "validation"
    config.data.crop_fraction = 0.875
    return config
