"""Measures how much devices exchange in a compiled program, from its HLO text."""

import math
import re
from typing import NamedTuple

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (?P<result>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+?(\d+)\w*)\[([\d,]*)\]")
_CALL = re.compile(r"(?:body|to_apply|calls|\w+_computation)=%?([\w.\-]+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_START = re.compile(r"%([\w.\-]+) = .* [\w\-]+-start\(")
_DONE = re.compile(r"-done\(%([\w.\-]+)")
_COMPUTE = re.compile(r" = (?P<result>.*?) (?:fusion|custom-call|convolution|dot|while)\(")
_LIMIT = re.compile(r"= [su]32\[\]\S* constant\((\d+)\)")


class Traffic(NamedTuple):
    """Bytes that one device receives as results of collectives.

    The bytes sent may be more: an all-reduce over many devices sends about twice as many, and a
    reduce-scatter as many as its operand has.

    Attributes:
      total: All of them.
      overlapped: Those that it receives while it computes: between start and end of the
        collective, the program writes at least as many bytes. Whether that takes long enough to
        hide the collective is not known.
      largest: Those of the largest collective, which may be of several arrays.
    """

    total: int = 0
    overlapped: int = 0
    largest: int = 0


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
    written = {}  # instruction that starts something: bytes that others write until its end
    waiting = set()  # instructions that started something which has not ended
    name = ""
    for number, line in enumerate(hlo.splitlines()):
        if match := _COMPUTATION.match(line):
            name = match[1]
            waiting = set()
        if match := _DONE.search(line):
            waiting.discard(match[1])
        if (match := _COMPUTE.search(line)) and "AllocateBuffer" not in line:
            for start in waiting:
                written[start] += sum(array_sizes(match["result"]))
        if match := _START.search(line):
            waiting.add(match[1])
            written[match[1]] = 0
        if match := _LIMIT.search(line):
            limits[name] = int(match[1])
        callers |= dict.fromkeys(_CALL.findall(line), (name, line))
        if match := _COLLECTIVE.search(line):
            channel = _CHANNEL.search(line)
            found.setdefault(channel[1] if channel else -number, []).append((name, line, match))

    def repeats(name):
        if name not in callers:
            return 1
        caller, line = callers[name]
        known, condition = _TRIP_COUNT.search(line), _CONDITION.search(line)
        times = int(known[1]) if known else limits.get(condition and condition[1], 1)
        return times * repeats(caller)

    traffic = {}
    for copies in found.values():
        name, line, match = copies[0]
        num_bytes = _num_bytes(match)
        start = _START.search(line) or _START.search(callers.get(name, ("", ""))[1])
        overlapped = len(copies) > 1 or bool(start and written[start[1]] >= num_bytes)
        total = num_bytes * repeats(name)
        sum_ = traffic.get(match["kind"], Traffic())
        traffic[match["kind"]] = Traffic(
            total=sum_.total + total,
            overlapped=sum_.overlapped + overlapped * total,
            largest=max(sum_.largest, num_bytes),
        )
    return traffic


def describe(hlo: str) -> str:
    """Formats the traffic, for example 'all-reduce 330 MiB (40% overlapped)'."""
    return ", ".join(
        f"{kind} {total / 2**20:,.0f} MiB ({overlapped / total:.0%} overlapped)"
        for kind, (total, overlapped, _) in traffic_by_kind(hlo).items()
        if total
    )


def _num_bytes(collective: re.Match) -> int:
    sizes = array_sizes(collective["result"], semaphores=bool(collective["start"]))
    if collective["start"] and collective["kind"] != "all-reduce":
        sizes = sizes[len(sizes) // 2 :]  # the other asynchronous forms return their operands too
    return sum(sizes)


def array_sizes(type_: str, semaphores: bool = False) -> list[int]:
    """Returns the bytes of the arrays of a type in HLO, such as '(f32[2,3], bf16[])'.

    Args:
      type_: Type of an instruction's result.
      semaphores: Whether each u32[] is a semaphore, which is left out, instead of a scalar.
    """
    return [
        (1 if name == "pred" else math.ceil(int(bits) / 8))
        * math.prod(int(size) for size in shape.split(",") if size)
        for name, bits, shape in _ARRAY.findall(type_)
        if not (semaphores and name.startswith("u") and not shape)
    ]
