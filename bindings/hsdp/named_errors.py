"""Errors that say which of several Reducers they are of."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from hsdp.errors import Error

_Kind = TypeVar("_Kind", bound=type)


def who_of(names: Iterable[str | None]) -> str:
    """Reducers of these names, in an error; empty where none has a name."""
    known = [repr(name) for name in names if name is not None]
    return f"reducer{'s' if len(known) > 1 else ''} {', '.join(known)}" if known else ""


@contextlib.contextmanager
def naming(who: str) -> Iterator[None]:
    """An error that leaves the block says `who`, unless it does so already."""
    try:
        yield
    except Error as error:
        put_name(error, who)
        raise


def put_name(error: BaseException, who: str) -> None:
    """Makes an error of the library say `who`: where it begins with "reducer: ", or at its end."""
    text = str(error)
    if who and isinstance(error, Error) and who not in text:
        of_reducer = text.startswith("reducer: ")
        error.args = (who + text.removeprefix("reducer") if of_reducer else f"{text} ({who})",)


def naming_itself(kind: _Kind) -> _Kind:
    """Of a class: what leaves its own methods says `self._who`, once that is there."""
    for name, function in vars(kind).copy().items():
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("__")):
            setattr(kind, name, _naming(function))
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
