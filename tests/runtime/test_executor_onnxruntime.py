"""The CPU executor: state and pages in place, padding and empty parts harmless."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from dspark_trt.runtime import executor_onnxruntime
from dspark_trt.runtime.engine_dir import EngineDirError
from dspark_trt.runtime.executor_onnxruntime import OnnxRuntimeExecutor, VerifyStep
from dspark_trt.runtime.llm import LLM, SamplingParams
from dspark_trt.runtime.ragged import Chunk, pack_step
from dspark_trt.runtime.sampling import RowEdits

NO_EDITS = RowEdits(*(np.zeros(0, np.int64) for _ in range(3)), np.zeros(0, np.float32))
VOCAB, BLOCK = 128, 4


def executor(engine: Path, num_pages: int = 65) -> OnnxRuntimeExecutor:
    made = OnnxRuntimeExecutor(
        engine,
        slots=4,
        max_pages=16,
        num_pages=num_pages,
        page_size=8,
        vocab_size=VOCAB,
        block_size=BLOCK,
        threads=1,
    )
    for slot in range(4):
        made.state.set_pages(slot, range(1 + 16 * slot, 17 + 16 * slot))
    return made


def prefill(ex: OnnxRuntimeExecutor, slot: int, ids: list[int]) -> int:
    layout = pack_step([Chunk(slot, ids, emits=True)], [], 0)
    verdict = ex.verify(VerifyStep(layout, NO_EDITS, np.zeros((1, 2), np.float32)))
    return int(verdict.out_tokens[0, 0])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_pages_and_state_are_updated_where_they_lie(pair_engine: Path) -> None:
    ex = executor(pair_engine)
    pages = {name: array.ctypes.data for name, array in ex._pages.items()}
    token = prefill(ex, 2, [5, 6, 7])
    assert ex.state.arrays["kv_len"].tolist() == [0, 0, 3, 0]
    assert ex.state.arrays["last_token"][2] == token
    for name, array in ex._pages.items():
        assert array.ctypes.data == pages[name]
        assert np.abs(array[33, :3]).max(axis=(1, 2)).min() > 0, name  # its first page
        array[33, :3] = 0
        assert not array.any(), f"{name}: a row was written that belongs to no token"


def test_a_step_does_not_copy_the_pages(pair_engine: Path) -> None:
    ex = executor(pair_engine, num_pages=60_000)
    prefill(ex, 0, [5, 6, 7])
    assert ex.kv_bytes > 500e6
    before = resident_bytes()
    for slot in range(4):
        prefill(ex, slot, [9, 8, 7, 6])
    assert resident_bytes() - before < 0.2 * ex.kv_bytes


def test_a_step_of_chunks_alone_and_one_of_decoding_alone(pair_engine: Path) -> None:
    ex = executor(pair_engine)
    prefill(ex, 0, [5, 6, 7])
    layout = pack_step([], [0], 0)
    verdict = ex.verify(VerifyStep(layout, NO_EDITS, np.zeros((1, 2), np.float32)))
    assert verdict.n_out.tolist() == [1]
    assert verdict.lengths.tolist() == [0]
    assert verdict.out_tokens[0, 1:].tolist() == [-1] * BLOCK


@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_padding_rows_change_nothing(pair_engine: Path, poison: float) -> None:
    """A budget larger than what is verified leaves padding behind the real rows."""

    def run(budget: int) -> tuple[list[int], list[int]]:
        ex = executor(pair_engine)
        prefill(ex, 0, [5, 6, 7, 8])
        prefill(ex, 1, [15, 16])
        for array in ex._pages.values():
            array[0] = poison  # the page that padding points at; nobody may read or write it
        slots = np.array([0, 1], np.int32)
        drafts = ex.draft(slots, np.zeros((2, BLOCK), np.float32))
        layout = pack_step([], [0, 1], budget)
        verdict = ex.verify(
            VerifyStep(
                layout,
                NO_EDITS,
                np.zeros((2, 2), np.float32),
                drafts=drafts,
                u_accept=np.zeros((2, BLOCK), np.float32),
                caps=np.array([2, 1], np.int32),
                budget=budget,
            )
        )
        assert verdict.lengths.tolist() == [2, 1]
        return verdict.out_tokens.tolist(), ex.state.arrays["kv_len"].tolist()

    assert run(3) == run(2 * BLOCK)


def test_logits_come_when_asked_and_only_then(pair_engine: Path) -> None:
    ex = executor(pair_engine)
    for want in (True, False, True):
        layout = pack_step([Chunk(0, [5, 6, 7], emits=True, all_logits=True)], [], 0)
        ex.state.arrays["kv_len"][0] = 0
        step = VerifyStep(layout, NO_EDITS, np.zeros((1, 2), np.float32))
        verdict = ex.verify(step, want_logits=want)
        assert (verdict.logits is not None) == want
        if verdict.logits is not None:
            assert verdict.logits.shape == (3, VOCAB)
            assert int(verdict.logits[2].argmax()) == verdict.out_tokens[0, 0]


@pytest.mark.parametrize(
    ("vocab", "block", "page_size"),
    [(VOCAB + 1, BLOCK, 8), (VOCAB, BLOCK - 1, 8), (VOCAB, 0, 8), (VOCAB, BLOCK, 16)],
)
def test_graphs_of_other_dimensions_are_refused(
    pair_engine: Path, vocab: int, block: int, page_size: int
) -> None:
    with pytest.raises(EngineDirError, match=r"in the manifest and \d+ in target.onnx"):
        OnnxRuntimeExecutor(
            pair_engine,
            slots=4,
            max_pages=16,
            num_pages=65,
            page_size=page_size,
            vocab_size=vocab,
            block_size=block,
        )


def test_bodies_mean_the_same_without_any_optimisation(
    pair_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing rests on what ONNX Runtime folds or fuses; chunks alone and decoding alone."""

    def run() -> list[list[int]]:
        llm = LLM(pair_engine, threads=1)
        sampled = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, ignore_eos=True)
        greedy = SamplingParams(max_tokens=12, presence_penalty=0.5, ignore_eos=True)
        return [c.token_ids for c in llm.generate([[5, 6, 7], [9]], [sampled, greedy])]

    expected = run()

    def plain_session(path: Path, threads: int) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_mem_pattern = False
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(executor_onnxruntime, "_session", plain_session)
    assert run() == expected
