"""The command line: a LightningCLI with a `dataflex` block, and the small tools."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Optional, Union

from jsonargparse import ArgumentParser, Namespace

from lightning_dataflex.callback import DataFlexCallback, dataflex_callbacks
from lightning_dataflex.core.config import DataFlexConfig
from lightning_dataflex.core.files import check_config_file
from lightning_dataflex.core.registry import BASES, components, init_parameters
from lightning_dataflex.preview.command import previewed
from lightning_dataflex.report.command import reported
from lightning_dataflex.writing import check_places

if TYPE_CHECKING or find_spec("lightning"):
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
else:  # the same package under its other name
    from pytorch_lightning.cli import LightningArgumentParser, LightningCLI

_FROM_FILE = "sub_configs" if "sub_configs" in signature(ArgumentParser.add_argument).parameters else "enable_path"
"""jsonargparse's word for an argument that may also be a file."""

USAGE = """usage: dataflex COMMAND [OPTIONS]

  fit         train, with a dataflex block in the configuration
  validate    run the validation of a configuration
  test        run the test of a configuration
  check       build and check everything that a configuration names, without training
  preview     put saved rollouts through configurations, without a model
  report      write a page of what a run has done, RUN_DIR [--out FILE] [--trace PATH]
  components  list the registered scorers, selectors, reweighters and mixers

Each of the first four takes --config FILE, overrides such as --dataflex.actuator.params.low=0.3, and --help;
fit, validate and test also take --print_config. 'dataflex fit --dataflex.help DataFlexConfig' explains the block."""


class DataFlexCLI(LightningCLI):
    """A LightningCLI whose configuration has a `dataflex` key: one block, or a list of blocks."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the `dataflex` block."""
        # The last two take what the first two refuse, so that a mistake gets our sentence and not a list of types.
        block = Optional[Union[DataFlexConfig, list[DataFlexConfig], dict[str, Any], list[Any]]]  # noqa: UP007, UP045
        parser.add_argument(
            "--dataflex",
            type=block,
            default=None,
            **{_FROM_FILE: True},
            help="What picks and weighs the data: a block with mechanism, scorer and actuator, a list of such blocks, "
            "or a file that holds them. --dataflex.help DataFlexConfig explains its keys; 'dataflex components' lists "
            "the names. An override reaches the last block of a list.",
        )

    def before_instantiate_classes(self) -> None:
        """Build the callbacks of the blocks; what does not fit ends the command with one sentence."""
        try:
            self.dataflex = [DataFlexCallback(**vars(DataFlexConfig.of(block))) for block in self._blocks()]
            names = [callback.name for callback in self.dataflex]
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"Two blocks are called {name!r}. Give one of them a label.")
        except ValueError as error:
            _refuse(error)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Build the Trainer with the callbacks of the blocks beside its own."""
        own = self._get(self.config_init, "trainer", default={}).get("callbacks") or []
        own = own if isinstance(own, list) else [own]
        return super().instantiate_trainer(**{"callbacks": [*own, *self.dataflex], **kwargs})

    def before_fit(self) -> None:
        """Refuse what does not fit the module, or cannot be written, before the Trainer starts processes."""
        try:
            for callback in dataflex_callbacks(self.trainer):
                callback.check(self.model)
            if self.trainer.is_global_zero:
                check_places(self.trainer)
        except ValueError as error:
            _refuse(error)

    def _blocks(self) -> list[dict[str, Any]]:
        given = self._get(self.config, "dataflex")
        blocks = given if isinstance(given, list) else [] if given is None else [given]
        return [_plain(block) for block in blocks]


CONFIG_OPTIONS = ("--config", "-c")
CONFIG_GROUPS = ("--dataflex", "--data", "--lr_scheduler", "--model", "--optimizer", "--trainer")
"""Options that may name a file with their own part of a configuration."""
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line, that of the process by default."""
    arguments = list(sys.argv[1:] if args is None else args)
    # A configuration names classes of the project that it lies in, as `python -m` would find them.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        _say(USAGE)
    elif command == "components":
        _say(component_table())
    elif command in ("preview", "report"):
        try:
            _say((previewed if command == "preview" else reported)(arguments[1:]))
        except (ValueError, ModuleNotFoundError) as error:
            _refuse(error)
    elif command == "check":
        _say(checked(arguments[1:]))
    elif command in ("fit", "validate", "test"):
        _cli(arguments, run=True)
    else:
        sys.exit(f"dataflex: there is no command {command!r}.\n\n{USAGE}")


def checked(args: Sequence[str]) -> str:
    """Build and check all that a configuration names; one line per callback."""
    cli = _cli(list(args), run=False)
    lines = [f"ok: {type(cli.model).__name__} on {type(cli.datamodule).__name__ if cli.datamodule else 'its own data'}"]
    cli.before_fit()
    for callback in dataflex_callbacks(cli.trainer):
        try:
            mount = callback.mount_kind(cli.model)
            if callback.steering is not None and cli.datamodule is not None:
                cli.datamodule.setup("fit")
                callback.steering.adopt(cli.datamodule.train_dataloader())
        except ValueError as error:
            _refuse(error)
        first_line = str(getattr(mount, "func", mount).__doc__).splitlines()[0]
        lines.append(f"  {callback.name}: {first_line}")
    return "\n".join(lines)


def component_table(width: int | None = None) -> str:
    """The registered components by kind, as plain text.

    Args:
        width: Of a line. Default: that of the terminal, or 80 characters where there is none.
    """
    width = width or shutil.get_terminal_size().columns
    lines = []
    for kind in BASES:
        found = components(kind)  # type: ignore[arg-type]
        lines.append(f"{kind}s")
        beside = 4 + max(map(len, found), default=0)
        for name, cls in found.items():
            lines += textwrap.wrap(
                "; ".join(_facts(cls)),
                max(width, beside + 20),
                initial_indent=f"  {name:{beside - 2}}",
                subsequent_indent=" " * beside,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def _facts(cls: Any) -> Iterator[str]:
    """What there is to say of a component, apart from its name."""
    combines = {"scorer", "scorers", "selector", "selectors"} & set(init_parameters(cls))
    if combines and "granularity" not in vars(cls):
        yield "combines others"
    else:
        granularity = getattr(cls, "granularity", None)
        yield f"scores each {granularity}" if granularity else f"per {', '.join(cls.granularities)}"
    signals = getattr(cls, "signal", "") or ", ".join(getattr(cls, "signals", ()))
    if signals:
        yield f"signal: {signals}"
    default = getattr(cls, "default_scorer", "")
    if default:
        yield f"default scorer: {default if isinstance(default, str) else _with_params(default)}"
    if cls.needs_groups:
        yield "needs groups"
    if cls.requires:
        yield f"reads {', '.join(cls.requires)}"
    if cls.paper:
        yield cls.paper


def _with_params(spec: Mapping[str, Any]) -> str:
    params = ", ".join(f"{key}: {value}" for key, value in (spec.get("params") or {}).items())
    return f"{spec['name']} ({params})" if params else spec["name"]


def _check_files(args: list[str]) -> None:
    """Refuse a configuration file that cannot be one before anything reads it."""
    for before, argument in zip(["", *args], args):
        option, _, value = argument.partition("=") if argument.startswith("-") else (before, "", argument)
        named = option in CONFIG_OPTIONS or (option in CONFIG_GROUPS and Path(value).suffix in CONFIG_SUFFIXES)
        if named and value and os.path.exists(value):
            try:
                check_config_file(value)
            except ValueError as error:
                _refuse(error)


def _cli(args: list[str], run: bool) -> DataFlexCLI:
    _check_files(args)
    # LightningCLI reads the process's own arguments, and warns of others.
    sys.argv[1:] = args
    return DataFlexCLI(
        subclass_mode_model=True, subclass_mode_data=True, save_config_kwargs={"overwrite": True}, run=run
    )


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Whoever reads has seen enough, as `head` has; Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(error: Exception) -> NoReturn:
    print(f"error: dataflex: {error}", file=sys.stderr)
    sys.exit(2)


def _plain(value: Any) -> Any:
    """Namespaces as dicts, all the way down."""
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, dict):
        # jsonargparse notes under __path__ which file a value came from.
        return {key: _plain(item) for key, item in value.items() if key != "__path__"}
    return [_plain(item) for item in value] if isinstance(value, list) else value
