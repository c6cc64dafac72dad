"""Contract suites that every engine passes, as pytest classes for the authors of engines; docs/engines-of-your-own.md
has test files to copy. They need pytest."""

import pytest

pytest.register_assert_rewrite("services.testing.engines", "services.testing.rollouts")
