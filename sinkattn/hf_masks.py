# SPDX-License-Identifier: Apache-2.0
"""What a mask function of transformers says, and how each layer gets to know it.

transformers describes a mask by a function of four indices, composed of closures. read_mask calls it with symbols
instead of numbers and sees which comparisons it makes; that works inside a compiled graph too, where closures cannot be
opened. A comparison that has no meaning here raises, so no mask is ever taken for another one.

A model hands each of its layers the mask and nothing else of what was read. So the mask is a tensor
[batch, sides, window, 1, kv_len] whose sizes and dtype say it, which a graph and a move to another device keep. All but
batch and kv_len are expanded dimensions, which take no memory, until such a move makes them dense:

* sides: CAUSAL or TWO_SIDED;
* window: 1 without a window, or 2 + the keys from the window's left end up to the row itself;
* dtype: WHOLE, each batch row may be seen throughout and the values mean nothing; ONE_SEQUENCE, the same, and
  position_ids must not cut a row; PADDING, False for padding; SEQUENCES, the number of the packed sequence; for one new
  token a sequence, LENGTHS, how many of the keys are in use, and COLUMNS, which ones (sinkattn.hf_decode).

It has five dimensions, since a caller's own masks have two or four. No size is 1 in both places: a model that adds the
mask to its scores gets an error from the shapes, not a result.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CAUSAL, TWO_SIDED = 2, 3
WHOLE, ONE_SEQUENCE, PADDING, SEQUENCES = torch.uint8, torch.int8, torch.bool, torch.int64
LENGTHS, COLUMNS = torch.int32, torch.uint32
_KINDS = (WHOLE, ONE_SEQUENCE, PADDING, SEQUENCES, LENGTHS, COLUMNS)


class Mask(NamedTuple):
    """window counts the row itself, on each side where causal is False. sequences is [batch, len] or None."""

    causal: bool
    window: int | None
    sequences: Tensor | None


class _UnknownMask(Exception):
    pass


class _Symbol:
    """Refuses every operator but those that a subclass defines."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise _UnknownMask

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _refuse
    __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __pow__ = __neg__ = __abs__ = __invert__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __index__ = __int__ = __float__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]
    new_zeros = new_ones = to = _refuse


class _Seen(_Symbol):
    """A condition: key in [row - left, row + right], and of the row's packed sequence; None is no bound."""

    device = None

    def __init__(
        self,
        left: int | None = None,
        right: int | None = None,
        sequences: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        self.left, self.right, self.sequences, self.positions = left, right, sequences, positions

    def to(self, *args: Any, **kwargs: Any) -> "_Seen":
        return self

    def __and__(self, other: Any) -> "_Seen":
        if not isinstance(other, _Seen):
            raise _UnknownMask
        return _Seen(
            _nearer(self.left, other.left),
            _nearer(self.right, other.right),
            _either(self.sequences, other.sequences),
            _either(self.positions, other.positions),
        )


class _Index(_Symbol):
    """A row's or key's index less `back`, or what table [batch, len] has there."""

    def __init__(self, is_key: bool, back: int = 0, table: Tensor | None = None) -> None:
        self.is_key, self.back, self.table = is_key, back, table

    def new_ones(self, *args: Any, **kwargs: Any) -> _Seen:
        return _Seen()

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, _Index):
            if self.is_key is other.is_key or self.back != 0 or other.back != 0 or self.table is not other.table:
                raise _UnknownMask
            return _Difference(self.table)
        return _Index(self.is_key, self.back + _whole(other), self.table)

    def __add__(self, other: Any) -> "_Index":
        return _Index(self.is_key, self.back - _whole(other), self.table)

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, _Index) or self.is_key is other.is_key or self.table is not other.table:
            raise _UnknownMask
        if self.table is None or self.back != 0 or other.back != 0:
            raise _UnknownMask
        return _Seen(sequences=self.table)

    def __le__(self, other: Any) -> _Seen:
        return self._up_to(other, 0)

    def __lt__(self, other: Any) -> _Seen:
        return self._up_to(other, 1)

    def __ge__(self, other: Any) -> _Seen:
        if isinstance(other, int) and other == 0 and self.table is None and self.back == 0:
            return _Seen()
        return _index(other)._up_to(self, 0)

    def __gt__(self, other: Any) -> _Seen:
        return _index(other)._up_to(self, 1)

    def _up_to(self, other: Any, less: int) -> _Seen:
        """self + less <= other."""
        other = _index(other)
        if self.is_key is other.is_key or self.table is not other.table:
            raise _UnknownMask
        room = self.back - other.back - less
        if self.is_key:  # key <= row + room
            return _Seen(right=room, positions=self.table)
        return _Seen(left=room, positions=self.table)


class _Difference(_Symbol):
    """Of a row's and a key's index; or its size."""

    def __init__(self, table: Tensor | None, size: bool = False) -> None:
        self.table, self.size = table, size

    def __abs__(self) -> "_Difference":
        return _Difference(self.table, True)

    def __le__(self, other: Any) -> _Seen:
        if not self.size:
            raise _UnknownMask
        return _Seen(_whole(other), _whole(other), positions=self.table)

    def __lt__(self, other: Any) -> _Seen:
        return self.__le__(_whole(other) - 1)


def _whole(x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, int):
        raise _UnknownMask
    return x


def _index(x: Any) -> _Index:
    if not isinstance(x, _Index):
        raise _UnknownMask
    return x


def _nearer(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _either(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is not None and b is not None and a is not b:
        raise _UnknownMask
    return b if a is None else a


class _Batch(_Symbol):
    pass


class _Reading(TorchFunctionMode):
    """table[batch, index] is a symbol; whatever else meets one has no meaning here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], tuple) and len(args[1]) == 2:
            batch, index = args[1]
            if isinstance(batch, _Batch) and isinstance(index, _Index) and index.table is None and index.back == 0:
                return _Index(index.is_key, 0, args[0])
        return func(*args, **(kwargs or {}))


def read_mask(mask_function: Callable[..., Any], name: str) -> Mask:
    """What the mask function says. Raises NotImplementedError, which names the mask of `name`, for any other."""
    try:
        with _Reading():
            seen = mask_function(_Batch(), _Symbol(), _Index(False), _Index(True))
        left, right = seen.left, seen.right
        known = isinstance(seen, _Seen) and (left is None or left >= -1) and right in (0, left)
        # Positions stand for indices only where they count on within each sequence.
        known = known and (seen.positions is None or seen.sequences is not None)
    except Exception:  # of whatever a function of indices does with what is none
        known = False
    if not known:
        raise NotImplementedError(
            f"sinkattn: the mask of {name} ({_name(mask_function)}) is not made of causal or two-sided rows, a window"
            " and packed sequences alone; use eager attention"
        )
    sequences: Tensor | None = seen.sequences
    if sequences is not None:
        sequences = sequences.to(SEQUENCES)
        if seen.positions is not None:  # a number that is none, for find_sequences to refuse
            p = seen.positions
            jumps = (p[:, 1:] != p[:, :-1] + 1) & (sequences[:, 1:] == sequences[:, :-1])
            sequences = torch.where(jumps.any(), -1, sequences)
    return Mask(right == 0, None if left is None else left + 1, sequences)


def _name(mask_function: Callable[..., Any]) -> str:
    """Of the functions that this one is composed of."""
    if torch.compiler.is_compiling():  # a graph cannot open closures
        return "compiled"
    name = getattr(mask_function, "__qualname__", type(mask_function).__name__).split(".")[0]
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    parts = [part for cell in cells for part in (cell if isinstance(cell, tuple) else [cell]) if callable(part)]
    return f"{name}({', '.join(map(_name, parts))})" if parts else name


def encode_mask(mask: Tensor, causal: bool, window: int | None) -> Tensor:
    """[batch, sides, window, 1, kv_len], as above, of a mask [batch, kv_len] of one of the dtypes."""
    shape = (mask.shape[0], CAUSAL if causal else TWO_SIDED, 1 if window is None else 2 + window, 1, mask.shape[1])
    return mask[:, None, None, None].expand(shape)


def is_encoded_mask(mask: Tensor | None) -> bool:
    return isinstance(mask, Tensor) and mask.ndim == 5


def decode_mask(mask: Tensor) -> tuple[bool, int | None]:
    """causal and the window, of an encoded mask; mask[:, 0, 0, 0] is what was encoded."""
    _, sides, window = mask.shape[:3]
    if sides not in (CAUSAL, TWO_SIDED) or mask.dtype not in _KINDS:
        raise NotImplementedError(
            f"sinkattn: attention_mask is {mask.dtype} of shape {tuple(mask.shape)}, which the model has changed; use"
            " eager attention"
        )
    return sides == CAUSAL, None if window == 1 else window - 2
