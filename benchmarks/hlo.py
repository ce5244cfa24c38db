"""Counts what a compiled GPU program executes, from its text.

Nothing is measured: a kernel is an instruction that launches one or more of them, and its bytes are
the arrays that it reads and writes, once each. Caches are ignored, and a cuDNN or cuBLAS kernel may
read more than once.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from structinit_jax.training.collectives import array_sizes

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Instructions without a kernel.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"),
    *("opt-barrier", "partition-id", "replica-id"),
}


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    type: str  # of the result
    opcode: str
    operands: list[str]
    rest: str  # attributes
    is_root: bool


class Cost(NamedTuple):
    """Kernels of a program by kind, and the bytes that they read and write."""

    products: int  # cuBLAS
    attention: int  # cuDNN
    fusions: int
    others: int  # copies, sorts, and instructions that were not fused
    num_bytes: int

    @property
    def kernels(self) -> int:
        """All of them."""
        return sum(self[:-1])


def count(text: str, lengths: Sequence[float] = ()) -> Cost:
    """Counts the kernels of a program; those in a loop count as often as they run.

    Args:
      text: Of the program, from `compiled.as_text()`.
      lengths: Of those loops whose length depends on the data, in the order of the program.
    """
    computations, entry = parse(text)
    totals = [0] * len(Cost._fields)
    for instruction, by_name, times in _executed(computations, entry, 1, iter(lengths)):
        totals[_kind(instruction)] += times
        totals[-1] += times * _traffic(instruction, by_name, computations)
    return Cost(*map(round, totals))


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Returns the instructions of each computation by name, and the name of the entry."""
    computations, name, entry = {}, "", ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            entry = name if match[1] else entry
            computations[name] = {}
        elif name and (match := _INSTRUCTION.match(line)):
            root, key, type_, opcode, operands, rest = match.groups()
            operands = [operands] if opcode == "parameter" else _NAME.findall(operands)
            computations[name][key] = Instruction(key, type_, opcode, operands, rest, bool(root))
    return computations, entry


def size(type_: str) -> int:
    """Returns the bytes of an array or of a tuple of arrays."""
    return sum(array_sizes(type_))


def _executed(computations, name, times, lengths) -> Iterator:
    """Yields the instructions that launch kernels, their computation, and how often they run."""
    by_name = computations[name]
    for instruction in by_name.values():
        called = re.findall(r"(?:body|to_apply|calls)=%?([\w.\-]+)", instruction.rest)
        if instruction.opcode == "while":
            known = _TRIP_COUNT.search(instruction.rest)
            trips = int(known[1]) if known else next(lengths, None)
            if trips is None:
                raise ValueError(f"the length of {instruction.name} is not known")
            yield from _executed(computations, called[0], times * trips, lengths)
        elif instruction.opcode in ("call", "async-start"):
            yield from _executed(computations, called[0], times, lengths)
        elif instruction.opcode == "conditional":
            raise ValueError(f"which branch of {instruction.name} runs is not known")
        elif instruction.opcode not in _FREE and not instruction.opcode.endswith("-done"):
            yield instruction, by_name, times


def _kind(instruction):
    target = _TARGET.search(instruction.rest)
    if instruction.opcode == "custom-call" and target:
        if target[1].startswith("__cublas"):
            return Cost._fields.index("products")
        if target[1].startswith("__cudnn$fmha"):
            return Cost._fields.index("attention")
    return Cost._fields.index("fusions" if instruction.opcode == "fusion" else "others")


def _traffic(instruction, by_name, computations):
    """Returns the bytes that an instruction reads and writes."""
    operands = [size(by_name[name].type) for name in instruction.operands if name in by_name]
    if instruction.opcode == "custom-call":  # the last result is a workspace
        results = array_sizes(instruction.type)
        return sum(operands) + sum(results[: len(results) - 1 or 1])
    if instruction.opcode != "fusion":
        return sum(operands) + size(instruction.type)
    # A fusion may read or write a slice of a larger array, such as one layer of a stack.
    body = computations[re.search(r"calls=%?([\w.\-]+)", instruction.rest)[1]]
    users = {}
    for inner in body.values():
        for name in inner.operands:
            users.setdefault(name, []).append(inner)
    total = 0
    for inner in body.values():
        if inner.opcode == "parameter":
            total += _bytes_read(inner, users, body)
        if inner.is_root:
            total += _bytes_written(inner, body)
    return total


def _bytes_read(array, users, body):
    """Returns how much of an array is read inside a fusion."""
    total = 0
    for user in users.get(array.name, []):
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == array.name:
            total += size(user.type)
        elif user.opcode == "bitcast":
            total += _bytes_read(user, users, body)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == array.name:
            pass  # updated in place
        else:
            return size(array.type)
    return min(total, size(array.type))


def _bytes_written(array, body):
    if array.opcode == "dynamic-update-slice":
        return size(body[array.operands[1]].type)
    if array.opcode in ("tuple", "bitcast"):
        return sum(_bytes_written(body[name], body) for name in array.operands)
    return size(array.type)
