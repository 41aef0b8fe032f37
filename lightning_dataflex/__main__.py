"""`python -m lightning_dataflex` is the command `dataflex`."""

from lightning_dataflex.cli import main

if __name__ == "__main__":
    main()
