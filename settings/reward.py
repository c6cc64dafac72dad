"""Settings of rewards and costs: Python functions, reward models, the code grader, and rewards that ask an endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf.plugins import nearest
from settings.endpoints import HttpTable, JudgeTable
from settings.engines import Spec, ZeroTable, training_engine
from settings.hub import local_directory
from settings.model import OptimizerTable
from settings.reward_options import OPTIONS, check_options
from settings.service import ServiceTable
from settings.strict import Positive, Seconds, Strict

CHECKS_ANSWERS = frozenset({"exact_match", "gsm8k", "math"})
"""Names of the reward functions that compare a response with the ground truth of its row."""
BUILT_IN = frozenset(OPTIONS)
"""Names of the reward functions of this package."""


class SandboxTable(Strict):
    """Limits of the programs that the code grader, a reward of kind sandbox, runs; see docs/sandbox.md."""

    workers: int = Field(default=0, ge=0)
    """Number of programs that run at the same time. 0: one per CPU core."""
    wall_time_s: Seconds = 20.0
    """Time limit of all tests of a program together, in seconds of wall time. A value above `cpu_time_s` leaves
    programs enough time on a busy machine."""
    cpu_time_s: Positive = 10
    """Limit on the CPU time of all processes of a program together, in seconds, ended ones included."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Limit on the address space of each process, in MiB; where control groups can be made, also on the memory of all
    processes of a program together."""
    processes: Positive = 32
    """Maximum number of processes and threads that a program may have at the same time."""
    output_kb: Positive = 256
    """Maximum size of a test's result in KiB: the returned value or the standard output."""
    tmpfs_mb: Positive = 16
    """Size in MiB of /tmp, the only place a program may write to; it has room for 256 files per MiB."""
    score: Literal["all", "fraction"] = "all"
    """Score of a program: all gives 1 where every test passes, else 0; fraction gives the share of tests that pass. A
    row's metadata may choose the other."""
    cache_entries: Positive = 4096
    """Number of verdicts that are cached, so that a program that was graded with the same tests and limits is not run
    again."""
    allow_unsandboxed: bool = False
    """Where the host does not support sandboxes, runs programs without one, with all rights of the service, and warns
    of it in the log. false: the service does not start there."""


class RewardTable(ServiceTable):
    """Settings of a reward or cost: a Python function, a Hugging Face sequence-classification model, a language model
    that judges, the code grader, or a verifier behind an HTTP endpoint."""

    role: Literal["reward"]
    """Always reward, for costs too."""
    kind: Literal["function", "model", "sandbox", "judge", "http"] = "function"
    """Kind of the reward: function scores text with a Python function; model scores with a sequence-classification
    model; sandbox runs the program in the response against tests; judge asks a language model; http asks a program
    of your own by HTTP."""
    function: str = "exact_match"
    """For kind function: name of the function: exact_match, gsm8k, math, format, length, environment (the reward that
    the environment of an episode has given), or module:function for one of your own, which may score all responses to
    a prompt at once (`over_groups`) or be `async`. docs/rewards.md has the accepted signatures."""
    options: dict[str, str | int | float | bool] = {}
    """For kind function: keyword arguments that every call of the function gets, for example
    `options.mode = "flexible"` for gsm8k."""
    processes: int = Field(default=0, ge=0)
    """For kind function: number of processes that the function runs in, so that it may hang or crash: its process is
    killed, and the row has the cause in place of a score. Each has at most 4 GiB of address space, and 1 GiB for math
    and other verifiers. 0: the function runs in the service itself; math runs in one process per CPU core."""
    concurrency: Positive = 16
    """For kind function with an `async` function and no processes: maximum number of rows, or of groups for a function
    that scores groups, that are scored at the same time."""
    row_timeout_s: Seconds = 10.0
    """For kind function with processes or an `async` function: time limit of one row, or of one group for a function
    that scores groups, in seconds. math also limits the CPU time of a response to 2 s."""
    model: Path | None = None
    """For kind model: Hugging Face directory of the model and its tokenizer; or, where there is no such directory, a
    model on the Hugging Face hub, as owner/name or owner/name@revision (docs/models.md)."""
    input: Literal["text", "tensor"] = "text"
    """For kind model: form of the rows that the model reads. text: tokenizes texts with its own tokenizer; tensor:
    reads the actor's token ids, and must have the actor's vocabulary."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """For kind model: data type that the model is computed in. auto: bfloat16 on a GPU, float32 on a CPU."""
    sharded: bool = False
    """For kind model: shards every weight over all ranks, which then score together. false: each rank has the whole
    model and scores by itself; of a model that learns it has a copy, beside the shards that are trained."""
    engine: Literal["fsdp", "zero"] = "fsdp"
    """For kind model that is sharded or learns: training engine that shards it, FSDP2 or DeepSpeed ZeRO."""
    zero: ZeroTable = ZeroTable()
    """For engine zero: its stage, and whether it offloads the optimizer. A model that does not learn is sharded at
    stage 3 alone."""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """For kind model with an optimizer: data type of exported weights."""
    micro_batch_tokens: Positive = 16384
    """For kind model: maximum number of tokens, padding included, in one forward pass. A longer row has an error in
    place of a score."""
    optimizer: OptimizerTable | None = None
    """For kind model: optimizer of a model that learns (`--algo reward_model`); `model` may then also be a causal
    language model, whose backbone training starts from. Not given: the model only scores."""
    restarts: int = Field(default=3, ge=0)
    """Number of times that a call is sent again whose service was lost with it: killed, crashed, out of memory, moved.
    --launch and rlhf-deploy start the service again, and the run waits for it and goes on in the same step, with the
    same results (docs/checkpoints.md). 0: a lost service ends the run, or has it restarted from its checkpoint, and so
    does one that learns."""
    sandbox: SandboxTable = SandboxTable()
    """For kind sandbox: limits of the programs."""
    judge: JudgeTable = JudgeTable()
    """For kind judge: endpoint and prompt of the judge."""
    http: HttpTable = HttpTable()
    """For kind http: endpoint of the verifier."""

    @property
    def model_directory(self) -> Path | None:
        """Directory of the model that the service loads: `model` for kind model, or its copy in the hub's cache
        (`settings.hub`); None for other kinds."""
        return local_directory(self.model) if self.kind == "model" and self.model is not None else None

    @property
    def needs_ground_truth(self) -> bool:
        """Whether every row that the service scores needs a ground truth. False for a server of the user's own."""
        return self.kind == "function" and self.function in CHECKS_ANSWERS and not self.external

    @property
    def needs_tests(self) -> bool:
        """Whether every row that the service scores needs tests of its program (docs/sandbox.md)."""
        return self.kind == "sandbox" and not self.external

    @property
    def has_engine(self) -> bool:
        """Whether a training engine has the model: it is sharded, or it learns."""
        return self.kind == "model" and (self.sharded or self.optimizer is not None)

    @property
    def allowed_restarts(self) -> int:
        """`restarts` for a reward that does not learn, else 0."""
        return 0 if self.keeps_state else self.restarts

    @property
    def engine_specs(self) -> dict[str, Spec]:
        """Specs of the engines that the service needs, by the key that names each: `engine`, if it has one."""
        return {"engine": training_engine(self.engine)} if self.has_engine else {}

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.external:
            return self
        module, colon, function = self.function.partition(":")
        if self.kind == "function" and module in ("http", "https"):
            raise ValueError(
                f'function: {self.function!r} is an address; kind = "http" asks one, given in http.urls'
            )
        if self.kind == "function" and not (module and function if colon else module in BUILT_IN):
            known = sorted(BUILT_IN)
            raise ValueError(
                f"function: {self.function!r} is unknown{nearest(self.function, known)}; known: {', '.join(known)}, "
                "or module:function"
            )
        if self.kind == "function":
            check_options(self.function, self.options)
        if self.kind == "model" and self.model is None:
            raise ValueError("kind model needs model, the directory of a model or its name on the hub")
        if self.kind == "http" and not self.http.urls:
            raise ValueError("kind http needs http.urls, the addresses that score rows")
        missing = [key for key in ("url", "model") if not getattr(self.judge, key)]
        if self.kind == "judge" and missing:
            raise ValueError(f"kind judge needs {' and '.join(f'judge.{key}' for key in missing)}")
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine != "zero":
            if self.zero != ZeroTable():
                raise ValueError(f"zero is for engine zero, and engine is {self.engine}")
            return self
        if not self.has_engine:
            raise ValueError("engine is for a reward of kind model that is sharded or learns")
        if self.optimizer is None and self.zero.stage < 3:
            raise ValueError(
                f"zero.stage {self.zero.stage} does not shard a model that does not learn; 3 does"
            )
        return self

    @property
    def needs_torch(self) -> bool:
        """Whether the ranks use torch: for kind model, or where there are several ranks."""
        return self.kind == "model" or super().needs_torch
