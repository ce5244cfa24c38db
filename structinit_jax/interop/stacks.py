"""Finds the attention layers of another project's model by their names."""

import dataclasses
import re
from collections.abc import Iterable

from structinit_jax.errors import InputError
from structinit_jax.interop.entries import Entry, linear_bias
from structinit_jax.interop.layouts import FIELDS, LAYOUTS, Layout, Leaves, join

NUMBER = re.compile(r"(?<!\d)\d+(?=\.|$)")  # at the end of a part of a name
OTHERWISE = (
    "Rename them for the call, or describe the layers with an AttentionSite and place the arrays "
    "that the scheme returns for it"
)


@dataclasses.dataclass(frozen=True)
class Stack:
    """A model's stack of equal attention layers.

    Attributes:
      layout: The names of its parts.
      stem: Prefix of all names of the model.
      attentions: Name of every layer in order, or the only name if `stacked`.
      stacked: Whether the arrays have a leading layer axis.
    """

    layout: Layout
    stem: str
    attentions: tuple[str, ...]
    stacked: bool

    def entries(self, leaves: Leaves, path: str) -> list[Entry]:
        """Maps the weights and the existing biases of all layers, as `Layout.entries` does."""
        entries: list[Entry] = []
        for i, attention in enumerate(self.attentions):
            layer = None if self.stacked else i
            entries += self.layout.entries(attention, path, layer)
            for field, bias in self.layout.separate_biases.items():
                name = join(attention, bias)
                entries.append(linear_bias(name, f"{path}/{field}", layer=layer))
        return [entry for entry in entries if entry.name in leaves]


def find_stack(leaves: Leaves, name: str | None) -> Stack:
    """Finds the attention layers of a model with a single grid of tokens.

    Raises:
      InputError: As for `find_stacks`; or a layer is incomplete; or the model has several stacks,
        and not exactly one of them sees images.
    """
    stacks = find_stacks(leaves, name)
    if len(stacks) > 1:
        stacks = [stack for stack in stacks if _sees_images(leaves, stack)] or stacks
    if len(stacks) > 1:
        found = "; ".join(f"{len(s.attentions)} × {s.attentions[0]}" for s in stacks)
        raise InputError(
            f"params hold several stacks ({found}): pass the subtree of one. Only `initialize` "
            "takes a model with stages as a whole, and only if every layer has a "
            "relative_position_bias_table, as in Swin"
        )
    check_stack(leaves, stacks[0])
    return stacks[0]


def find_stacks(leaves: Leaves, name: str | None) -> list[Stack]:
    """Finds the attention layers by their names.

    Args:
      leaves: The parameters by name.
      name: A key of `LAYOUTS`, or None to try them all.

    Returns:
      The stacks of the first layout that fits.

    Raises:
      InputError: The layout is unknown, or none fits.
    """
    if name is not None and name not in LAYOUTS:
        raise InputError(f"layout={name!r} is unknown: choose one of {', '.join(LAYOUTS)}")
    names = LAYOUTS if name is None else [name]
    for n in names:
        for layout in LAYOUTS[n]:
            if stacks := _stacks(leaves, layout):
                return stacks
    argument = "layout" if name is None else f"layout={name!r}"
    known = "; ".join(f"{n} ({LAYOUTS[n][0].example})" for n in names)
    similar = [n for n in leaves if re.search(r"att|qkv|query|q_proj|in_proj", n, re.IGNORECASE)]
    looks = " that look like attention" if similar else ""
    raise InputError(
        f"{argument}: params have no attention layers named as in {known}. Their names{looks}: "
        f"{_abbreviate(similar or list(leaves))}. {OTHERWISE}"
    )


def _abbreviate(names: list[str]) -> str:
    return ", ".join(names[:6] + (["…"] if len(names) > 6 else [])) or "none"


def _stacks(leaves: Leaves, layout: Layout) -> list[Stack]:
    numbered, single = [], []
    for stem, layers in _attentions(leaves, layout):
        attentions = tuple(layers[index] for index in sorted(layers))
        query = leaves.get(layout.weight(attentions[0], "query"))
        rank = len(getattr(query, "shape", (0, 0, 0)))
        if layout.torch or rank == 3:
            stacks = single if min(layers) < 0 else numbered
            stacks.append(Stack(layout, stem, attentions, stacked=False))
        elif rank == 4:
            numbered += [Stack(layout, stem, (name,), stacked=True) for name in attentions]
    # A single attention next to numbered ones pools tokens.
    return numbered or single


def _sees_images(leaves: Leaves, stack: Stack) -> bool:
    pattern = re.compile(re.escape(stack.stem) + rf"(?:{'|'.join(stack.layout.patches)})\.\w+")
    return any(pattern.fullmatch(name) for name in leaves)


def _attentions(leaves: Leaves, layout: Layout) -> list[tuple[str, dict[int, str]]]:
    """Returns, per group of names that differ in one number, the stem and the names by number."""
    matches: dict[str, re.Match] = {}
    for suffix in dict.fromkeys(layout.weight("", field) for field in layout.anchors):
        for name in leaves:
            attention = ("." + name).removesuffix("." + suffix)[1:]
            if attention != name and (match := re.fullmatch(layout.attention, attention)):
                matches[attention] = match
    if "index" in re.compile(layout.attention).groupindex:
        spans = {name: match.span("index") for name, match in matches.items()}
    else:
        spans = _number_spans(matches)
    groups: dict[tuple[str, str], tuple[str, dict[int, str]]] = {}
    for attention, (start, end) in spans.items():
        index = int(attention[start:end]) if end > 0 else -1  # there is none
        around = (attention[:start], attention[end:]) if end > 0 else (attention, "")
        groups.setdefault(around, (matches[attention]["stem"], {}))[1][index] = attention
    return list(groups.values())


def _number_spans(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Returns where each name has its layer number, (-1, -1) if it has no number.

    It is the last number in which otherwise equal names differ.
    """
    groups: dict[str, dict[str, list[re.Match]]] = {}
    for name in names:
        groups.setdefault(NUMBER.sub("#", name), {})[name] = [*NUMBER.finditer(name)]
    spans = {}
    for group in groups.values():
        columns = list(zip(*group.values(), strict=True))
        differing = [i for i, column in enumerate(columns) if len({n[0] for n in column}) > 1]
        column = (differing or range(len(columns)))[-1] if columns else None
        for name, numbers in group.items():
            spans[name] = (-1, -1) if column is None else numbers[column].span()
    return spans


def check_stack(leaves: Leaves, stack: Stack) -> None:
    """Raises `InputError` if a layer lacks one of its projections."""
    for attention in stack.attentions:
        for field in FIELDS:
            name = stack.layout.weight(attention, field)
            if name not in leaves:
                prefix = f"{attention}." if attention else ""
                leaf = f".{stack.layout.leaf}"
                held = [n for n in leaves if n.startswith(prefix) and n.endswith(leaf)]
                raise InputError(
                    f"params: {attention or 'the attention layer'} has no {name}, only "
                    f"{_abbreviate(held)}. {OTHERWISE}"
                )
