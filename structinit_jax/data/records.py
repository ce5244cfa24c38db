"""Reads the stored examples of a split, one by one and in slices."""

import bisect
import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from structinit_jax.errors import InputError


@runtime_checkable
class Records(Protocol):
    """The examples of a split, as stored.

    An example is a dict with an "image" (encoded bytes, the path of a file, or uint8 pixels [h, w,
    C]), a "label" (an integer), and optionally a "file_name" for messages. The optional method
    `__getitems__(indices)` reads many examples at once. The optional method `digest(start, stop)`
    returns a checksum of examples, a string; a run resumes only if it is the same.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class Slices:
    """Slices of records, one after another.

    Args:
      parts: Records, start and stop of each slice.
    """

    def __init__(self, parts: Sequence[tuple[Records, int, int]]):
        self.parts = parts
        sizes = [stop - start for _, start, stop in parts]
        self._offsets = list(itertools.accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._offsets[-1]

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Returns several examples; `InputError` if `__getitems__` does not return one for each."""
        by_part, found = collections.defaultdict(list), {}
        for index in indices:
            by_part[bisect.bisect_right(self._offsets, index) - 1].append(index)
        for part, members in by_part.items():
            records, start, _ = self.parts[part]
            wanted = [index + start - self._offsets[part] for index in members]
            # One call for many examples is far faster.
            read_many = getattr(records, "__getitems__", None)
            values = list(read_many(wanted) if read_many else map(records.__getitem__, wanted))
            if len(values) != len(wanted):
                raise InputError(
                    f"{type(records).__name__}.__getitems__ returned {len(values)} examples for"
                    f" {len(wanted)} indices, expected one for each, in the same order."
                )
            found |= zip(members, values, strict=True)
        return [found[index] for index in indices]
