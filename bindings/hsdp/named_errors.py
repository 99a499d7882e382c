"""Errors that say which of several Reducers they concern."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from hsdp.errors import Error, MismatchError, PeerLostError, TimeoutError

_Kind = TypeVar("_Kind", bound=type)


def who_of(names: Iterable[str | None]) -> str:
    """How an error refers to Reducers with these names; empty if none has a name."""
    known = [repr(name) for name in names if name is not None]
    return f"reducer{'s' if len(known) > 1 else ''} {', '.join(known)}" if known else ""


@contextlib.contextmanager
def naming(who: str) -> Iterator[None]:
    """An error that leaves the block names `who`, unless it already does."""
    try:
        yield
    except Error as error:
        put_name(error, who)
        raise


def put_name(error: BaseException, who: str) -> None:
    """Inserts `who` into an error of the library: after "reducer: " at its beginning, or at its end.
    The error that ends a mesh may have appeared in another Reducer first.
    """
    text = str(error)
    if not who or not isinstance(error, Error) or who in text or text.startswith("reducer '"):
        return
    if text.startswith("reducer: "):
        error.args = (who + text.removeprefix("reducer"),)
    else:
        is_of_mesh = isinstance(error, (PeerLostError, TimeoutError, MismatchError))
        error.args = (f"{text} ({'met by ' if is_of_mesh else ''}{who})",)


def naming_itself(kind: _Kind) -> _Kind:
    """For a class: errors from its own methods and properties name `self._who`, once that is set."""
    for name, member in vars(kind).copy().items():
        if name == "_who" or (name.startswith("__") and name != "__init__"):
            continue
        if inspect.isfunction(member):
            setattr(kind, name, _naming(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(kind, name, member.getter(_naming(member.fget)))
    return kind


def _naming(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except Error as error:
            put_name(error, getattr(self, "_who", ""))
            raise

    return method
