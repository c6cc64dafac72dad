"""`python -m conformance`, where the script is not on the path."""

from conformance.cli import main

if __name__ == "__main__":
    main()
