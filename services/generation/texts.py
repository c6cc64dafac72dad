"""Converts responses and pre-training texts of the actor to token ids, and generated token ids to texts."""

from __future__ import annotations

from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest
from services.roles.columns import Sequences, jagged_ids
from services.roles.language_worker import LanguageWorker
from services.roles.tokenization import unknown_token
from services.rollout.stops import StopStrings
from services.runtime.worker import CallContext


class TextCodec:
    """Encodes and decodes texts with the actor's tokenizer.

    Args:
        worker: Worker of the service, which has the tokenizer.
    """

    def __init__(self, worker: LanguageWorker) -> None:
        self._tokenizer, self._tokenize, self._eos_id = worker.tokenizer, worker.tokenized, worker.eos_id
        self._vocab_size = worker.vocab_size

    def stop_strings(self, texts: tuple[str, ...]) -> StopStrings | None:
        """Returns a matcher of a request's stop strings; None if `texts` is empty."""
        if not texts:
            return None
        return StopStrings(texts, self._decode, frozenset(self._tokenizer.all_special_ids))

    def observation_ids(
        self, observations: list[str], call: CallContext
    ) -> tuple[list[list[int]], list[str]]:
        """Returns the token ids of texts that environments add, and for each a sentence that says why the model cannot
        read it, empty where it can. Errors as for `tokenize`, but for tokens beyond the model's embeddings."""
        ids = self._tokenize(observations, call, add_special_tokens=False, vocab_size=None)
        faults = [unknown_token(self._tokenizer, row, self._vocab_size) for row in ids]
        return ids, [fault and f"the observation {fault}" for fault in faults]

    def response_texts(self, responses: Jagged[Tensor], stop: StopStrings | None) -> list[str]:
        """Returns the texts of generated responses without special tokens, each cut before its first stop string;
        whole if `stop` is None."""
        texts = self._decode(responses.tolist())
        return [stop.cut(text) for text in texts] if stop else texts

    def episode_texts(
        self, responses: list[list[int]], begun: list[int], stop: StopStrings | None
    ) -> list[str]:
        """Returns the texts of whole responses without special tokens. The last turn of each begins after its first
        `begun` tokens, and ends before its first stop string."""
        texts = self._decode(responses)
        if not stop:
            return texts
        before = self._decode([row[:count] for row, count in zip(responses, begun, strict=True)])
        return [stop.cut(text, len(first)) for text, first in zip(texts, before, strict=True)]

    def pretraining_sequences(self, texts: list[str], call: CallContext) -> Sequences:
        """Returns texts as sequences that end with an end-of-sequence token, which is added where it is missing, unless
        the tokenizer has none. The first token of a text is the prompt of its sequence, and all later ones are the
        response, so that the loss covers them.

        Raises:
            InvalidRequest: A text has no tokens, and the tokenizer no end-of-sequence token.
        """
        ids = [self._ended(row) for row in self._tokenize(texts, call)]
        return Sequences(jagged_ids([row[:1] for row in ids]), jagged_ids([row[1:] for row in ids]))

    def _ended(self, ids: list[int]) -> list[int]:
        """Returns token ids with an end-of-sequence token at the end, which is added unless there is one or the
        tokenizer has none; raises InvalidRequest if the result is empty."""
        if self._eos_id is not None and ids[-1:] != [self._eos_id]:
            ids = [*ids, self._eos_id]
        if not ids:
            raise InvalidRequest("an empty text has no tokens to learn from")
        return ids

    def _decode(self, rows: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(rows, skip_special_tokens=True)
