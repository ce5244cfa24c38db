"""A ViT that rotates queries and keys and also has a learned position table, as EVA-02.

    PYTHONPATH=benchmarks python -m structinit_jax.compare --config=benchmarks/rope_table.py \
        --schemes=default,mimetic,impulse --grid=model.site=rotary,table --seeds=3 \
        --workdir=DIR --config.data.data_dir=IMAGES

`site` is what a scheme sees: 'rotary' positions, as with the `rotations` of `initialize`, or the
'table', as without them. IMAGES is described in configs/vit_cifar10_small.py.
"""

import runpy
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
from flax import nnx

from structinit_jax import AttentionSite, VisionTransformer, base_config
from structinit_jax.models.layers import truncated_normal

CONFIG = Path(__file__).parent.parent / "configs" / "vit_cifar10_small.py"
SIZES = dict(patch_size=4, width=96, depth=6, num_heads=6, base_init="pytorch")


class RopeTable(VisionTransformer):
    """The ViT of `vit_cifar10_small.py` with both kinds of positions."""

    def __init__(
        self,
        *,
        image_size: int = 32,
        channels: int,
        num_classes: int = 10,
        site: Literal["rotary", "table"] = "rotary",
        rngs: nnx.Rngs,
    ):
        sizes = dict(image_size=image_size, channels=channels, num_classes=num_classes)
        super().__init__(**sizes, **SIZES, positions="rope", rngs=rngs)
        table = truncated_normal(rngs.params(), (self.grid[0] * self.grid[1], self.width))
        del self.positions  # NNX regards it as static, because it was None
        self.positions = nnx.data(nnx.Param(table))
        self.site = site

    def sites(self):
        """See `Model.sites`."""
        if self.site == "rotary":
            return super().sites()
        options = dict(grid=self.grid, base_init=self.base_init, **self.blocks.sizes())
        options |= dict(positions=self.positions[...], positions_trainable=True)
        return {"blocks": AttentionSite(**options)}

    def initialize_attention(self, scheme, rng):
        """Moves the vector that all tokens share from the patch embedding to the table."""
        bias = self.patch_embedding.bias
        former = bias[...]
        weights = super().initialize_attention(scheme, rng)
        if weights["blocks"].patch_bias is not None:
            self.positions[...] = jnp.broadcast_to(bias[...], self.positions.shape)
            bias[...] = former
        return weights

    def _add_class_token_and_positions(self, patches):
        return patches + self.positions[...][None].astype(patches.dtype)


def get_config():
    """Returns the config of `vit_cifar10_small.py` with this model."""
    config = runpy.run_path(str(CONFIG))["get_config"]()
    config.model = base_config("rope_table:RopeTable").model
    return config
