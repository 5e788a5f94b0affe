"""What is known of a value in the function that launches a kernel: whether it varies, and in which steps.

Everything starts as "stays, or nothing is known": only a size that follows tokens or a batch makes a value vary, and
arithmetic carries that on. So what is not understood gives no finding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

MANY = 1 << 62  # values: as many as one likes
BUCKETS = 18  # powers of two up to 131072
#: log2 of the largest value that is assumed of a count of tokens, of requests, of a width of the model, of the rest.
COUNT_BITS, BATCH_BITS, FEATURE_BITS, UNKNOWN_BITS = 18, 11, 13, 4
INT_BITS = 31
STEPS = 5  # of an explanation
_LARGE = 1 << 40
_POWERS = frozenset(1 << bit for bit in range(31))


@dataclass(frozen=True)
class Value:
    """
    varies    from call to call; `because` says why, step by step
    constant  known to be exactly this (then `known`)
    multiple  divides it in every call
    above_one never 1
    values    how many different ones there are at most, when it varies
    options   they are exactly these constants
    powers    they are powers of two
    bits      log2 of the largest, as far as can be assumed
    logical   a bool: Triton never specialises those by value
    tensor    it is a tensor
    items     it is a tuple or list of these
    entries   it is a dict with these
    """

    varies: bool = False
    constant: object = None
    known: bool = False
    multiple: int = 1
    above_one: bool = False
    values: int = MANY
    bits: int = UNKNOWN_BITS
    options: frozenset[int] = frozenset()
    powers: bool = False
    logical: bool = False
    because: tuple[str, ...] = ()
    tensor: Tensor | None = None
    items: tuple[Value, ...] | None = None
    entries: tuple[tuple[str, Value], ...] | None = None

    def step(self, text: str) -> Value:
        """The same with one more step of its explanation in front."""
        if not self.varies or (self.because and self.because[0] == text):
            return self
        return replace(self, because=(text, *self.because)[:STEPS])

    def divisible_by(self, factor: int) -> Value:
        return replace(self, multiple=_lcm(self.multiple, factor), above_one=self.above_one or factor > 1)


@dataclass(frozen=True)
class Tensor:
    """Its name as it is written; sizes and strides where they are known; whether its first size follows the tokens."""

    name: str
    activation: bool = False
    narrow: bool = False
    shape: tuple[Value, ...] | None = None
    strides: tuple[Value, ...] | None = None


UNKNOWN = Value()


def constant(value: object) -> Value:
    if isinstance(value, bool) or not isinstance(value, int):
        return Value(constant=value, known=True, logical=isinstance(value, bool))
    return Value(
        constant=value,
        known=True,
        multiple=abs(value) or 1 << 20,
        above_one=value > 1,
        bits=abs(value).bit_length(),
        options=frozenset([value]),
    )


def count(because: str, bits: int = COUNT_BITS) -> Value:
    """A number that follows the tokens."""
    return Value(varies=True, bits=bits, because=(because,))


def feature() -> Value:
    return Value(multiple=16, above_one=True, bits=FEATURE_BITS)


def join(a: Value, b: Value, decides: Value | None = None) -> Value:
    """One or the other; `decides`: the value that says which."""
    if a == b:
        return a
    tensor = _join_tensors(a.tensor, b.tensor) if a.tensor and b.tensor else a.tensor or b.tensor
    choice = decides is not None and decides.varies and (a.known or a.varies) and (b.known or b.varies)
    varies = a.varies or b.varies or (choice and tensor is None)
    options = a.options | b.options if a.options and b.options else frozenset()
    values = MANY
    if varies:
        values = len(options) or min(MANY, _number(a) + _number(b))
    items = None
    if a.items and b.items and len(a.items) == len(b.items):
        items = tuple(join(x, y, decides) for x, y in zip(a.items, b.items, strict=True))
    return Value(
        varies=varies,
        multiple=gcd(a.multiple, b.multiple),
        above_one=a.above_one and b.above_one,
        values=values,
        options=options,
        powers=a.powers and b.powers,
        bits=max(a.bits, b.bits),
        logical=a.logical and b.logical,
        because=_because(a, b) or (decides.because if choice else ()),
        tensor=tensor,
        items=items,
    )


def multiply(a: Value, b: Value) -> Value:
    if a.known and b.known:
        return _fold(a, b, lambda x, y: x * y)
    if 0 in (side.constant for side in (a, b) if side.known and not side.logical):
        return constant(0)
    return _combined(a, b, a.multiple * b.multiple, a.bits + b.bits, a.above_one or b.above_one)


def add(a: Value, b: Value, sign: int = 1) -> Value:
    if a.known and b.known:
        return _fold(a, b, lambda x, y: x + sign * y)
    return _combined(a, b, gcd(a.multiple, b.multiple), max(a.bits, b.bits) + (sign > 0), False)


def floor_divide(a: Value, b: Value) -> Value:
    """Also for ceiling division: what is known of the result is the same."""
    if a.known and b.known and b.constant:
        return _fold(a, b, lambda x, y: x // y)
    if a.varies and b.varies and b.values == MANY and b.bits <= BATCH_BITS:
        return Value(bits=BATCH_BITS)  # tokens a request, where there is one number for all: mostly it stays
    by = b.constant if b.known and isinstance(b.constant, int) and b.constant else 0
    multiple = a.multiple // by if by and a.multiple % by == 0 else 1
    by_bits = by.bit_length() - 1 if by else b.bits if b.bits == FEATURE_BITS and not b.varies else 0
    bits = max(a.bits - by_bits, 1)
    return _combined(a, b, abs(multiple) or 1, bits, False)


def remainder(a: Value, b: Value) -> Value:
    if a.known and b.known and b.constant:
        return _fold(a, b, lambda x, y: x % y)
    by = b.constant if b.known and isinstance(b.constant, int) and b.constant > 0 else 0
    if by and a.multiple % by == 0:
        return constant(0)
    made = _combined(a, b, gcd(a.multiple, by) if by else 1, b.bits, False)
    return replace(made, values=min(by or MANY, made.values))


def compare(*sides: Value) -> Value:
    """A bool of these."""
    varying = [side for side in sides if side.varies and not side.tensor]
    because = varying[0].because if varying else ()
    return Value(varies=bool(varying), values=2, bits=1, logical=True, because=because)


def bucketed(a: Value) -> Value:
    """next_power_of_2 of it."""
    if not a.varies:  # the width of a block: rarely below 16
        return Value(multiple=16, above_one=True, bits=a.bits)
    return replace(a, values=min(a.values, BUCKETS), multiple=1, above_one=False, powers=True, options=frozenset())


def bit_length(a: Value) -> Value:
    if not a.varies:
        return UNKNOWN
    return Value(varies=True, values=min(a.values, BUCKETS), bits=5, because=a.because)


def power(exponent: Value) -> Value:
    """1 << exponent"""
    if not exponent.varies:
        return Value(multiple=1, bits=FEATURE_BITS)
    return Value(varies=True, values=exponent.values, powers=True, bits=COUNT_BITS, because=exponent.because)


def rounded(a: Value, to: Value) -> Value:
    """The next multiple of `to`."""
    if a.known and to.known and isinstance(a.constant, int) and isinstance(to.constant, int) and to.constant > 0:
        return constant(-(-a.constant // to.constant) * to.constant)
    return replace(_combined(a, to, _lcm(a.multiple, to.multiple), a.bits, to.above_one), values=a.values)


def smallest(sides: list[Value]) -> Value:
    """min(): a bound by a constant leaves few values, of powers of two still fewer."""
    made, bounds = _of_several(sides), _constants(sides)
    if made.varies and bounds:
        values = min(bounds).bit_length() if made.powers else min(bounds)
        made = replace(made, values=min(made.values, values), bits=min(bounds).bit_length())
    return made


def largest(sides: list[Value]) -> Value:
    made, bounds = _of_several(sides), _constants(sides)
    fewer = bounds and made.powers and made.values < MANY
    values = max(made.values - max(bounds).bit_length() + 1, 1) if fewer else made.values
    above_one = any(side.above_one for side in sides)
    return replace(made, above_one=above_one, values=values, bits=max(side.bits for side in sides))


def product(sides: list[Value]) -> Value:
    made = constant(1)
    for side in sides:
        made = multiply(made, side)
    return made


def contiguous(shape: tuple[Value, ...]) -> tuple[Value, ...]:
    """Strides of a tensor of that shape as torch allocates it."""
    return tuple(product(list(shape[index + 1 :])) for index in range(len(shape)))


def _constants(sides: list[Value]) -> list[int]:
    return [side.constant for side in sides if side.known and isinstance(side.constant, int) and side.constant > 0]


def _of_several(sides: list[Value]) -> Value:
    made = sides[0]
    for side in sides[1:]:
        multiple = gcd(made.multiple, side.multiple)
        powers = all(each.powers or each.multiple in _POWERS for each in (made, side))
        made = replace(_combined(made, side, multiple, max(made.bits, side.bits), False), powers=powers)
    return made


def _combined(a: Value, b: Value, multiple: int, bits: int, above_one: bool) -> Value:
    varies = a.varies or b.varies
    values = MANY
    if varies:
        values = min(MANY, _number(a) * _number(b))
    return Value(
        varies=varies,
        multiple=multiple if multiple < _LARGE else gcd(multiple, _LARGE),
        above_one=above_one,
        values=values,
        bits=min(bits, 63),
        because=_because(a, b),
    )


def _number(side: Value) -> int:
    return side.values if side.varies else 1


def _fold(a: Value, b: Value, operation) -> Value:
    numbers = (int, float)
    if isinstance(a.constant, numbers) and isinstance(b.constant, numbers):
        try:
            return constant(operation(a.constant, b.constant))
        except (ArithmeticError, ValueError):
            return UNKNOWN
    return UNKNOWN


def _because(a: Value, b: Value) -> tuple[str, ...]:
    """Of the one that varies; of two, the shorter story."""
    told = [side.because for side in (a, b) if side.varies and side.because]
    return min(told, key=len) if told else ()


def _join_tensors(a: Tensor, b: Tensor) -> Tensor:
    def sizes(x, y):
        if x is None or y is None or len(x) != len(y):
            return None
        return tuple(join(one, other) for one, other in zip(x, y, strict=True))

    return Tensor(
        a.name, a.activation or b.activation, a.narrow or b.narrow, sizes(a.shape, b.shape), sizes(a.strides, b.strides)
    )


def _lcm(a: int, b: int) -> int:
    return a * b // gcd(a, b) if a and b else 1
