"""Runs the two graphs of an engine directory on ONNX Runtime's CPU provider.

K/V pages and the per-slot state are host arrays bound once as both input and output of the verify
graph, so that a step updates them where they lie. Everything else is bound per step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

from dspark_trt.runtime.engine_dir import EngineDirError
from dspark_trt.runtime.ragged import StepLayout
from dspark_trt.runtime.sampling import RowEdits
from dspark_trt.runtime.state import StepState


@dataclass(frozen=True, slots=True)
class Drafts:
    """A draft step's results."""

    # [B, G] int32
    tokens: np.ndarray
    # [B, G] f32
    conf_logits: np.ndarray
    # [B, G, V] f32, left where it was made: verification reads q from it
    logits: ort.OrtValue
    seconds: float  # in the graph


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """What a verify step is told beyond the layout."""

    layout: StepLayout
    edits: RowEdits
    # [R, 2] f32 recover, bonus
    u_extra: np.ndarray
    drafts: Drafts | None = None  # None = nothing was drafted
    # [B, G] f32
    u_accept: np.ndarray | None = None
    # [B] int32 bounds of the lengths
    caps: np.ndarray | None = None
    budget: int = 0  # K


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verify step's results."""

    # [R, G + 1] int32, -1 past n_out
    out_tokens: np.ndarray
    # [R] int32
    n_out: np.ndarray
    # [B] int32 drafts verified
    lengths: np.ndarray
    # [M, V] f32 raw logits of the asked rows, or None where nobody asked
    logits: np.ndarray | None
    seconds: float  # in the graph


class OnnxRuntimeExecutor:
    """One engine on the CPU: `draft` and `verify` are its two steps."""

    def __init__(
        self,
        engine_dir: Path,
        *,
        slots: int,
        max_pages: int,
        num_pages: int,
        page_size: int,
        vocab_size: int,
        block_size: int,
        threads: int = 0,
    ) -> None:
        """`threads` 0 = one per core; `block_size` 0 = an engine without a drafter."""
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.state = StepState(slots=slots, max_pages=max_pages, vocab_size=vocab_size)
        self.sts = np.ones(block_size, np.float32)
        self._verify = _session(engine_dir / "target.onnx", threads)
        self._draft = _session(engine_dir / "draft.onnx", threads) if block_size else None
        self._check_shapes(engine_dir, page_size)
        # Zeros are mapped by the system when first touched: unused pages cost no memory.
        self._pages = {
            i.name: np.zeros([num_pages, *i.shape[1:]], np.float32)
            for i in self._verify.get_inputs()
            if i.name.startswith(("kv.", "draft_kv."))
        }
        self._values = {
            name: ort.OrtValue.ortvalue_from_numpy(array)  # shares the array's memory
            for name, array in {**self._pages, **self.state.arrays}.items()
        }
        self._verify_binding = self._bound(self._verify)
        self._logits_bound: bool | None = None  # None: no output is bound yet
        self._draft_binding = self._bound(self._draft) if self._draft is not None else None

    def _check_shapes(self, engine_dir: Path, page_size: int) -> None:
        """Refuse graphs that are not those the manifest describes."""
        shapes = {i.name: i.shape for i in self._verify.get_inputs()}
        block = shapes["draft_tokens"][1] if "draft_tokens" in shapes else 0
        for name, graph, manifest in (
            ("page_size", shapes["kv.0.k"][1], page_size),
            ("vocab_size", shapes["bias"][1], self.vocab_size),
            ("block_size", block, self.block_size),
        ):
            if graph != manifest:
                raise EngineDirError(
                    f"engine {engine_dir}: {name} is {manifest} in the manifest and {graph} in "
                    "target.onnx: build the engine again"
                )

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pages, target's and drafter's."""
        return sum(array.nbytes for array in self._pages.values())

    def _bound(self, session: ort.InferenceSession) -> ort.IOBinding:
        binding = session.io_binding()
        for i in session.get_inputs():
            if i.name in self._values:
                binding.bind_ortvalue_input(i.name, self._values[i.name])
        return binding

    def draft(self, slots: np.ndarray, u_draft: np.ndarray) -> Drafts:
        """Drafts of the requests in `slots` [B] int32, with uniforms u_draft [B, G]."""
        assert self._draft is not None and self._draft_binding is not None
        binding = self._draft_binding
        binding.bind_cpu_input("slots", slots)
        binding.bind_cpu_input("u_draft", u_draft)
        for name in ("draft_tokens", "conf_logits", "draft_logits"):
            binding.bind_output(name)
        seconds = _run(self._draft, binding)
        tokens, conf, logits = binding.get_outputs()
        return Drafts(tokens.numpy(), conf.numpy(), logits, seconds)

    def verify(self, step: VerifyStep, *, want_logits: bool = False) -> Verdict:
        """Run the verify graph: K/V written, verdict drawn, state committed."""
        layout, binding = step.layout, self._verify_binding
        feeds = {
            "tokens_in": layout.tokens_in,
            "slots": layout.slots,
            "chunk_lens": layout.chunk_lens,
            "chunk_rows": layout.chunk_rows,
            "logit_rows": layout.logit_rows,
            "u_extra": step.u_extra,
            "edit_seq": step.edits.seq.astype(np.int32),
            "edit_k": step.edits.k.astype(np.int32),
            "edit_id": step.edits.id.astype(np.int32),
            "edit_value": step.edits.value,
        }
        if self.block_size:
            feeds |= self._draft_feeds(step)
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        if self.block_size and step.drafts is not None:
            binding.bind_ortvalue_input("draft_logits", step.drafts.logits)
        results = self._bind_results(layout, want_logits)
        seconds = _run(self._verify, binding)
        return Verdict(*results, seconds)

    def _bind_results(
        self, layout: StepLayout, want_logits: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Fresh arrays for what a step gives back; the state's and the pages' stay bound."""
        if want_logits != self._logits_bound:  # an output can only be unbound with all others
            self._logits_bound = None  # an interrupt below finds them to be bound again
            self._verify_binding.clear_binding_outputs()
            for name in [*self._pages, *StepState.IN_PLACE]:
                self._verify_binding.bind_ortvalue_output(f"{name}.out", self._values[name])
            self._logits_bound = want_logits
        sequences = len(layout.slots)
        out_tokens = np.empty((sequences, self.block_size + 1), np.int32)
        n_out = np.empty(sequences, np.int32)
        lengths = np.empty(sequences - layout.num_chunks, np.int32)
        arrays: dict[str, np.ndarray] = {
            "out_tokens": out_tokens,
            "n_out": n_out,
            "lengths": lengths,
        }
        logits = None
        if want_logits:
            logits = np.empty((len(layout.logit_rows), self.vocab_size), np.float32)
            arrays["logits"] = logits
        for name, array in arrays.items():
            value = ort.OrtValue.ortvalue_from_numpy(array)
            self._verify_binding.bind_ortvalue_output(name, value)
        return out_tokens, n_out, lengths, logits

    def _draft_feeds(self, step: VerifyStep) -> dict[str, np.ndarray]:
        batch, g = len(step.layout.slots) - step.layout.num_chunks, self.block_size
        feeds: dict[str, np.ndarray] = {
            "sts": self.sts,
            "budget": np.array([step.budget], np.int64),
        }
        if step.drafts is None:
            zeros = np.zeros((batch, g), np.float32)
            return feeds | {
                "draft_tokens": np.zeros((batch, g), np.int32),
                "conf_logits": zeros,
                "u_accept": zeros,
                "caps": np.zeros(batch, np.int32),
                "draft_logits": np.zeros((0, g, self.vocab_size), np.float32),
            }
        assert step.u_accept is not None and step.caps is not None
        return feeds | {
            "draft_tokens": step.drafts.tokens,
            "conf_logits": step.drafts.conf_logits,
            "u_accept": step.u_accept,
            "caps": step.caps,
        }


def _run(session: ort.InferenceSession, binding: ort.IOBinding) -> float:
    """Run a graph on what is bound; seconds it took."""
    begun = time.perf_counter()
    session.run_with_iobinding(binding)
    return time.perf_counter() - begun


def _session(path: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Shapes change from step to step: a pattern per shape would only pile up.
    options.enable_mem_pattern = False
    # Each session has its own threads; left to spin after a run, they slow the other's.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
