"""What the devices exchange in a compiled program, read from its text."""

import math
import re
from typing import NamedTuple

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (?P<result>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_CALL = re.compile(r"(?:body|to_apply|calls|\w+_computation)=%?([\w.\-]+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_LIMIT = re.compile(r"= [su]32\[\]\S* constant\((\d+)\)")


class Traffic(NamedTuple):
    """Bytes that one device receives.

    Attributes:
      total: All of them.
      overlapped: Those that it receives while it computes.
    """

    total: int
    overlapped: int


def traffic_by_kind(hlo: str) -> dict[str, Traffic]:
    """Sums what one device receives in the collectives of a compiled program.

    Args:
      hlo: Text of the program, from `compiled.as_text()`.

    Returns:
      Traffic by HLO instruction, for example 'all-reduce'. A collective in a loop counts as often
      as it runs, and once if the length of the loop is unknown.
    """
    callers = {}  # name of a computation: the one that calls it, and in which line
    limits = {}  # name of a computation: an integer in it, which ends the loop of a condition
    found = {}  # by channel, since a TPU program repeats a collective that is fused with others
    name = ""
    for number, line in enumerate(hlo.splitlines()):
        if match := _COMPUTATION.match(line):
            name = match[1]
        if match := _LIMIT.search(line):
            limits[name] = int(match[1])
        callers |= dict.fromkeys(_CALL.findall(line), (name, line))
        if match := _COLLECTIVE.search(line):
            channel = _CHANNEL.search(line)
            found.setdefault(channel[1] if channel else -number, []).append((name, match))

    def repeats(name):
        if name not in callers:
            return 1
        caller, line = callers[name]
        known, condition = _TRIP_COUNT.search(line), _CONDITION.search(line)
        times = int(known[1]) if known else limits.get(condition and condition[1], 1)
        return times * repeats(caller)

    traffic = {}
    for copies in found.values():
        name, match = copies[0]
        num_bytes = _num_bytes(match) * repeats(name)
        starts_elsewhere = "async-start" in callers.get(name, ("", ""))[1]
        overlapped = bool(match["start"]) or starts_elsewhere or len(copies) > 1
        total, hidden = traffic.get(match["kind"], (0, 0))
        traffic[match["kind"]] = Traffic(total + num_bytes, hidden + overlapped * num_bytes)
    return traffic


def describe(hlo: str) -> str:
    """Formats the traffic, for example 'all-reduce 330 MiB (40% overlapped)'."""
    return ", ".join(
        f"{kind} {total / 2**20:,.0f} MiB ({overlapped / total:.0%} overlapped)"
        for kind, (total, overlapped) in traffic_by_kind(hlo).items()
        if total
    )


def _num_bytes(collective: re.Match) -> int:
    sizes = []
    for letters, bits, shape in _ARRAY.findall(collective["result"]):
        item = 1 if letters == "pred" else int(bits or 8) // 8
        if not (collective["start"] and letters == "u" and not shape):  # of no array: a semaphore
            sizes.append(item * math.prod(int(size) for size in shape.split(",") if size))
    if collective["start"] and collective["kind"] in ("all-gather", "collective-permute"):
        sizes = sizes[len(sizes) // 2 :]  # these asynchronous forms return their operands too
    return sum(sizes)
