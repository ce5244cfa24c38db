"""Records how timm and transformers name their parameters, and checks `interop` against them.

    python tests/references/make_state_dict_names.py           # writes state_dict_names.json
    python tests/references/make_state_dict_names.py --check   # needs structinit_jax beside torch

Made with timm 1.0.31, transformers 5.23.0 and torch 2.13.0, whose models get random weights:
nothing is downloaded. `--check` puts impulse attention into the real models and sets their patch
embedding to zero, so that the tokens are the positions and X = LayerNorm(P). It compares what torch
makes of them with the weights in JAX: the attention maps of its projections, and the output of its
attention modules, which split into heads themselves. Largest differences seen: 7e-6 and 3e-6.
"""

import contextlib
import json
import pathlib
import sys
import tempfile

import torch

# timm imports torchvision, whose compiled operators need not fit this torch: it uses none of them.
with contextlib.suppress(RuntimeError):  # where they are defined already
    _library = torch.library.Library("torchvision", "DEF")
    for _schema in ("nms(Tensor d, Tensor s, float t) -> Tensor", "qnms(Tensor d) -> Tensor"):
        _library.define(_schema)

import numpy as np
import timm
import transformers
from safetensors.numpy import load_file

DEPTH = 2
TIMM = {
    "timm": "vit_tiny_patch16_224",
    "timm_registers": "vit_small_patch14_reg4_dinov2",
    "timm_distilled": "deit_tiny_distilled_patch16_224",
    "timm_separate": "eva02_base_patch14_448",
    "timm_no_positions": "beit_base_patch16_224",
}


def transformers_model():
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=48,
        patch_size=8,
    )
    return transformers.ViTForImageClassification(config)


def shapes(state):
    return {name: list(value.shape) for name, value in state.items()}


def record():
    names = {}
    for key, model in TIMM.items():
        names[key] = shapes(timm.create_model(model, depth=DEPTH).state_dict())
    model = transformers_model()
    names["huggingface"] = shapes(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        names["huggingface_file"] = shapes(load_file(f"{folder}/model.safetensors"))
    lines = ",\n".join(
        f'"{key}": {{\n' + ",\n".join(f'  "{n}": {s}' for n, s in value.items()) + "\n}"
        for key, value in names.items()
    )
    path = pathlib.Path(__file__).with_name("state_dict_names.json")
    path.write_text("{\n" + lines + "\n}\n")
    json.loads(path.read_text())


def first_input(model, norm, side):
    """What the first block's LayerNorm really gets: class token and positions."""
    seen = []
    hook = norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(torch.zeros(1, 3, side, side))
    hook.remove()
    return seen[0]


def check():
    import jax

    from structinit_jax import interop
    from structinit_jax.attention_init import impulse

    hugging_face = transformers_model()
    cases = (
        ("timm", timm.create_model(TIMM["timm"], depth=DEPTH), 3, 16),
        ("transformers", hugging_face, 4, 8),
    )
    for name, model, heads, patch in cases:
        state = {key: value.numpy() for key, value in model.state_dict().items()}
        new = interop.initialize(state, impulse(norm=1.5), jax.random.key(0), num_heads=heads)
        weights = interop.read(new, num_heads=heads)
        for key in new:  # images of any kind become tokens of zeros
            if "patch_embed" in key:
                new[key] = np.zeros_like(new[key])
        model.load_state_dict({key: torch.from_numpy(value) for key, value in new.items()})
        model.eval()
        modules = dict(model.named_modules())
        attentions = [
            modules[f"blocks.{i}.attn"] if name == "timm" else modules[f"vit.layers.{i}.attention"]
            for i in range(DEPTH)
        ]
        norms = [
            modules[f"blocks.{i}.norm1"]
            if name == "timm"
            else modules[f"vit.layers.{i}.layernorm_before"]
            for i in range(DEPTH)
        ]
        tokens = first_input(model, norms[0], patch * int(len(weights.positions) ** 0.5))[:, 1:]
        assert torch.equal(tokens[0], torch.from_numpy(np.array(weights.positions)))
        x = torch.nn.functional.layer_norm(tokens, tokens.shape[-1:], eps=1e-6)
        for layer, attention in enumerate(attentions):
            with torch.no_grad():
                if name == "timm":
                    query, key = attention.qkv(x).chunk(3, dim=-1)[:2]
                    scale = attention.scale
                    # The module's own output, from its own split into heads.
                    whole = attention(x)
                else:
                    query, key = attention.q_proj(x), attention.k_proj(x)
                    scale = (query.shape[-1] // heads) ** -0.5
                    whole = attention(x)
                    whole = whole[0] if isinstance(whole, tuple) else whole
                query, key = (
                    t.reshape(t.shape[1], heads, -1).transpose(0, 1) for t in (query, key)
                )
                torch_maps = (query @ key.transpose(-1, -2) * scale).softmax(-1).numpy()
            x_np = x[0].double().numpy()
            q, k, v, o = (np.asarray(array[layer], np.float64) for array in weights[:4])
            scores = np.einsum("nD,Dhd,Ehd,mE->hnm", x_np, q, k, x_np, optimize=True)
            maps = np.asarray(jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1))
            output = np.einsum("hnm,mD,Dhd,hdE->nE", maps, x_np, v, o, optimize=True)
            map_error = np.abs(maps - torch_maps).max()
            output_error = np.abs(output - whole[0].numpy()).max()
            print(
                f"{name} layer {layer}: maps {map_error:.1e}, output {output_error:.1e}, ", end=""
            )
            print(f"largest map entry {maps.max():.2f}, tokens {tuple(tokens.shape)}")
            assert map_error < 1e-5
            assert output_error < 1e-4


if __name__ == "__main__":
    check() if "--check" in sys.argv else record()
