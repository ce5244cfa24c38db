"""What devices send to one another in a compiled program, read from its HLO text."""

import collections
import re
from typing import NamedTuple

import numpy as np

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (.*?) ({_KINDS})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_CALL = re.compile(r"(?:body|to_apply|calls|\w+_computation)=%?([\w.\-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


class Collective(NamedTuple):
    """One exchange between devices.

    Attributes:
      kind: such as 'all-reduce'.
      num_bytes: of its result on one device.
      repeats: how often it runs, inside of loops; None where the loop's length is not known.
      origin: the JAX operation that it comes from.
    """

    kind: str
    num_bytes: int
    repeats: int | None
    origin: str


def find_collectives(hlo: str) -> list[Collective]:
    """All exchanges of a program, those of a loop's body with their number.

    Args:
      hlo: its text, from `compiled.as_text()`.
    """
    computations = _split(hlo)
    callers = {}  # of each computation: (the computation that calls it, how often)
    for name, lines in computations.items():
        for line in lines:
            for callee in _CALL.findall(line):
                is_loop = " while(" in line
                trips = _TRIP_COUNT.search(line)
                callers[callee] = (name, int(trips[1]) if trips else None if is_loop else 1)

    def repeats(name: str) -> int | None:
        if name not in callers:
            return 1
        caller, times = callers[name]
        outer = repeats(caller)
        return None if times is None or outer is None else times * outer

    return [
        Collective(match[2], _num_bytes(match), repeats(name), "".join(_OP_NAME.findall(line)[:1]))
        for name, lines in computations.items()
        for line in lines
        if (match := _COLLECTIVE.search(line))
    ]


def bytes_by_kind(hlo: str) -> dict[str, int]:
    """Bytes of all exchanges in a run of the program, by kind; unknown loops count once."""
    total = collections.Counter()
    for collective in find_collectives(hlo):
        total[collective.kind] += collective.num_bytes * (collective.repeats or 1)
    return dict(total)


def _split(text: str) -> dict[str, list[str]]:
    """The lines of each computation by its name."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            lines = computations.setdefault(match[1], [])
        lines.append(line)
    return computations


def _num_bytes(match: re.Match) -> int:
    sizes = [_array_bytes(*groups) for groups in _ARRAY.findall(match[1])]
    if match[3] and match[2] in ("all-gather", "collective-permute"):
        sizes = sizes[len(sizes) // 2 :]  # the asynchronous forms return their operands as well
    return sum(sizes)


def _array_bytes(letters: str, bits: str, shape: str) -> int:
    size = 1 if letters == "pred" else int(bits or 8) // 8
    return size * int(np.prod([int(n) for n in shape.split(",") if n], dtype=np.int64))
