"""Command-line flags made from the fields of a configuration dataclass, and back.

A field's metadata (help, unit, choices) is all it needs; so a new setting is one line in its dataclass.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from pageframe.runtime.errors import ConfigError
from pageframe.runtime.memory_plan import parse_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")


def add_flags(parser: argparse.ArgumentParser, config_type: type[DataclassInstance]) -> None:
    """One flag for each field: `max_model_len` becomes `--max-model-len`."""
    group = parser.add_argument_group(_title(config_type))
    hints = get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        unit = field.metadata["unit"]
        if hints[field.name] is bool:
            group.add_argument(
                "--" + field.name.replace("_", "-"),
                dest=field.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=_help(field),
            )
            continue
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            type=_reader(hints[field.name], unit),
            choices=field.metadata["choices"] or None,
            default=argparse.SUPPRESS,
            metavar=None
            if field.metadata["choices"]
            else (unit.upper() or _plain_type(hints[field.name]).__name__.upper()),
            help=_help(field),
        )


def read_flags(args: argparse.Namespace, config_type: type[Config]) -> Config:
    """The configuration that the given flags ask for; fields without a flag keep their defaults.

    Raises:
        ConfigError: a value is out of range.
    """
    names = {field.name for field in dataclasses.fields(config_type)}
    return config_type(**{name: value for name, value in vars(args).items() if name in names})


def _title(config_type: type[DataclassInstance]) -> str:
    return config_type.__name__.removesuffix("Config").lower()


def _help(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata["help"]).replace("%", "%%")
    if field.default is None or "default:" in text:
        return text
    return f"{text} (default: {field.default})"


def _plain_type(hint: Any) -> type:
    """int of `int | None`."""
    options = [option for option in get_args(hint) if option is not type(None)]
    plain: type = options[0] if options else hint
    return plain


def _reader(hint: Any, unit: str) -> Any:
    if unit == "bytes":
        return _read_bytes
    return _plain_type(hint)


def _read_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
