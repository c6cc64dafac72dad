"""`python -m deploy.pipeline`."""

from deploy.pipeline.cli import main

if __name__ == "__main__":
    main()
