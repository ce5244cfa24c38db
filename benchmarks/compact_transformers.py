"""Trains ViT-Lite of Compact Transformers, in its authors' code, after `initialize`.

    PYTHONPATH=CHECKOUT python benchmarks/compact_transformers.py IMAGES --scheme=impulse --seed=0

CHECKOUT is a clone of github.com/SHI-Labs/Compact-Transformers (commit cd11f09). IMAGES and the
recipe are those of configs/vit_cifar10_small.py; RandAugment is timm's. With --scheme=default, the
model keeps the weights that its code draws. Prints the test accuracy every 4 epochs. Needs torch,
timm, torchvision and Pillow 11 (newer versions may refuse the posterize operation of timm 1.0.31).
"""

import argparse
from pathlib import Path

import jax
import numpy as np
import torch
from PIL import Image
from src import vit
from timm.data.auto_augment import rand_augment_transform
from timm.optim import param_groups_weight_decay
from torchvision import transforms

from structinit_jax.attention_init import SCHEMES
from structinit_jax.config import load_config
from structinit_jax.data.folder import open_folder
from structinit_jax.interop import initialize
from structinit_jax.training import build

CONFIG = load_config(Path(__file__).parent.parent / "configs" / "vit_cifar10_small.py")
EVAL_BATCH = 500


class Images(torch.utils.data.Dataset):
    """The images and labels of a split, decoded once and transformed at every access."""

    def __init__(self, source, *augmentations):
        self._examples = [(Image.fromarray(image.decode()), label) for image, label in source]
        to_tensor = [transforms.ToTensor(), transforms.Normalize(CONFIG.data.mean, CONFIG.data.std)]
        self._transform = transforms.Compose([*augmentations, *to_tensor])

    def __len__(self):
        return len(self._examples)

    def __getitem__(self, index):
        image, label = self._examples[index]
        return self._transform(image), label


def build_model(scheme: str, seed: int) -> torch.nn.Module:
    """Returns a ViT-Lite with 7 layers and patches of 4 pixels, initialized with a scheme."""
    torch.manual_seed(seed)
    model = vit.vit_7_4_32()
    if scheme != "default":
        num_heads = model.classifier.blocks[0].self_attn.num_heads
        key = jax.random.key(seed)
        params = initialize(model.state_dict(), SCHEMES[scheme](), key, num_heads=num_heads)
        model.load_state_dict(params)
    return model


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: Images) -> float:
    """Returns the test accuracy in percent."""
    model.eval()
    batches = torch.utils.data.DataLoader(images, EVAL_BATCH)
    correct = sum((model(x).argmax(-1) == labels).sum().item() for x, labels in batches)
    return 100 * correct / len(images)


def main() -> None:
    """Trains one model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("images")
    parser.add_argument("--scheme", choices=sorted(SCHEMES), default="impulse")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dataset = open_folder(args.images)
    test = Images(dataset.split(CONFIG.data.eval_split))
    flip = transforms.RandomHorizontalFlip(CONFIG.augment.flip)
    options = dict(translate_const=14, img_mean=tuple(round(255 * m) for m in CONFIG.data.mean))
    rand_augment = rand_augment_transform(CONFIG.augment.rand_augment, options)
    train = Images(dataset.split(CONFIG.data.train_split), flip, rand_augment)

    model = build_model(args.scheme, args.seed)
    groups = param_groups_weight_decay(model, CONFIG.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=CONFIG.learning_rate, weight_decay=0.0)
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=CONFIG.label_smoothing)
    schedule = build.make_schedule(CONFIG, len(train))
    batches = torch.utils.data.DataLoader(train, CONFIG.batch_size, shuffle=True, drop_last=True)
    step = 0
    for epoch in range(1, round(CONFIG.num_epochs) + 1):
        model.train()
        for images, labels in batches:
            for group in optimizer.param_groups:
                group["lr"] = float(schedule.learning_rate(np.array(step)))
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.clip_norm)
            optimizer.step()
            step += 1
        if epoch % CONFIG.eval_every_epochs == 0:
            test_accuracy = accuracy(model, test)
            print(f"{args.scheme} seed {args.seed} epoch {epoch}: {test_accuracy:.2f}", flush=True)


if __name__ == "__main__":
    main()
