import jax
import numpy as np
import pytest
import references
from flax import nnx

from structinit_jax import attention_init
from structinit_jax.models import FAMILIES, create_model, default_config
from structinit_jax.models.timm import to_timm

REFERENCE = references.load("base_init")
SIZES = {
    "vit": dict(width=128, depth=1, num_heads=4, positions="learned", pool="class_token"),
    "swin": dict(width=64, depths=(1, 1), num_heads=(8, 16), window_size=8),
    "mixer": dict(width=128, depth=1),
    "convmixer": dict(width=128, depth=1, kernel_size=5),
}


@pytest.mark.parametrize("base_init", ["timm", "pytorch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_are_distributed_as_timms(family, base_init):
    options = default_config(family) | SIZES[family]
    options |= dict(image_size=32, patch_size=4, num_classes=200, base_init=base_init)
    model = create_model(options, channels=3, rngs=nnx.Rngs(params=1))
    check(to_timm(model), family, base_init)
    model.initialize_attention(attention_init.default(), jax.random.key(0))
    check(to_timm(model), family, base_init)


def check(values, family, base_init):
    prefix = f"{family} {base_init}/"
    if family == "vit":
        assert values["cls_token"].any() == (base_init == "timm")
        assert abs(values["pos_embed"].std() - 0.02) < 0.002
    names, statistics = REFERENCE[prefix + "names"], REFERENCE[prefix + "statistics"]
    assert set(names) | {"cls_token", "pos_embed"} >= {
        name for name in values if "running" not in name and "num_batches" not in name
    }
    for name, (mean, std, largest) in zip(names, statistics, strict=True):
        ours, count = values[name], values[name].size
        # Five standard errors of the difference between two sample means.
        assert abs(ours.mean() - mean) <= 5 * std * (2 / count) ** 0.5, name
        assert abs(ours.std() - std) <= 5 * std * count**-0.5, name
        uniform = largest < 1.8 * std
        tolerance = 10 / count if uniform else 0.5
        assert abs(np.abs(ours).max() - largest) <= tolerance * largest, name
