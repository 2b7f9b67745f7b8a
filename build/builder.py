"""`build_engine`: a checkpoint (and a drafter) into a checked engine directory."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from dspark_trt.build.checkpoint import open_drafter, open_target, share_with_target
from dspark_trt.build.config import ConfigError, TargetDims, require
from dspark_trt.build.drafter import DraftGraph
from dspark_trt.build.graph import ModelWriter
from dspark_trt.build.paths import check_paths
from dspark_trt.build.perplexity import DEFAULT_TEXT, gives_finite_logits, text_ids
from dspark_trt.build.quantize import BITS, Quantizer
from dspark_trt.build.source import (
    CheckpointError,
    DrafterCheckpoint,
    TargetCheckpoint,
    WeightSource,
)
from dspark_trt.build.target import Drafter, TargetGraph
from dspark_trt.build.weights import WeightsFile
from dspark_trt.build.widen import TARGET_GRAPH, write_quantized
from dspark_trt.runtime.engine_dir import (
    CheckpointInfo,
    Limits,
    Manifest,
    read_manifest,
    write_engine_dir,
)

WEIGHTS, DRAFT_GRAPH = "weights.bin", "draft.onnx"
MAX_TEXT_TOKENS = 4096  # of the text that quantisation is measured on
PROBE_TOKENS = 16
BACKENDS = ("onnxruntime",)
DTYPES = ("float32",)
DEFAULT_SEQ_LEN = 4096  # where the checkpoint allows more and nobody asked

Progress = Callable[[int, int, str], None]  # bytes written, bytes in all, tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What `dspark build` is asked for; lengths in tokens, None = from the checkpoint."""

    model: Path
    output: Path
    drafter: Path | None = None
    tokenizer: Path | None = None
    backend: str = "onnxruntime"
    dtype: str = "float32"
    quantize: str = "none"
    perplexity_text: Path | None = None  # what quantisation is measured on; None = a text of ours
    max_batch_size: int = 8
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int = 512
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    page_size: int = 32

    def __post_init__(self) -> None:
        for name, choices in (
            ("backend", BACKENDS),
            ("dtype", DTYPES),
            ("quantize", tuple(BITS)),
        ):
            value = getattr(self, name)
            require(
                value in choices, f"--{name} must be one of {', '.join(choices)}, got {value!r}"
            )
        bounds = {
            "max_batch_size": (1, 1024),
            "max_input_len": (1, None),
            "max_seq_len": (2, None),
            "max_num_tokens": (1, None),
            "page_size": (1, 1024),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            flag = "--" + name.replace("_", "-")
            if value is not None:
                require(value >= low, f"{flag} must be >= {low}, got {value}")
                require(high is None or value <= high, f"{flag} must be <= {high}, got {value}")

    def check_paths(self) -> None:
        """Refuse an output that overlaps what is read, or that holds more than an engine."""
        check_paths(
            self.output,
            {"--model": self.model, "--drafter": self.drafter, "--tokenizer": self.tokenizer},
        )

    def text(self) -> str:
        """The text that quantisation is measured on."""
        path = self.perplexity_text or DEFAULT_TEXT
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--perplexity-text {path} cannot be read: {error.strerror or error}"
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--perplexity-text {path} must be UTF-8 text, byte {error.start} is not"
            ) from None

    def limits(self, target: TargetDims) -> Limits:
        """The engine's limits, checked against the checkpoint's context."""
        longest = target.max_position
        seq = self.max_seq_len or min(longest, DEFAULT_SEQ_LEN)
        require(
            seq <= longest,
            f"--max-seq-len must be <= {longest}, the checkpoint's max_position_embeddings, "
            f"got {seq}",
        )
        prompt = self.max_input_len or seq - 1
        require(
            prompt < seq,
            f"--max-input-len must be < --max-seq-len ({seq}), so that one token can follow, "
            f"got {prompt}",
        )
        return Limits(
            max_batch_size=self.max_batch_size,
            max_input_len=prompt,
            max_seq_len=seq,
            max_num_tokens=self.max_num_tokens,
        )


class CountingSource:
    """A weight source that reports what has been read."""

    def __init__(self, source: WeightSource, report: Callable[[int, str], None]) -> None:
        self._source, self._report = source, report
        self.path = source.path

    def names(self) -> list[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def tensor(self, name: str) -> np.ndarray:
        array = self._source.tensor(name)
        self._report(array.nbytes, name)
        return array


def build_engine(
    options: BuildOptions,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Manifest:
    """Build the engine directory `options.output`; it is complete or not there at all.

    `progress` hears of every tensor read, `say` of every measurement, as a line of text.

    Everything that can be refused is refused before the first weight is read: `CheckpointError`,
    `ConfigError` and `EngineDirError` name the field or file, the value and the bound.
    """
    options.check_paths()
    text = options.text()
    target = open_target(options.model, options.tokenizer)
    drafter = None
    if options.drafter:
        drafter = share_with_target(open_drafter(options.drafter, target.dims), target.weights)
    limits = options.limits(target.dims)
    ids = text_ids(target.tokenizer.tokenizer_json, text)[:MAX_TEXT_TOKENS]
    require(
        options.quantize == "none" or len(ids) > 1,
        f"--perplexity-text {options.perplexity_text} has no text to measure on",
    )
    with write_engine_dir(
        options.output, expected_bytes=_expected_bytes(target, drafter)
    ) as staged:

        def write(to: Path, quantizer: Quantizer) -> None:
            write_graphs(to, target, drafter, options, quantizer, progress)

        measured: dict[str, float] = {}
        if options.quantize == "none":
            write(staged.path, Quantizer())
            _probe(staged.path / TARGET_GRAPH, options.model, target.dims)
        else:
            measured = write_quantized(staged.path, options.quantize, ids, write, say)
        _write_tokenizer(staged.path, target)
        manifest = _manifest(options, target, drafter, limits, measured)
        staged.describe(manifest)
    return read_manifest(options.output)


def _probe(graph: Path, model: Path, dims: TargetDims) -> None:
    """Refuse a model that computes NaN or infinities from finite weights."""
    ids = np.linspace(0, dims.vocab_size - 1, min(PROBE_TOKENS, dims.max_position)).astype(int)
    if not gives_finite_logits(graph, ids.tolist()):
        raise CheckpointError(
            f"{model}: the model gives non-finite logits: a prompt of {len(ids)} tokens over the "
            "vocabulary does not end in finite numbers. The checkpoint is damaged, or its config "
            "(rope, rms_norm_eps) is not the one it was trained with"
        )


def write_graphs(
    directory: Path,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint | None,
    options: BuildOptions,
    quantizer: Quantizer,
    progress: Progress | None,
) -> None:
    """Weights and graphs into `directory`, each tensor read once and dropped once written."""
    total = _read_bytes(target, drafter)
    done = 0

    def report(nbytes: int, name: str) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(min(done, total), total, name)

    source = CountingSource(target.weights, report)
    built_in = Drafter(drafter.dims, CountingSource(drafter.weights, report)) if drafter else None
    with WeightsFile(directory / WEIGHTS) as weights:
        writer = ModelWriter(weights)
        TargetGraph(writer, target.dims, source, quantizer, options.page_size, built_in).write()
        models = {TARGET_GRAPH: writer}
        if built_in is not None:
            writer = ModelWriter(weights)
            DraftGraph(writer, built_in, target.dims, source, quantizer, options.page_size).write()
            models[DRAFT_GRAPH] = writer
    for name, writer in models.items():
        writer.save(directory / name, name.removesuffix(".onnx"))


def _read_bytes(target: TargetCheckpoint, drafter: DrafterCheckpoint | None) -> int:
    """Bytes of all tensors of the checkpoints, in float32."""
    sources = (target.weights, *([drafter.weights] if drafter else []))
    return sum(4 * int(np.prod(s.shape(name))) for s in sources for name in s.names())


def _expected_bytes(target: TargetCheckpoint, drafter: DrafterCheckpoint | None) -> int:
    """The most that a build has on the disk at once: what is refused early where it is not free.

    That is the float32 form, a tied head stored twice. A quantised build writes that form too,
    measures it and removes it, and what comes after is smaller.
    """
    dims = target.dims
    table = 4 * dims.vocab_size * dims.layer.hidden_size
    return _read_bytes(target, drafter) + (table if dims.tie_word_embeddings else 0)


def _write_tokenizer(directory: Path, target: TargetCheckpoint) -> None:
    folder = directory / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(target.tokenizer.tokenizer_json, encoding="utf-8")
    config = json.dumps(target.tokenizer.config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")


def _manifest(
    options: BuildOptions,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint | None,
    limits: Limits,
    measured: dict[str, float],
) -> Manifest:
    libraries = ("onnx", "onnxruntime", "numpy", "gguf", "safetensors", "tokenizers")
    versions = {name: metadata.version(name) for name in libraries}
    return Manifest(
        dspark_version=metadata.version("dspark-trt"),
        versions={"python": platform.python_version(), **versions},
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        backend=options.backend,
        dtype=options.dtype,
        quantize=options.quantize,
        checkpoint=CheckpointInfo(
            name=Path(options.model).resolve().name,
            format=target.source_format,
            content_hash=target.content_hash,
            weight_dtype=target.weight_dtype,
        ),
        target=dataclasses.asdict(target.dims),
        limits=limits,
        page_size=options.page_size,
        drafter_checkpoint=CheckpointInfo(
            name=Path(options.drafter).resolve().name,
            format="deepspec",
            content_hash=drafter.content_hash,
            weight_dtype=drafter.weight_dtype,
        )
        if drafter and options.drafter
        else None,
        drafter=dataclasses.asdict(drafter.dims) if drafter else None,
        gather_context_logits=options.gather_context_logits,
        gather_generation_logits=options.gather_generation_logits,
        measured=measured,
    )
