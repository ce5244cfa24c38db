"""Names and shapes of other projects' parameters.

Made with timm 1.0.31, transformers 5.24.0, vit-pytorch 1.26.11, torchvision 0.28.0, MONAI 1.6.1 and
torch 2.13.0. `benchmarks/hits.py` measures attention maps in models of most of these libraries.
"""

import tempfile

import monai.networks.nets
import timm
import torch
import torchvision
import transformers
import vit_pytorch
from safetensors.numpy import load_file

TIMM = {
    "timm": "vit_tiny_patch16_224",
    "timm_registers": "vit_small_patch14_reg4_dinov2",
    "timm_distilled": "deit_tiny_distilled_patch16_224",
    "timm_separate": "eva02_base_patch14_448",
    "timm_no_positions": "beit_base_patch16_224",
}
SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=48, patch_size=8
)


def hugging_face():
    """Returns a small model for each family of transformers."""
    sizes = dict(SIZES, intermediate_size=64)
    text = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50)
    dinov2 = dict(mlp_ratio=2, num_register_tokens=2, use_swiglu_ffn=True)
    clip = transformers.CLIPConfig(
        text_config=dict(text, num_attention_heads=4, bos_token_id=0, eos_token_id=1),
        vision_config=dict(sizes),
    )
    internvl = sizes | dict(image_size=(48, 48), patch_size=(8, 8))
    eomt = transformers.EomtConfig(**sizes, num_blocks=1)
    make = transformers.AutoModel.from_config
    return {
        "huggingface": transformers.ViTForImageClassification(transformers.ViTConfig(**sizes)),
        "dinov2": make(transformers.Dinov2WithRegistersConfig(**SIZES, **dinov2)),
        "clip": make(clip),
        "siglip": make(transformers.SiglipVisionConfig(**sizes)),
        "aimv2": make(transformers.Aimv2VisionConfig(**sizes)),
        "internvl": transformers.InternVLVisionModel(transformers.InternVLVisionConfig(**internvl)),
        "eomt": transformers.EomtForUniversalSegmentation(eomt),
    }


def encoder():
    """Returns a custom ViT built around `torch.nn.TransformerEncoder`."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    model = torch.nn.Module()
    model.positions = torch.nn.Parameter(torch.zeros(1, 36, 32))
    model.patches = torch.nn.Conv2d(3, 32, 8, 8)
    model.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model


def make():
    """Names and shapes of the parameters of each model."""
    models = {key: timm.create_model(name, depth=2) for key, name in TIMM.items()} | hugging_face()
    models["torchvision"] = torchvision.models.VisionTransformer(48, 8, 2, 4, 32, 64)
    sizes = dict(image_size=48, patch_size=8, num_classes=3, dim=32, depth=2, heads=4)
    for key, family in dict(vit_pytorch=vit_pytorch.ViT, simple_vit=vit_pytorch.SimpleViT).items():
        models[key] = family(**sizes, mlp_dim=64, dim_head=8)
    models["torch_encoder"] = encoder()
    sizes = dict(hidden_size=32, mlp_dim=64, num_layers=2, num_heads=4, spatial_dims=2)
    models["monai"] = monai.networks.nets.ViT(3, (48, 48), (8, 8), **sizes, classification=True)
    states = {key: model.state_dict() for key, model in models.items()}
    for key in ("huggingface", "dinov2"):  # names differ between their files and modules
        with tempfile.TemporaryDirectory() as folder:
            models[key].save_pretrained(folder)
            states[f"{key}_file"] = load_file(f"{folder}/model.safetensors")
    return {
        key: {name: list(value.shape) for name, value in state.items()}
        for key, state in states.items()
    }
