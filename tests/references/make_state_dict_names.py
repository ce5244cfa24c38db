"""Records how other projects name their parameters, and checks `interop` against them.

    cd tests
    python -m references.make_state_dict_names           # writes state_dict_names.json
    python -m references.make_state_dict_names --check   # needs structinit_jax next to torch

Made with timm 1.0.31, transformers 5.24.0, vit-pytorch 1.26.11, torchvision 0.28.0 and torch
2.13.0, whose models get random weights: nothing is downloaded. `--check` puts impulse attention
into the real models and measures the attention maps that they compute themselves.
"""

import references.import_torchvision  # noqa: F401, needed before timm

# isort: split
import json
import math
import pathlib
import sys
import tempfile

import numpy as np
import timm
import torch
import torchvision
import transformers
import vit_pytorch
from safetensors.numpy import load_file

DEPTH = 2
TIMM = {
    "timm": "vit_tiny_patch16_224",
    "timm_registers": "vit_small_patch14_reg4_dinov2",
    "timm_distilled": "deit_tiny_distilled_patch16_224",
    "timm_separate": "eva02_base_patch14_448",
    "timm_no_positions": "beit_base_patch16_224",
}
HUGGING_FACE = ("huggingface", "dinov2", "siglip", "aimv2", "internvl")
POSITIONAL = dict(
    mimetic_layers=0, target_mass=0.5, keep_positions=True, patch_scale=0.3, mlp_scale=0
)
SIZES = dict(
    hidden_size=32, num_hidden_layers=DEPTH, num_attention_heads=4, image_size=48, patch_size=8
)


def hugging_face(name):
    """Returns a small model; those whose files have other names than their modules end in _file."""
    sizes = dict(SIZES, intermediate_size=64)
    text = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=DEPTH, vocab_size=50)
    config = {
        "huggingface": lambda: transformers.ViTConfig(**sizes),
        "dinov2": lambda: transformers.Dinov2WithRegistersConfig(
            **SIZES, mlp_ratio=2, num_register_tokens=2, use_swiglu_ffn=True
        ),
        "clip": lambda: transformers.CLIPConfig(
            text_config=dict(text, num_attention_heads=4, bos_token_id=0, eos_token_id=1),
            vision_config=dict(sizes),
        ),
        "siglip": lambda: transformers.SiglipVisionConfig(**sizes),
        "aimv2": lambda: transformers.Aimv2VisionConfig(**sizes),
        "internvl": lambda: transformers.InternVLVisionConfig(
            **sizes | dict(image_size=(48, 48), patch_size=(8, 8))
        ),
        "eomt": lambda: transformers.EomtConfig(**sizes, num_blocks=1),
    }[name.removesuffix("_file")]()
    if name.startswith("huggingface"):
        return transformers.ViTForImageClassification(config)
    if name == "eomt":
        return transformers.EomtForUniversalSegmentation(config)
    if name == "internvl":
        return transformers.InternVLVisionModel(config)
    return transformers.AutoModel.from_config(config)


def torchvision_model():
    return torchvision.models.VisionTransformer(48, 8, DEPTH, 4, 32, 64)


def vit_pytorch_model(simple=False):
    sizes = dict(image_size=48, patch_size=8, num_classes=3, dim=32, depth=DEPTH, heads=4)
    family = vit_pytorch.SimpleViT if simple else vit_pytorch.ViT
    return family(**sizes, mlp_dim=64, dim_head=8)


class EncoderModel(torch.nn.Module):
    """A ViT of one's own around `torch.nn.TransformerEncoder`."""

    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 32, 8, 8)
        self.positions = torch.nn.Parameter(0.02 * torch.randn(1, 36, 32))
        layer = torch.nn.TransformerEncoderLayer(
            32, 4, 64, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = torch.nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)

    def forward(self, images):
        return self.encoder(self.patches(images).flatten(2).transpose(1, 2) + self.positions)


def shapes(state):
    return {name: list(value.shape) for name, value in state.items()}


def record():
    names = {}
    for key, model in TIMM.items():
        names[key] = shapes(timm.create_model(model, depth=DEPTH).state_dict())
    for key in ("huggingface", "dinov2", "clip", "siglip", "aimv2", "internvl", "eomt"):
        names[key] = shapes(hugging_face(key).state_dict())
    for key in ("huggingface_file", "dinov2_file"):
        with tempfile.TemporaryDirectory() as folder:
            hugging_face(key).save_pretrained(folder)
            names[key] = shapes(load_file(f"{folder}/model.safetensors"))
    names["torchvision"] = shapes(torchvision_model().state_dict())
    names["vit_pytorch"] = shapes(vit_pytorch_model().state_dict())
    names["simple_vit"] = shapes(vit_pytorch_model(simple=True).state_dict())
    names["torch_encoder"] = shapes(EncoderModel().state_dict())
    lines = ",\n".join(
        f'"{key}": {{\n' + ",\n".join(f'  "{n}": {s}' for n, s in value.items()) + "\n}"
        for key, value in names.items()
    )
    path = pathlib.Path(__file__).with_name("state_dict_names.json")
    path.write_text("{\n" + lines + "\n}\n")
    json.loads(path.read_text())


def check():
    import jax

    from structinit_jax import interop
    from structinit_jax.attention_init import impulse

    clip = hugging_face("clip")
    cases = {
        "timm": (timm.create_model(TIMM["timm"], depth=DEPTH), 3, 224),
        "timm_registers": (timm.create_model(TIMM["timm_registers"], depth=DEPTH), 6, 518),
        "timm_distilled": (timm.create_model(TIMM["timm_distilled"], depth=DEPTH), 3, 224),
        **{name: (hugging_face(name), 4, 48) for name in HUGGING_FACE},
        "torch_encoder": (EncoderModel(), 4, 48),
        "clip": (clip, 4, 48),
        "torchvision": (torchvision_model(), 4, 48),
    }
    for name, (model, heads, side) in cases.items():
        state = {key: value.numpy() for key, value in model.state_dict().items()}
        new = interop.initialize(state, impulse(**POSITIONAL), jax.random.key(0), num_heads=heads)
        model.load_state_dict({key: torch.from_numpy(value) for key, value in new.items()})
        images = torch.randn(4, 3, side, side)
        layers = interop.torch_maps(model.vision_model if model is clip else model, images)
        rates = []
        for layer in layers[:DEPTH]:
            grid = 2 * (math.isqrt(layer.shape[-1]),)
            tokens = grid[0] * grid[1]
            rates.append(interop.hit_rates(layer[..., -tokens:, -tokens:], grid).hit_rate.mean())
        print(f"{name}: hits by layer {np.round(rates, 2)}", flush=True)
        assert min(rates) > 0.5


if __name__ == "__main__":
    check() if "--check" in sys.argv else record()
