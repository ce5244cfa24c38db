"""Our versions of the timm ViTs in `make_vit.py`: shared arguments and those of each case."""

SMALL = dict(patch_size=4, channels=3, num_classes=5, width=16, depth=2, num_heads=2)
CASES = {
    "class_token": dict(image_size=(8, 12), pool="class_token"),
    "mean": dict(image_size=8),
    "layer_scale": dict(image_size=8, pool="class_token", layer_scale=0.1),
    "rope_class_token": dict(
        positions="rope", image_size=(8, 12), pool="class_token", layer_scale=0.1
    ),
    "rope_mean": dict(positions="rope", image_size=8),
}
