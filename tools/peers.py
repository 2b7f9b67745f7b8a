"""Other runtimes on the same prompts, greedy, one prompt at a time: Transformers and llama.cpp.

Both are given our token ids. Their decode time runs from the first token to the last, so prefill is
outside. Transformers runs in float32 with its default growing K/V cache; llama.cpp runs the GGUF's
own quantisation with its default float16 cache, from the `xllamacpp` wheel as installed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from dspark_trt.tools.bench_runs import WARM_UP_TOKENS, Answer, Sample, decoded
from dspark_trt.tools.extras import load_extra
from dspark_trt.tools.quiet import quiet_stderr


class PeerError(ValueError):
    """Another runtime cannot be compared with as asked."""


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One prompt's run: `tokens` drawn, an end token with them; all but the first in decode."""

    answer: Answer
    tokens: int
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJob:
    """What a peer is loaded for."""

    model: Path
    threads: int
    context: int  # tokens of the longest prompt and its answer
    eos_token_ids: Sequence[int]  # empty: end tokens are ordinary ones
    decode: Callable[[Sequence[int]], str]


class Peer(Protocol):
    """A loaded runtime."""

    name: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]]

    def __init__(self, job: PeerJob) -> None: ...

    @staticmethod
    def build() -> str:
        """How the installed library was built or set up, for the record."""

    @staticmethod
    def weights(model: Path) -> str:
        """What it holds the weights of `model` in."""

    def complete(self, prompt: Sequence[int], max_tokens: int) -> PeerRun:
        """Greedy text of at most `max_tokens` tokens."""


@dataclass(slots=True)
class PeerArm:
    """A peer over all prompts, one at a time."""

    peer: Peer
    prompts: Sequence[list[int]]
    max_tokens: int
    batch_size: int = 1
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.peer.name

    def warm_up(self) -> None:
        self.peer.complete(self.prompts[0], min(WARM_UP_TOKENS, self.max_tokens))

    def run(self) -> tuple[Sample, list[Answer]]:
        runs = [self.peer.complete(prompt, self.max_tokens) for prompt in self.prompts]
        steps = sum(decoded(run.tokens, stopped=False) for run in runs)
        sample = Sample(
            prefill_tokens=sum(map(len, self.prompts)),
            prefill_seconds=sum(run.prefill_seconds for run in runs),
            decode_tokens=steps,
            decode_seconds=sum(run.decode_seconds for run in runs),
            decode_steps=steps,
            request_steps=steps,
        )
        return sample, [run.answer for run in runs]


def check_peer(name: str, model: Path | None) -> None:
    """Refuse, before any work, a peer whose library or model is not there."""
    if model is None:
        raise PeerError(f"--compare {name} needs --compare-model: the checkpoint that it runs")
    gguf = model.suffix == ".gguf"
    if not model.exists() or not (gguf or model.is_dir()):
        raise PeerError(f"--compare-model {model}: there is no such directory or .gguf file")
    if name == "llamacpp" and not gguf:
        raise PeerError(f"--compare llamacpp needs a .gguf file as --compare-model, got {model}")
    needed = [*PEERS[name].libraries]
    if name == "transformers" and gguf:
        needed.append("accelerate")  # its GGUF reader asks for it
    for library in needed:
        load_extra(library, extra="bench", wanted_by=f"--compare {name}")


class TransformersPeer:
    """A Transformers model in float32."""

    name: ClassVar[str] = "transformers"
    libraries: ClassVar[tuple[str, ...]] = ("torch", "transformers")

    def __init__(self, job: PeerJob) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        torch.set_num_threads(job.threads)
        model = job.model
        where: dict[str, Any] = {"pretrained_model_name_or_path": model}
        if model.suffix == ".gguf":
            where = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
        with loading(self.name, model):
            self._model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        self._model.eval()
        ends = list(job.eos_token_ids)
        self._ends = frozenset(ends)
        self._decode = job.decode
        # Nothing of the checkpoint's own sampling defaults may stay.
        self._model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0
        )

    def complete(self, prompt: Sequence[int], max_tokens: int) -> PeerRun:
        import torch

        ids = torch.tensor([list(prompt)])
        stamps = Stamps()
        begun = time.perf_counter()
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, streamer=stamps
        )
        drawn = output[0, len(prompt) :].tolist()
        kept = drawn[:-1] if drawn and drawn[-1] in self._ends else drawn
        return PeerRun(
            answer=Answer(self._decode(kept), kept),
            tokens=len(drawn),
            prefill_seconds=stamps.times[0] - begun,
            decode_seconds=stamps.times[-1] - stamps.times[0],
        )

    @staticmethod
    def build() -> str:
        import torch

        return f"float32, {torch.get_num_threads()} torch threads"

    @staticmethod
    def weights(model: Path) -> str:
        return "float32"


class Stamps:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: object) -> None:
        """Called with the prompt first, then with each token."""
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        """Called after the last token."""


class LlamaCppPeer:
    """llama.cpp through xllamacpp's server object; its timings are its own."""

    name: ClassVar[str] = "llama.cpp"
    libraries: ClassVar[tuple[str, ...]] = ("xllamacpp",)

    def __init__(self, job: PeerJob) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(job.model)
        params.n_ctx = job.context
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = job.threads
        params.cpuparams_batch.n_threads = job.threads
        params.verbosity = 0
        self._ignore_eos = not job.eos_token_ids
        with loading(self.name, job.model):
            self._server = xllamacpp.Server(params)

    def complete(self, prompt: Sequence[int], max_tokens: int) -> PeerRun:
        done = self._server.handle_completions(
            {
                "prompt": list(prompt),
                "n_predict": max_tokens,
                "temperature": 0.0,
                "cache_prompt": False,
                "ignore_eos": self._ignore_eos,
            }
        )
        if not isinstance(done, dict) or "timings" not in done:
            raise PeerError(f"llama.cpp refused a prompt of {len(prompt)} tokens: {done}")
        timings = done["timings"]
        return PeerRun(
            answer=Answer(done["choices"][0]["text"], None),
            tokens=int(timings["predicted_n"]),
            prefill_seconds=timings["prompt_ms"] / 1e3,
            decode_seconds=timings["predicted_ms"] / 1e3,
        )

    @staticmethod
    def build() -> str:
        import xllamacpp

        return str(xllamacpp.get_system_info()).strip()

    @staticmethod
    def weights(model: Path) -> str:
        from dspark_trt.build.checkpoint import CheckpointError, open_target
        from dspark_trt.build.config import ConfigError

        try:
            return open_target(model).weight_dtype
        except (CheckpointError, ConfigError):  # llama.cpp reads more than we do
            return "GGUF"


# Name on the command line -> runtime.
PEERS: dict[str, type[Peer]] = {"transformers": TransformersPeer, "llamacpp": LlamaCppPeer}


@contextlib.contextmanager
def loading(name: str, model: Path) -> Iterator[None]:
    """Load quietly; what a library cannot read becomes a `PeerError`."""
    try:
        with quiet_stderr():
            yield
    except (OSError, ValueError, RuntimeError) as error:
        raise PeerError(f"{name} cannot load --compare-model {model}: {error}") from error
