"""Data sets of the Hugging Face ``datasets`` library: a saved folder, a folder of files, or a name of the hub."""

from __future__ import annotations

import glob
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from forge_core.errors import ConfigError, nearest_hint
from forge_plugins_data.dataset_config import DatasetConfig
from forge_plugins_data.file_selection import expanded, refuse_missing
from forge_plugins_data.hub_config import HubConfig

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset  # type: ignore[import-untyped]  # it has no types

    Loaded: TypeAlias = Dataset | IterableDataset

_FORMATS = ("parquet", "json", "csv", "text")
"""Of files that ``data_files`` names."""
_DEFAULT_SPLIT = "train"
_STATE = "state.json"
_OF_SAVED = (_STATE, "dataset_dict.json")
"""One of which a folder of ``save_to_disk`` has."""
_TEXT = ("string", "large_string", "string_view")


def load_split(config: HubConfig, *, streams: int | None = None) -> Loaded:
    """The split that a configuration names, whose column is known to be text.

    Args:
        streams: give an iterable data set, to be read by so many; what columns there are is not always known yet.

    Raises:
        ConfigError: ``datasets`` is not installed; no such data set, subset or split, or no network to fetch it; no
            such column, or one that is no text.
    """
    loaded: Any = load_rows(config) if streams is None else load_streams(config, streams)
    if loaded.features is not None:
        _require_text(loaded.features, config)
        loaded = loaded.select_columns([config.column]) if streams is not None else loaded
    return loaded


def read_rows(config: DatasetConfig) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of the split that a configuration names, and of each, for messages, which one it is. Columns with
    nothing in them are left out, in what is nested too, as lines of JSON leave them out.

    Raises:
        ConfigError: as ``load_split``, but for the column; a row cannot be read.
    """
    rows, number = iter(load_rows(config)), 1
    while (row := _next_row(rows, number, config)) is not None:
        yield _without_nothing(row), f"row {number} of {config.words}"
        number += 1


def _next_row(rows: Iterator[dict[str, Any]], number: int, config: DatasetConfig) -> dict[str, Any] | None:
    try:
        return next(rows, None)
    except Exception as error:  # bytes that are no UTF-8, offsets that lead nowhere: each has an error of its own
        said = f"{type(error).__name__}: {_first_line(error)}"
        raise ConfigError(f"{config.words} is damaged at row {number} or later: {said}") from error


def load_rows(config: DatasetConfig) -> Dataset:
    """The split that a configuration names, with all of its columns, by index.

    Raises:
        ConfigError: as ``load_split``, but for the column.
    """
    datasets, folder = _library(), expanded(config.path)
    if _is_saved(folder):
        return _load_saved(datasets, config, folder)
    return _load(datasets, config, folder, streaming=False)


def load_streams(config: DatasetConfig, streams: int) -> IterableDataset:
    """The rows of the split that a configuration names, with all of its columns, to be read from the beginning on, by
    so many.

    Raises:
        ConfigError: as ``load_split``, but for the column.
    """
    datasets, folder = _library(), expanded(config.path)
    if _is_saved(folder):
        saved = _load_saved(datasets, config, folder)
        return saved.to_iterable_dataset(num_shards=max(1, min(streams, len(saved))))
    return _load(datasets, config, folder, streaming=True)


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nothing(one) for key, one in value.items() if one is not None}
    return [_without_nothing(one) for one in value] if isinstance(value, list) else value


def local_files(config: DatasetConfig) -> list[tuple[str, int]]:
    """The names and sizes of the files that ``datasets`` reads, in its order, if they are on this machine. Other files
    of a folder are not among them."""
    folder = expanded(config.path)
    if _is_saved(folder):
        found = _saved_files(config, folder)
    elif folder.is_dir():
        found = _files_of_split(config, folder)
    else:  # of a format, whose patterns are relative to the working directory; those of a hub's name are not
        named = () if config.data_files is None or "/" in config.path else config.data_files
        patterns = [named] if isinstance(named, str) else named
        globs = (glob.glob(str(Path(one).expanduser()), recursive=True) for one in patterns)  # noqa: PTH207
        found = [Path(file) for files in globs for file in sorted(files)]
    return [(file.name, file.stat().st_size) for file in found if file.is_file()]


def _is_saved(folder: Path) -> bool:
    """Return whether it is a folder of ``save_to_disk``."""
    return any((folder / name).is_file() for name in _OF_SAVED)


def _saved_files(config: DatasetConfig, folder: Path) -> list[Path]:
    """Those of ``save_to_disk``, without what ``datasets`` has cached beside them."""
    if not (folder / _STATE).is_file():
        folder /= config.split or _DEFAULT_SPLIT
    try:
        return [folder / file["filename"] for file in json.loads((folder / _STATE).read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the saved data set {folder} is damaged: {_STATE}: {_first_line(error)}") from error


def _files_of_split(config: DatasetConfig, folder: Path) -> list[Path]:
    """Those of a folder that make up the split: by ``data_files`` relative to it, or by their names."""
    builder = _library().load_dataset_builder(str(folder), name=config.subset, data_files=_data_files(config))
    by_split = {str(name): files for name, files in (builder.config.data_files or {}).items()}
    return [Path(file) for file in by_split.get(config.split or _DEFAULT_SPLIT, ())]


def _data_files(config: DatasetConfig) -> str | list[str] | None:
    files = config.data_files
    return files if files is None or isinstance(files, str) else [*files]


def _library() -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise ConfigError(_not_installed(str(error.name))) from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _load_saved(datasets: Any, config: DatasetConfig, folder: Path) -> Dataset:
    """From ``save_to_disk``."""
    for key in ("subset", "data_files", "revision"):
        if (value := getattr(config, key)) is not None:
            raise ConfigError(f"{key} = {value!r} has no effect: path = {config.path!r} is a saved data set; remove it")
    try:
        saved: Dataset | DatasetDict = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise ConfigError(f"the saved data set {folder} is damaged: {_first_line(error)}") from error
    if not isinstance(saved, dict):
        if config.split is not None:
            raise ConfigError(f"split = {config.split!r} has no effect: {folder} is a single split; remove it")
        return saved
    name = config.split or _DEFAULT_SPLIT
    if name not in saved:
        raise _no_split(config, name, saved)
    return saved[name]


def _refuse_misplaced(config: DatasetConfig, folder: Path) -> None:
    """
    Raises:
        ConfigError: what is named is of another sort than its key, or is not there; or files have no such thing.
    """
    if folder.is_file():
        raise ConfigError(
            f"path = {config.path!r} is a file: set data_files = {config.path!r}, and path to its format "
            '("parquet", "json", "csv" or "text")'
        )
    if _is_local(config.path):
        refuse_missing(config.path)
    is_format = config.path in _FORMATS and not folder.is_dir()
    for key, is_idle in (("revision", is_format or folder.is_dir()), ("subset", is_format)):
        if (value := getattr(config, key)) is not None and is_idle:
            raise ConfigError(
                f"{key} = {value!r} has no effect: path = {config.path!r} is no data set of the hub; remove it"
            )


def _load(datasets: Any, config: DatasetConfig, folder: Path, *, streaming: bool) -> Any:
    """From the hub, its cache, a folder of files, or files of a format that ``path`` names."""
    _refuse_misplaced(config, folder)
    given = {
        "path": str(folder) if folder.is_dir() else config.path,
        "name": config.subset,
        "data_files": _data_files(config),
        "revision": config.revision,
        "streaming": streaming,
    }
    split = config.split or _DEFAULT_SPLIT
    try:
        try:
            return datasets.load_dataset(**given, split=split)
        except ValueError:
            names = [*datasets.load_dataset(**given)]  # raises once more, unless it was the split
            raise _no_split(config, split, names) from None
    except ConfigError:
        raise
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ConfigError(f"there is no {config.words} that this machine may read: {_first_line(error)}") from error
    except ConnectionError as error:
        raise ConfigError(_without_network(config, split, error)) from error
    except FileNotFoundError as error:
        raise ConfigError(f"{config.words} has no such files: {_first_line(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{config.words} cannot be loaded: {_first_line(error)} (keys subset, data_files)") from error
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # datasets says there was an error
        raise ConfigError(f"{config.words} cannot be loaded: {type(cause).__name__}: {_first_line(cause)}") from error


def what_is_missing(config: DatasetConfig) -> Iterable[str]:
    """A sentence for each thing that a data set needs and this machine does not have, as far as can be told here."""
    if importlib.util.find_spec("datasets") is None:
        yield _not_installed("datasets")
    if _is_local(config.path):
        try:
            refuse_missing(config.path)
        except ConfigError as error:
            yield str(error)


def _is_local(path: str) -> bool:
    """Return whether a path can be no name of the hub."""
    return path.startswith(("/", ".", "~")) or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is None


def _not_installed(package: str) -> str:
    return f"it needs the package {package}, which is not installed: pip install 'forge-plugins-data[huggingface]'"


def _without_network(config: DatasetConfig, split: str, error: Exception) -> str:
    name = "" if config.subset is None else f", name={config.subset!r}"
    call = f"load_dataset({config.path!r}{name}, split={split!r}).save_to_disk('corpus')"
    return (
        f"{config.words} is no folder here and not in the cache of datasets, and the Hugging Face Hub cannot be "
        f"reached ({_first_line(error)}). Where there is a network, save it: "
        f'python -c "from datasets import load_dataset; {call}"; '
        'then copy the folder corpus here, and set path = "corpus", without split.'
    )


def _no_split(config: DatasetConfig, split: str, there: Iterable[str]) -> ConfigError:
    names = [*there]
    hint = nearest_hint(split, names)
    return ConfigError(f"split = {split!r}: {config.words} has no such split, it has {', '.join(names)}{hint}")


def require_column(columns: Iterable[str], config: HubConfig) -> None:
    """
    Raises:
        ConfigError: the column for the text is not one of ``columns``.
    """
    names = [*columns]
    if config.column not in names:
        hint = nearest_hint(config.column, names)
        raise ConfigError(
            f"column = {config.column!r}: {config.words} has no such column, it has {', '.join(names)}{hint}"
        )


def _require_text(features: Any, config: HubConfig) -> None:
    require_column(features, config)
    feature = features[config.column]
    if getattr(feature, "dtype", None) not in _TEXT:
        raise ConfigError(f"column = {config.column!r}: in {config.words} it holds {feature}, not text")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
