"""Tensors travel as numpy arrays of the same bits and come back as they were."""

import numpy as np
import pytest
import torch

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.dtypes import CARRIERS, ITEM_BYTES
from nccl_transfer.store.tensors import to_numpy_carrier, to_torch
from rlhf.errors import InvalidRequest


def random_tensor(dtype: str, *shape: int) -> torch.Tensor:
    """Random values, not random bits: numbers are compared."""
    values = torch.randint(
        0, 2 if dtype == "bool" else 100, shape, generator=torch.Generator().manual_seed(0)
    )
    return values.to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_element_type_survives_the_round_trip(dtype):
    tensor = random_tensor(dtype, 4, 3)
    array, name = to_numpy_carrier(tensor)
    assert (name, array.dtype, array.itemsize) == (dtype, CARRIERS[dtype], ITEM_BYTES[dtype])
    back = to_torch(array, name)
    assert back.dtype == tensor.dtype
    assert torch.equal(back.double(), tensor.double())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_both_directions_share_memory(dtype):
    tensor = random_tensor(dtype, 5)
    array, name = to_numpy_carrier(tensor)
    assert array.ctypes.data == tensor.data_ptr()
    assert to_torch(array, name).data_ptr() == tensor.data_ptr()


def test_bits_are_those_of_the_tensor():
    array, _ = to_numpy_carrier(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    assert array.tolist() == [0x3F80, 0xC000]


def test_strided_tensors_with_gradients_are_taken_as_they_are():
    tensor = torch.arange(6.0).reshape(2, 3).to(torch.bfloat16).requires_grad_().T
    array, name = to_numpy_carrier(tensor)
    assert torch.equal(to_torch(np.ascontiguousarray(array), name), tensor)


def test_jagged_columns_keep_their_lengths():
    lengths = np.array([2, 0, 3])
    jagged, name = to_numpy_carrier(Jagged(random_tensor("bfloat16", 5, 2), lengths))
    assert jagged.lengths is lengths
    assert torch.equal(to_torch(jagged.row(2), name), random_tensor("bfloat16", 5, 2)[2:])


@pytest.mark.filterwarnings("error")
def test_a_read_only_array_is_copied():
    array = np.frombuffer(b"\1\2", np.uint8)
    tensor = to_torch(array, "uint8")
    tensor[0] = 9
    assert array.tolist() == [1, 2]


def test_an_element_type_that_columns_cannot_have_is_refused():
    with pytest.raises(InvalidRequest, match="tensors of complex64 cannot be stored; allowed: bool, int8"):
        to_numpy_carrier(torch.zeros(1, dtype=torch.complex64))
