"""Base class of the roles with a language model and its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rlhf.errors import ConfigError
from rlhf.v1 import worker_pb2
from services.compute.device_memory import peak_memory_measured
from services.engines.implementation import implementation_of
from services.models.tokenizers import adds_eos, load_tokenizer, vocabulary_hash
from services.roles.engine_errors import as_contract_errors
from services.roles.profiler import CallProfiler
from services.roles.tokenization import tokenize_texts
from services.roles.torch_worker import TorchWorker
from services.roles.verified_worker import VerifiedWorker
from services.roles.weight_check import WeightCheck
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, require
from settings.model import LoadedModelTable
from settings.service import ServiceTable


class LanguageWorker(VerifiedWorker, TorchWorker):
    """Worker of a role that computes with a language model, in whatever engine.

    Args:
        table: Table of the service.
        ranks: Ranks of the service.

    Attributes:
        tokenizer: Tokenizer of the model's directory.
        eos_id: Its end-of-sequence token; None for a tokenizer without one.
        longest_row: Most tokens of a row that the service reads; a subclass sets it.
        vocab_size: Number of embeddings of the model; a subclass sets it.

    Raises:
        ConfigError: The directory has no tokenizer that can be loaded.
    """

    longest_row: int
    vocab_size: int
    writes_to_rows = True  # torch has no read-only tensors, and tensors share the memory of arrays

    def __init__(self, table: LoadedModelTable, ranks: Ranks) -> None:
        super().__init__(table, ranks)
        self.choose_libraries()
        try:
            self.tokenizer: Any = load_tokenizer(table.model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {error}") from error
        # Once: for a vocabulary of 128,000 it blocks the event loop for 0.1 s.
        self._vocabulary_hash = vocabulary_hash(self.tokenizer)
        self.eos_id: int | None = self.tokenizer.eos_token_id
        self._adds_eos = adds_eos(self.tokenizer)
        self.weight_check = WeightCheck(self.progressed)
        self._profiler = CallProfiler()

    @classmethod
    def import_engines(cls, table: ServiceTable) -> None:
        for key, spec in table.engine_specs.items():
            implementation_of(key, getattr(table, key), spec, object)

    def describe(self) -> worker_pb2.DescribeResponse:
        answer = self.libraries()
        answer.vocabulary_hash = self._vocabulary_hash
        return answer

    def around(self, run: Callable[[], CallResult]) -> CallResult:
        """Calls `run`, which runs a method, and returns its result. Profiles the call if an earlier call of the method
        `profile` requested it, measures its peak memory, and translates errors of engines to those that clients
        receive."""
        with (
            as_contract_errors(),
            peak_memory_measured(self.torch_device, releases_cache=self.shares_device),
            self._profiler.around_call(),
        ):
            return run()

    def tokenized(self, texts: list[str], call: CallContext, **options: Any) -> list[list[int]]:
        """Returns the token ids of each text by the role's tokenizer; options and errors as for `tokenize_texts`."""
        limits = {"max_tokens": self.longest_row, "vocab_size": self.vocab_size}
        return tokenize_texts(
            self.tokenizer, texts, call, progressed=self.progressed, **{**limits, **options}
        )

    def prompt_ids(self, prompts: list[str], call: CallContext) -> list[list[int]]:
        """Returns the token ids of prompts, which a response continues: with the special tokens of the tokenizer, but
        without the EOS token that it adds at the end. Errors as for `tokenize_texts`."""
        ids = self.tokenized(prompts, call)
        return [row[:-1] for row in ids] if self._adds_eos else ids

    def response_ids(self, responses: list[str], ends: list[str], call: CallContext) -> list[list[int]]:
        """Returns the token ids of responses as a policy generates them: without special tokens, except those that end
        each. Errors as for `tokenize_texts`.

        Args:
            responses: Texts of the responses.
            ends: For each the text that ends it, with its special tokens; empty: the end-of-sequence token of the
                tokenizer, where it has one.
            call: The call.
        """
        texts = [response + end for response, end in zip(responses, ends, strict=True)]
        eos = [] if self.eos_id is None else [self.eos_id]
        ids = self.tokenized(texts, call, add_special_tokens=False)
        return [row if end else [*row, *eos] for row, end in zip(ids, ends, strict=True)]

    def request_profile(self, request: Any) -> str:
        require(request, "directory", "calls")
        name = f"{self.role}-{self.ranks.rank}-v{self.policy_version}-{os.getpid()}.json"
        path = self.output_path(request.directory) / name
        self._profiler.arm(path, request.calls)
        return str(path)
