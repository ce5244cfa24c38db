"""Counts the bytes that devices exchange in a compiled CPU program, from its HLO text."""

import collections
import math
import re

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (?P<result>.*?) (?P<kind>{_KINDS})\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+?(\d+)\w*)\[([\d,]*)\]")
_CALL = re.compile(r"(?:body|to_apply|calls|\w+_computation)=%?([\w.\-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def bytes_by_kind(hlo: str) -> dict[str, int]:
    """Sums the results of the collectives that one device runs, by kind, such as 'all-reduce'.

    A collective in a loop counts as often as it runs.
    """
    callers = {}  # name of a computation -> the one that calls it, and how often
    found, name = [], ""
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[1]
        known = _TRIP_COUNT.search(line)
        for called in _CALL.findall(line):
            callers[called] = name, int(known[1]) if known else 1
        if match := _COLLECTIVE.search(line):
            found.append((name, match["kind"], _num_bytes(match["result"])))

    def repeats(name):
        caller, times = callers.get(name, (None, 1))
        return times if caller is None else times * repeats(caller)

    totals = collections.Counter()
    for name, kind, num_bytes in found:
        totals[kind] += num_bytes * repeats(name)
    return totals


def _num_bytes(type_: str) -> int:
    """Returns the bytes of a type in HLO, such as '(f32[2,3], bf16[])'."""
    return sum(
        (1 if name == "pred" else math.ceil(int(bits) / 8))
        * math.prod(int(size) for size in shape.split(",") if size)
        for name, bits, shape in _ARRAY.findall(type_)
    )
