"""Contract suite that every transport passes, as a pytest class for the authors of transports; docs/transports.md has a
test file to copy. It needs pytest."""

import pytest

for _name in ("arrivals", "integrity", "leaks", "losses", "rows", "suite"):
    pytest.register_assert_rewrite(f"{__name__}.{_name}")
pytest.register_assert_rewrite("nccl_transfer.testing.held")
