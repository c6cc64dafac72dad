"""The code grader: runs untrusted Python programs against tests, each program in a sandbox. See docs/sandbox.md.

service             trusted: starts both sandboxes, enforces the deadline, reads only the test runner's verdict
  |-- test_runner   in a sandbox: has the tests with the expected values, and none of the program's code
  |      ^ frames of plain data
  |-- candidate     in another sandbox: has the program, and none of the tests
"""
