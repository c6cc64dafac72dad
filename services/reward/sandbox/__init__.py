"""The code grader: untrusted Python against tests, each program in a sandbox of its own. See docs/sandbox.md.

parent (the service)          trusted; launches, holds the deadline, reads only the test runner's verdict
  |-- tests      in a sandbox: has the tests and the expected values, and none of the program's code
  |      ^ frames of plain data
  |-- candidate  in another:   has the program, and none of the tests
"""
