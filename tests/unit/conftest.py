"""Tiny models on disk, shared by the tests of whatever computes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# As a rank does: with more, tests that run beside others mostly wait for each other's threads.
torch.set_num_threads(1)

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCABULARY = 61


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A default process group of this process alone, for the tests of a module."""
    store = tmp_path_factory.mktemp("process_group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words w3, w4, ... and the special tokens that the tiny models know."""
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, VOCABULARY))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


@pytest.fixture(scope="session")
def make_tiny_llama(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Callable[..., Path]:
    """Writes a directory with a random Llama of 2 layers, its tokenizer, and what is asked of its config.

    Its weights are wide enough to make some tokens much more probable than others.
    """

    def make(**config) -> Path:
        torch.manual_seed(7)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=64,
                initializer_range=0.25,
                pad_token_id=PAD_ID,
                bos_token_id=BOS_ID,
                eos_token_id=EOS_ID,
                **config,
            )
        )
        directory = tmp_path_factory.mktemp("tiny_llama")
        model.save_pretrained(directory)
        tiny_tokenizer.save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def tiny_llama_dir(make_tiny_llama: Callable[..., Path]) -> Path:
    return make_tiny_llama()


@pytest.fixture(scope="session")
def tiny_tied_llama_dir(make_tiny_llama: Callable[..., Path]) -> Path:
    """One whose output layer is its embedding."""
    return make_tiny_llama(tie_word_embeddings=True)
