"""The engine directory: the one contract between build and runtime. Standard library only.

    DIR/manifest.json    what the engine is, and size and SHA-256 of every other file
    DIR/...              graphs or plans, weights, tokenizer (all listed under `files`)
    DIR/sts.json, DIR/cost_table.json    made later, not listed; they name the `engine_hash`

A directory with a manifest is complete: the manifest is written last, in a directory that takes its
place in one step (`directory_swap`). What is loaded is checked against it first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from dspark_trt.runtime.directory_swap import staged_directory, sync, sync_tree
from dspark_trt.runtime.file_hash import FileEntry, HashingWriter, sha256_file, sha256_open
from dspark_trt.runtime.held_directory import HeldDirectory
from dspark_trt.runtime.manifest_bounds import (
    MAX_COUNT,
    BoundError,
    check_dims,
    check_page_size,
)
from dspark_trt.runtime.typed_json import JsonError, canonical, from_json, parse_json, read_json

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
# A link, a folder or nothing where a plain file must be.
NO_FILE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OPEN_TRIES = 20  # a directory replaced while it is read is read again
# What a backend loads; a manifest must list it, since only listed files are checked.
NEEDED_FILES: dict[str, tuple[str, ...]] = {
    "onnxruntime": (
        "target.onnx",
        "weights.bin",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    ),
}
NEEDED_WITH_DRAFTER: dict[str, tuple[str, ...]] = {"onnxruntime": ("draft.onnx",)}


class EngineDirError(ValueError):
    """An engine directory cannot be written, or is not one that this version can load."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Where weights came from."""

    name: str  # last part of the path
    format: str  # "huggingface" | "gguf" | "tensorrt-llm" | "deepspec"
    content_hash: str
    weight_dtype: str

    def __post_init__(self) -> None:
        if "/" in self.name or "\\" in self.name:
            raise EngineDirError(f"checkpoint name must be no path, got {self.name!r}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine was built for, in requests and tokens."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if not 1 <= value <= MAX_COUNT:
                raise EngineDirError(f"{item.name} must be in [1, {MAX_COUNT}], got {value}")
        if self.max_input_len > self.max_seq_len:  # tokens of a prompt
            raise EngineDirError(
                f"max_input_len must be <= max_seq_len ({self.max_seq_len}), "
                f"got {self.max_input_len}"
            )


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that plans were built on."""

    name: str
    compute_capability: str  # "9.0"


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that the runtime must know of an engine before it opens a graph."""

    dspark_version: str
    versions: dict[str, str]  # "python", "onnx", "onnxruntime" or "tensorrt", ...
    created: str  # UTC, ISO 8601
    backend: str  # "onnxruntime" | "tensorrt"
    dtype: str
    quantize: str
    checkpoint: CheckpointInfo
    target: dict[str, object]  # dataclasses.asdict(TargetDims)
    limits: Limits
    page_size: int
    drafter_checkpoint: CheckpointInfo | None = None
    drafter: dict[str, object] | None = None  # dataclasses.asdict(DrafterDims)
    tiers: tuple[int, ...] = ()  # total tokens of a step, ascending
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    gpu: Gpu | None = None
    measured: dict[str, float] = field(default_factory=dict)  # at build, e.g. perplexities
    files: dict[str, FileEntry] = field(default_factory=dict)  # relative path -> entry
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        for name in self.files:
            check_relative(name)

    def to_json(self) -> dict[str, object]:
        """This manifest as JSON values."""
        return dataclasses.asdict(self)

    @property
    def engine_hash(self) -> str:
        """SHA-256 of the canonical JSON without `created`: equal builds have equal hashes."""
        value = self.to_json()
        del value["created"]
        return hashlib.sha256(canonical(value)).hexdigest()

    def require_version(self, library: str, installed: str) -> None:
        """Refuse a library other than the one the engine was built with (plans are tied to it)."""
        built = self.versions.get(library)
        if built != installed:
            raise EngineDirError(
                f"the engine was built with {library} {built}, this process has {installed}: "
                f"build the engine again here, or install {library} {built}"
            )

    def require_gpu(self, found: Gpu) -> None:
        """Refuse a GPU of another compute capability than the plans were built on."""
        if self.gpu is None or self.gpu.compute_capability != found.compute_capability:
            built = f"{self.gpu.name} (sm {self.gpu.compute_capability})" if self.gpu else "no GPU"
            raise EngineDirError(
                f"the engine was built on {built}, this GPU is {found.name} "
                f"(sm {found.compute_capability}): build the engine again on this GPU"
            )


def check_relative(name: str) -> None:
    """Refuse a file name that leaves the engine directory, or is the manifest's own."""
    parts = PurePosixPath(name).parts
    plain = name != "" and "/".join(parts) == name and ".." not in parts
    if not plain or name.startswith("/") or "\\" in name or "\0" in name or name == MANIFEST:
        raise EngineDirError(f"files must be named inside the engine directory, got {name!r}")


class StagedEngine:
    """An engine directory being written: put files under `path`, then `describe` them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: dict[str, FileEntry] = {}
        self._manifest: Manifest | None = None

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[HashingWriter]:
        """A new file `name`, hashed while it is written."""
        check_relative(name)
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            writer = HashingWriter(file)
            yield writer
        self._written[name] = writer.entry()

    def describe(self, manifest: Manifest) -> None:
        """Say what this engine is; `files` is filled in at the end, from what is there then."""
        self._manifest = manifest

    def seal(self) -> Manifest:
        """Hash what was not hashed yet, flush all to the disk, write the manifest last."""
        if self._manifest is None:
            raise RuntimeError("an engine directory was finished before describe()")
        files = {}
        for path in sorted(p for p in self.path.rglob("*") if not p.is_dir()):
            name = path.relative_to(self.path).as_posix()
            if path.is_symlink() or not path.is_file():
                raise RuntimeError(f"{name} in the engine directory is not a plain file")
            known = self._written.get(name)
            same = known is not None and known.bytes == path.stat().st_size
            files[name] = known if same and known is not None else sha256_file(path)
        value = dataclasses.replace(self._manifest, files=files).to_json()
        text = json.dumps(value, indent=2, allow_nan=False) + "\n"
        sync_tree(self.path)
        with (self.path / MANIFEST).open("x", encoding="utf-8") as file:
            file.write(text)
        sync(self.path / MANIFEST)
        sync(self.path)
        return from_json(Manifest, json.loads(text), MANIFEST)


def check_output(output: Path) -> None:
    """Refuse an output that is neither absent, empty nor an engine directory; quick."""
    target = output.resolve()
    if not target.exists():
        return
    if not target.is_dir():
        raise EngineDirError(f"output {output} is a file: name a directory")
    if os.path.ismount(target):
        raise EngineDirError(
            f"output {output} is a mount point and cannot be replaced: name a directory inside it"
        )
    if next(target.iterdir(), None) is None:
        return
    try:
        value = read_json(target / MANIFEST, max_bytes=MAX_MANIFEST_BYTES)
    except (OSError, JsonError):
        value = None
    if not (isinstance(value, dict) and "dspark_version" in value):
        raise EngineDirError(
            f"output {output} is not empty and holds no engine (no {MANIFEST} of ours): "
            "name another directory, or empty this one"
        )


@contextlib.contextmanager
def write_engine_dir(output: Path, *, expected_bytes: int = 0) -> Iterator[StagedEngine]:
    """Yield the directory to fill; it replaces `output` when the block ends well, whole.

    On an error, a signal or a full disk `output` stays as it was. `expected_bytes` is what the
    files will take: refused at once where that much is not free. Raises `EngineDirError`.
    """
    check_output(output)
    target = output.resolve()
    _check_free(output, target, expected_bytes)
    try:
        with staged_directory(target) as path:
            staged = StagedEngine(path)
            yield staged
            staged.seal()
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise EngineDirError(
            f"writing the engine for {output} stopped: {error.strerror} "
            f"({_free(target) / 1e6:.0f} MB free). What was at {output} is unchanged: free some "
            "space, raise the limit on file sizes, or name an output on another disk"
        ) from error


def _free(target: Path) -> int:
    """Bytes free on the filesystem that will hold `target`."""
    folder = next(p for p in target.parents if p.exists())
    return shutil.disk_usage(folder).free


def _check_free(output: Path, target: Path, expected_bytes: int) -> None:
    if expected_bytes > (free := _free(target)):
        raise EngineDirError(
            f"output {output} needs {expected_bytes / 1e6:.0f} MB beside what is there, "
            f"{free / 1e6:.0f} MB are free: free some space, or name an output on another disk"
        )


@dataclass(frozen=True, slots=True)
class EngineDir:
    """A checked engine directory."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """The path of a listed file; `EngineDirError` if the engine has none of that name."""
        if name not in self.manifest.files:
            raise EngineDirError(f"engine {self.path} has no file {name!r}: build it again")
        return self.path / name


def read_manifest(directory: Path) -> Manifest:
    """The manifest of an engine directory; the files it lists are not looked at."""
    with _held(directory) as held:
        return _manifest_of(held)


def _held(directory: Path) -> HeldDirectory:
    try:
        return HeldDirectory(directory)
    except (FileNotFoundError, NotADirectoryError):
        raise EngineDirError(
            f"engine {directory} is not a directory: make one with `dspark build`"
        ) from None
    except OSError as error:
        raise EngineDirError(f"cannot read engine {directory}: {error.strerror}") from None


def _manifest_of(held: HeldDirectory) -> Manifest:
    directory, path = held.path, held.path / MANIFEST
    try:
        with held.open(MANIFEST) as file:
            data = file.read(MAX_MANIFEST_BYTES + 1) or b""
        value = parse_json(data, path, max_bytes=MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise EngineDirError(
            f"{directory} holds no {MANIFEST}, so it is no engine: make one with `dspark build`"
        ) from None
    except JsonError as error:
        raise EngineDirError(f"{error}: build the engine again") from None
    except OSError as error:
        raise EngineDirError(f"cannot read {path}: {error.strerror}") from None
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise EngineDirError(
            f"engine {directory} has schema version {version!r}, this dspark reads "
            f"{SCHEMA_VERSION}: build the engine again"
        )
    try:
        manifest = from_json(Manifest, value, str(path))
        check_page_size(manifest.page_size)
        check_dims(manifest.target, manifest.drafter)
    except JsonError as error:
        raise EngineDirError(f"{error}: build the engine again") from None
    except BoundError as error:
        raise EngineDirError(f"{path}: {error}: build the engine again") from None
    return manifest


def open_engine_dir(directory: Path, *, verify: Literal["hash", "size"] = "hash") -> EngineDir:
    """Read the manifest and check every file it lists, by size and (unless "size") by hash.

    Every file that the backend loads must be listed. Manifest and files are read from one directory
    that is held open; where another one took its name meanwhile that one is read, so a reader sees
    the old engine or the new one, never a mixture. Raises `EngineDirError` naming the file, what
    was found, what is listed.
    """
    if verify not in ("hash", "size"):
        raise EngineDirError(f"verify must be 'hash' or 'size', got {verify!r}")
    for _ in range(OPEN_TRIES):
        with _held(directory) as held:
            try:
                manifest = _manifest_of(held)
                _check_listed(directory, manifest)
                for name, entry in manifest.files.items():
                    _check_file(held, name, entry, verify)
            except EngineDirError:
                if held.is_at_its_path():
                    raise
            else:
                if held.is_at_its_path():
                    return EngineDir(directory, manifest)
    raise EngineDirError(f"engine {directory} is being replaced over and over: try again later")


def _check_listed(directory: Path, manifest: Manifest) -> None:
    needed = NEEDED_FILES.get(manifest.backend, ())
    if manifest.drafter is not None:
        needed += NEEDED_WITH_DRAFTER.get(manifest.backend, ())
    if missing := [name for name in needed if name not in manifest.files]:
        raise EngineDirError(
            f"{directory / MANIFEST} does not list {', '.join(missing)}, which would be loaded "
            "unchecked: build the engine again"
        )


def _check_file(held: HeldDirectory, name: str, entry: FileEntry, verify: str) -> None:
    path = held.path / name
    try:
        with held.open(name) as file:
            found = FileEntry(os.fstat(file.fileno()).st_size, entry.sha256)
            if found.bytes == entry.bytes and verify == "hash":
                found = sha256_open(file)
    except OSError as error:
        if error.errno in NO_FILE:
            raise EngineDirError(
                f"engine {held.path} lacks its file {name}: build it again"
            ) from None
        raise EngineDirError(f"cannot read {path}: {error.strerror}") from None
    if found.bytes != entry.bytes:
        raise EngineDirError(
            f"{path} has {found.bytes} bytes, {MANIFEST} says {entry.bytes}: build the engine again"
        )
    if found.sha256 != entry.sha256:
        raise EngineDirError(
            f"{path} has SHA-256 {found.sha256[:16]}..., {MANIFEST} says {entry.sha256[:16]}...: "
            "the file was changed, build the engine again"
        )
