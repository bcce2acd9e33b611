"""Records out of JSON: what came through a door becomes a dataclass, every field checked against its annotation.

A refusal names the field and what it should be. Knows the shapes that annotations describe; not what files they come
from, nor what to do about a wrong one: the caller says that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, cast

from knowgate.errors import BadInput

Kind = TypeVar("Kind")
ValueReader = Callable[[Any], Any]
MAX_INTEGER = 2**63  # whole numbers beyond do not fit into arrays and databases
MAX_VALUE_CHARS = 40  # characters of a wrong value


class InvalidValueError(Exception):
    """A value that is not what it should be, and the way to it; each level on the way out adds its own name."""

    def __init__(self, value: object, wanted: str):
        shown = repr(value)
        self.problem = f"is {shown if len(shown) <= MAX_VALUE_CHARS else shown[:MAX_VALUE_CHARS] + '…'}, not {wanted}"
        self.way = list[str]()


class InvalidFieldError(InvalidValueError):
    """An object that lacks a field, or has one that nobody knows."""

    def __init__(self, problem: str):
        super().__init__(None, "")
        self.problem = problem


@dataclass(frozen=True)
class NumberRange:
    """The range of a number, written into its annotation: Annotated[float, Between(0, 1)]."""

    low: float
    high: float = math.inf

    @property
    def words(self) -> str:
        return f"at least {self.low:g}" if self.high == math.inf else f"between {self.low:g} and {self.high:g}"

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


NonNegativeInt = Annotated[int, NumberRange(0)]
UnitInterval = Annotated[float, NumberRange(0, 1)]


def read_record(kind: type[Kind], value: Any, where: str, *, others: bool = False) -> Kind:
    """`value` as a dataclass; `where` is how the refusal begins. others: fields that it does not know are let be."""
    try:
        if others and isinstance(value, Mapping):
            value = {name: found for name, found in value.items() if name in get_field_names(cast(Any, kind))}
        return cast(Kind, get_reader(cast(Any, kind))(value))
    except InvalidValueError as error:
        raise BadInput(f"{where}: {'.'.join(reversed(error.way)) or 'it'} {error.problem}.") from None


@functools.cache
def get_field_names(kind: type) -> frozenset[str]:
    return frozenset(item.name for item in dataclasses.fields(kind))


@functools.cache
def get_reader(kind: Any) -> ValueReader:
    """What reads values of a type; made once, for rows are many."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is Annotated:
        return _in_range(get_reader(arguments[0]), arguments[1])
    if origin in (Union, types.UnionType):
        return _either(arguments)
    if origin is Literal:
        return _one_of({word: word for word in arguments})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _one_of({word.value: word for word in kind})
    if dataclasses.is_dataclass(kind):
        return _record(cast(type, kind))
    return _container(origin, arguments)


def _container(origin: Any, arguments: tuple[Any, ...]) -> ValueReader:
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _row([get_reader(argument) for argument in arguments])
    if origin in (tuple, list, frozenset):
        return _list(get_reader(arguments[0]), cast(Callable[[list[Any]], Any], origin))
    if origin in (dict, Mapping):
        return _mapping(get_reader(arguments[1]))
    raise TypeError(f"no records of {origin} are read")


# --- single values --------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if type(value) is not str:
        raise InvalidValueError(value, "a text")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise InvalidValueError(value, "true or false")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= MAX_INTEGER:
        raise InvalidValueError(value, "a whole number")
    return value


def _number(value: Any) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int and abs(value) < MAX_INTEGER:
        return float(value)
    raise InvalidValueError(value, "a number")


def _nothing(value: Any) -> None:
    if value is not None:
        raise InvalidValueError(value, "nothing")


_PLAIN: dict[Any, ValueReader] = {
    str: _text,
    bool: _flag,
    int: _whole,
    float: _number,
    type(None): _nothing,
    Any: lambda value: value,
}


_AS_THEY_ARE: dict[ValueReader, frozenset[type]] = {  # readers that only look at the type, and give what they got
    _text: frozenset({str}),
    _flag: frozenset({bool}),
}


def _in_range(read: ValueReader, allowed: NumberRange) -> ValueReader:
    def reader(value: Any) -> Any:
        found = read(value)
        if not allowed.holds(found):
            raise InvalidValueError(value, allowed.words)
        return found

    return reader


def _one_of(allowed: Mapping[Any, Any]) -> ValueReader:
    kinds = {type(word) for word in allowed}

    def reader(value: Any) -> Any:
        if type(value) not in kinds or value not in allowed:
            raise InvalidValueError(value, f"one of {', '.join(map(str, allowed))}")
        return allowed[value]

    return reader


def _either(kinds: Sequence[Any]) -> ValueReader:
    readers = [get_reader(kind) for kind in kinds if kind is not type(None)]
    empty = type(None) in kinds

    def reader(value: Any) -> Any:
        if value is None and empty:
            return None
        for read in readers[:-1]:
            try:
                return read(value)
            except InvalidValueError:
                continue
        return readers[-1](value)

    if all(read in _AS_THEY_ARE for read in readers):
        none = {type(None)} if empty else set[type]()
        _AS_THEY_ARE[reader] = frozenset().union(none, *(_AS_THEY_ARE[read] for read in readers))
    return reader


# --- several values -------------------------------------------------------------------------------


def _list(read: ValueReader, make: Callable[[list[Any]], Any]) -> ValueReader:
    plain = _AS_THEY_ARE.get(read, frozenset())

    def reader(value: Any) -> Any:
        if type(value) is not list:
            raise InvalidValueError(value, "a list")
        if plain.issuperset(map(type, value)):
            return make(value)
        try:
            return make([read(found) for found in value])
        except InvalidValueError:  # once more, to name the place: rows are many, and few are wrong
            return make([_inside(str(place), read, found) for place, found in enumerate(value)])

    return reader


def _row(readers: Sequence[ValueReader]) -> ValueReader:
    def reader(value: Any) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise InvalidValueError(value, f"a list of {len(readers)}")
        pairs = enumerate(zip(readers, value, strict=True))
        return tuple(_inside(str(place), read, found) for place, (read, found) in pairs)

    return reader


def _mapping(read: ValueReader) -> ValueReader:
    def reader(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InvalidValueError(value, "an object")
        try:
            return {name: read(found) for name, found in value.items()}
        except InvalidValueError:
            return {name: _inside(name, read, found) for name, found in value.items()}

    return reader


def _record(kind: type) -> ValueReader:
    """A dataclass is an object of its fields, or a list of them in their order, as tokens are.

    One with `takes_others` lets fields be that it does not know.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    readers = {item.name: get_reader(hints[item.name]) for item in dataclasses.fields(kind) if item.init}
    takes_others = bool(getattr(kind, "takes_others", False))
    required = [item.name for item in dataclasses.fields(kind) if item.init and _is_required(item)]

    def reader(value: Any) -> Any:
        if type(value) is list and len(required) <= len(value) <= len(readers):
            value = dict(zip(readers, value, strict=False))
        if not isinstance(value, dict):
            raise InvalidValueError(value, "an object")
        if missing := [name for name in required if name not in value]:
            raise InvalidFieldError(f"lacks '{missing[0]}'")
        if not takes_others and (unknown := [name for name in value if name not in readers]):
            raise InvalidFieldError(f"has '{unknown[0][:MAX_VALUE_CHARS]}', which is no field of it")
        if takes_others:
            value = {name: found for name, found in value.items() if name in readers}
        try:
            fields = {name: readers[name](found) for name, found in value.items()}
        except InvalidValueError:
            fields = {name: _inside(name, readers[name], found) for name, found in value.items()}
        return kind(**fields)

    return reader


def _is_required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _inside(name: str, read: ValueReader, value: Any) -> Any:
    try:
        return read(value)
    except InvalidValueError as error:
        error.way.append(name[:MAX_VALUE_CHARS])
        raise
