"""Outputs and gradients of timm's ViT with random weights.

Biases, norms, scales and tokens are moved off their initial values, so that each has an effect.
"""

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

SMALL = dict(patch_size=4, num_classes=5, embed_dim=16, depth=2, num_heads=2)
CASES = {
    "class_token": dict(img_size=(8, 12)),
    "mean": dict(img_size=(8, 8), class_token=False, global_pool="avg"),
    "layer_scale": dict(img_size=(8, 8), init_values=0.1),
}
# As in timm's `vit_small_patch16_rope_224`.
ROPE = dict(
    attn_type="rope",
    use_abs_pos_emb=False,
    use_rot_pos_emb=True,
    rope_grid_indexing="xy",
    rope_temperature=100.0,
)
ROPE_CASES = {
    "rope_class_token": dict(img_size=(8, 12), global_pool="token", init_values=0.1),
    "rope_mean": dict(img_size=(8, 8), class_token=False),
}


def record(name, options):
    torch.manual_seed(0)
    if name in ROPE_CASES:
        model = Eva(**SMALL, **ROPE, **options).eval()
    else:
        model = VisionTransformer(**SMALL, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    images = torch.randn(2, 3, *options["img_size"], requires_grad=True)
    blocks = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: blocks.append(output.detach()))
    logits = model(images)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([1, 3]))
    loss.backward()
    arrays = {
        "images": images.detach().permute(0, 2, 3, 1),
        "logits": logits.detach(),
        "blocks": torch.stack(blocks),
        "image_gradient": images.grad.permute(0, 2, 3, 1),
    }
    arrays |= {f"state/{k}": v.detach() for k, v in model.state_dict().items()}
    arrays |= {f"gradient/{k}": v.grad for k, v in model.named_parameters()}
    return {f"{name}/{k}": v.numpy() for k, v in arrays.items()}


def load_at_another_resolution(state_dict):
    """Outputs of the 'layer_scale' model for images of 12 instead of 8 pixels."""
    options = CASES["layer_scale"] | dict(img_size=12, num_classes=0)
    model = VisionTransformer(**SMALL | options).eval()
    state_dict = {k: v for k, v in state_dict.items() if not k.startswith("head.")}
    model.load_state_dict(checkpoint_filter_fn(state_dict, model))
    images = torch.randn(2, 3, 12, 12)
    return {
        "larger_images/images": images.permute(0, 2, 3, 1).numpy(),
        "larger_images/pooled": model(images).detach().numpy(),
    }


def make():
    """All arrays by name."""
    arrays = {}
    for name, options in CASES.items():
        arrays |= record(name, options)
    start = "layer_scale/state/"
    state_dict = {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}
    arrays |= load_at_another_resolution({k: torch.tensor(v) for k, v in state_dict.items()})
    for name, options in ROPE_CASES.items():
        arrays |= record(name, options)
    return arrays
