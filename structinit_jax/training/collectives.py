"""Counts the bytes that devices exchange in a compiled program, from its HLO text."""

import collections
import math
import re

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)")
_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf"({_KINDS})(-start)?")
_ARRAY = re.compile(r"\b(pred|[a-z]+?(\d+)\w*)\[([\d,]*)\]")
_CALL = re.compile(r"(?:body|to_apply|calls|\w+_computation)=%([\w.\-]+)")


def bytes_by_kind(hlo: str) -> dict[str, int]:
    """Sums the arrays of the collectives that one device runs, by kind, such as 'all-reduce'.

    An all-gather counts with its result, the others with their operands, and a collective in a loop
    as often as the loop runs. TPU programs do not say how often: there it is the counter's bound.
    """
    totals = collections.defaultdict(collections.Counter)  # by computation; called ones come first
    sizes, bounds, channels, computation = {}, {}, set(), ""
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        if not (match := _INSTRUCTION.search(line)):
            continue
        name, type_, op, operands = match.groups()
        sizes[name] = _num_bytes(type_)
        if op == "constant" and operands.isdigit():
            bounds[computation] = int(operands)  # if the computation is the condition of a loop
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
        condition = re.search(r"condition=%([\w.\-]+)", line)
        times = int(known[1]) if known else bounds.get(condition and condition[1], 1)
        for called in _CALL.findall(line):
            totals[computation].update({k: times * n for k, n in totals[called].items()})
        if match := _COLLECTIVE.fullmatch(op):
            kind, start = match.groups()
            channel = re.search(r"channel_id=\d+", line)
            if channel and channel[0] in channels:
                continue  # TPU programs repeat a collective in all computations it overlaps with
            channels.add(channel and channel[0])
            size = sum(sizes[operand] for operand in re.findall(r"%([\w.\-]+)", operands))
            if kind == "all-gather":  # its start returns the operands, too
                size = sizes[name] - (size if start else 0)
            if computation.startswith("all-reduce-scatter"):  # in TPU programs, and a slice
                kind = "reduce-scatter"
            totals[computation][kind] += size
    return totals[computation]


def _num_bytes(type_):
    """Returns the bytes of a type in HLO, such as '(f32[2,3], bf16[])'."""
    return sum(
        (1 if name == "pred" else math.ceil(int(bits) / 8))
        * math.prod(int(size) for size in shape.split(",") if size)
        for name, bits, shape in _ARRAY.findall(type_)
    )
