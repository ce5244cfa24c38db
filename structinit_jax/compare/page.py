"""Makes report.html, which holds the tables and figures of the report, and curves.png."""

import base64
import html as html_lib
import io
from collections.abc import Sequence

import numpy as np

from structinit_jax.analysis.drawing import add_legend, import_pyplot
from structinit_jax.compare.results import Comparison, Run

CURVES = "curves.png"
MAPS = "maps.png"  # of each setting
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em;
       color: #222; background: #fff }
h2 { margin-top: 2em }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3em .9em .3em 0; border-bottom: 1px solid #ccc;
         vertical-align: top }
th { font-weight: 600; border-bottom: 2px solid #888 }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto; font-size: 14px }
img { max-width: 100% }
figure { margin: 1em 0 }
"""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")
DASHES = ("-", "--", ":", "-.")


def html(comparison: Comparison, sections) -> str:
    """Returns the page. It needs neither a network nor JavaScript.

    Args:
      comparison: The runs, for the figures.
      sections: See `report.describe`; the figures follow the first two.
    """
    parts = [_section(*section) for section in sections[:2]]
    if has_curves(comparison):
        curves = draw_all_curves(comparison)
        parts += ["<h2>Curves</h2>", _image(curves, "svg+xml", "Curves over training")]
        parts.append(
            "<p>Lines are means over the finished seeds, bands one standard deviation on either "
            "side.</p>"
        )
    parts += _maps(comparison)
    parts += [_section(*section) for section in sections[2:]]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>Comparison</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>Comparison</h1>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _section(title, content):
    escape = html_lib.escape
    text = f"<h2>{escape(title)}</h2>\n" if title else ""
    if isinstance(content, str):
        return f"{text}<p>{escape(content)}</p>"
    if isinstance(content[0], str):
        return text + "<pre>" + escape("\n".join(content)) + "</pre>"
    rows = [
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(["th"] + ["td"] * (len(content) - 1), content, strict=True)
    ]
    return f'{text}<div class="wide"><table>\n' + "\n".join(rows) + "\n</table></div>"


def _image(data: bytes, kind: str, text: str) -> str:
    code = base64.b64encode(data).decode()
    source = f"data:image/{kind};base64,{code}"
    return f'<figure><img alt="{html_lib.escape(text)}" src="{source}"></figure>'


def has_curves(comparison: Comparison) -> bool:
    """Whether a run has finished yet."""
    return any(comparison.finished(setting) for setting in comparison.runs)


def draw_test_curves(comparison: Comparison) -> bytes:
    """Draws the test accuracy by epoch, as a PNG."""
    figure, axis = import_pyplot().subplots(figsize=(7, 3.9), layout="constrained")
    _draw_bands(axis, comparison, None, by_second=False)
    axis.set(xlabel="epoch", ylabel=f"{comparison.metric}, %")
    return _finish("png", figure, axis)


def draw_all_curves(comparison: Comparison) -> bytes:
    """Draws test and train curves by epoch and by second, as an SVG."""
    train_name, train_label = _train_metric(comparison)
    figure, axes = import_pyplot().subplots(
        2, 2, figsize=(11, 7.2), sharey="row", layout="constrained"
    )
    for row, name in enumerate([None, train_name]):
        for column, by_second in enumerate([False, True]):
            _draw_bands(axes[row, column], comparison, name, by_second=by_second)
    axes[0, 0].set_ylabel(f"{comparison.metric}, %")
    axes[1, 0].set_ylabel(train_label)
    for column, label in enumerate(["epoch", "seconds of training"]):
        axes[1, column].set_xlabel(label)
    return _finish("svg", figure, *axes.flat)


def _draw_bands(axis, comparison, name, *, by_second):
    for number, setting in enumerate(comparison.runs):
        style = dict(
            color=COLORS[number % len(COLORS)],
            linestyle=DASHES[number // len(COLORS) % len(DASHES)],
        )
        _band(axis, comparison.finished(setting), name, by_second, setting, style)


def _finish(kind, figure, *axes):
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    add_legend(figure, handles, labels, "outside upper left", 3, frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=150)
    import_pyplot().close(figure)
    return file.getvalue()


def _train_metric(comparison):
    """Returns the name of the training accuracy if all runs log it, else that of the loss."""
    runs = [run for setting in comparison.runs for run in comparison.finished(setting)]
    for name, label in {
        "train_eval/accuracy": "train accuracy without augmentation, %",
        "train/accuracy": "train accuracy, %",
    }.items():
        if all(run.curve(name) for run in runs):
            return name, label
    return "train/loss", "train loss"


def _band(axis, runs: Sequence[Run], name, by_second, label, style):
    """Draws the mean and the standard deviation of a metric over the steps that all runs have."""
    curves = [(run, run.curve(name) if name else run.test_curve) for run in runs]
    curves = [(run, curve) for run, curve in curves if curve]
    if not curves:
        return
    steps = sorted(set.intersection(*(set(curve) for _, curve in curves)))
    unit = 1 if name == "train/loss" else 100
    values = unit * np.array([[curve[step] for step in steps] for _, curve in curves])
    place = Run.seconds if by_second else Run.epoch
    x = np.mean([[place(run, step) for step in steps] for run, _ in curves], axis=0)
    mean = values.mean(axis=0)
    marker = "o" if len(steps) == 1 else None  # a line through one point is not seen
    axis.plot(x, mean, label=label, linewidth=1.6, marker=marker, **style)
    if len(curves) > 1:
        deviation = values.std(axis=0, ddof=1)
        axis.fill_between(x, mean - deviation, mean + deviation, alpha=0.15, color=style["color"])


def _maps(comparison: Comparison) -> list[str]:
    """Shows the attention of each setting's first seed before and after training."""
    parts = []
    for setting in comparison.runs:
        path = comparison.workdir / setting / MAPS
        if path.exists():
            title = f"Maps of {setting} before and after training"
            parts += [
                f"<h3>{html_lib.escape(setting)}</h3>",
                _image(path.read_bytes(), "png", title),
            ]
    if not parts:
        return []
    text = (
        "<p>Attention of each head by offset from the query token, as a mean over training images "
        "(of an MLP-Mixer the sensitivity of an output token), or the filters of a ConvMixer, "
        "before and after the training of the first seed. Every setting has its own color scale."
        "</p>"
    )
    return ["<h2>Maps</h2>", text, *parts]
